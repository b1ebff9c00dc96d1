"""A recipe's keys, read from the source of its Config dataclass without importing it."""

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from solotune.config.component import Component
from solotune.errors import ConfigError

REQUIRED = object()

# The only names an annotation in Config may use.
_TYPE_NAMES: dict[str, Any] = {
    "Any": Any,
    "Component": Component,
    "Literal": Literal,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "str": str,
    "tuple": tuple,
}
_TYPE_SYNTAX = (
    ast.Expression,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Subscript,
    ast.Tuple,
    ast.BinOp,
    ast.BitOr,
)


@dataclass(frozen=True)
class Field:
    """One key of a recipe: its type, its literal default or REQUIRED, the comment beside it."""

    name: str
    annotation: Any
    annotation_text: str
    default: Any
    comment: str

    @property
    def takes_component(self) -> bool:
        members = get_args(self.annotation) or (self.annotation,)
        return Component in members or list[Component] in members


Schema = dict[str, Field]


def read_schema(recipe_path: Path) -> Schema:
    """Return the fields of the recipe's Config in their order.

    Raises ConfigError where the file has no such class, or a type or default that source alone does
    not tell.
    """
    try:
        source = recipe_path.read_text(encoding="utf-8")
        tree = ast.parse(source, str(recipe_path))
    except UnicodeDecodeError:
        raise ConfigError(f"{recipe_path}: not UTF-8 text: is this a recipe?") from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{recipe_path}{line}: not Python: {error.args[0]}") from None

    config = next(
        (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config"), None
    )
    if config is None:
        raise ConfigError(
            f"{recipe_path}: a recipe has a dataclass named Config, this file has none:"
            " start from `tune cp full_finetune_single_device`"
        )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}

    schema: Schema = {}
    for statement in config.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            place = f"{recipe_path}:{statement.lineno}"
            schema[name] = Field(
                name=name,
                annotation=_annotation(statement.annotation, name, place),
                annotation_text=ast.unparse(statement.annotation),
                default=_default(statement.value, name, place),
                comment=comments.get(statement.end_lineno or statement.lineno, ""),
            )
    return schema


def _annotation(node: ast.expr, name: str, place: str) -> Any:
    for part in ast.walk(node):
        known = isinstance(part, _TYPE_SYNTAX)
        if not known or (isinstance(part, ast.Name) and part.id not in _TYPE_NAMES):
            raise ConfigError(
                f"{name}: the type {ast.unparse(node)} of a Config field is made of"
                f" {', '.join(_TYPE_NAMES)} and None only ({place})"
            )
    # Only the names above and literals are left, so that evaluating it can run nothing else.
    expression = compile(ast.Expression(node), place, "eval")
    try:
        return eval(expression, {"__builtins__": {}}, _TYPE_NAMES)
    except TypeError as error:
        raise ConfigError(f"{name}: not a type: {error} ({place})") from None


def _default(node: ast.expr | None, name: str, place: str) -> Any:
    if node is None:
        return REQUIRED
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(
            f"{name}: the default {ast.unparse(node)} of a Config field must be a literal,"
            f" so that `tune` reads it without importing torch ({place})"
        ) from None

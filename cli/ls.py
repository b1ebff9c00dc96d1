"""`tune ls`: recipes and configs, read from their folders."""

import ast
import json
from pathlib import Path

from solotune.config.command_line import Parser
from solotune.config.registry import configs, recipe_of, recipes

HELP = """\
List the recipes, each with the configs made for it.

A filter keeps what contains it, in the name of a recipe or of a config:

  tune ls llama3"""


def main(words: list[str]) -> int:
    """Print the recipes and configs that contain the filter."""
    parser = Parser(prog="tune ls", description=HELP)
    parser.add_argument("filter", nargs="?", default="", help="part of a name")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    options = parser.parse_args(words)
    rows = listing(options.filter)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['recipe']}: {row['summary']}")
        for config in row["configs"]:
            print(f"    {config}")
    if not rows:
        print(f"no recipe and no config contains {options.filter}")
    return 0


def listing(part: str = "") -> list[dict]:
    """Return one object a recipe: its name, the first line of its docstring, its configs."""
    named = {name: recipe_of(path) for name, path in configs().items()}
    rows = []
    for recipe, path in recipes().items():
        mine = [name for name, its_recipe in named.items() if its_recipe == recipe]
        kept = mine if part in recipe else [name for name in mine if part in name]
        if kept or part in recipe:
            rows.append({"recipe": recipe, "summary": summary(path), "configs": kept})
    return rows


def summary(recipe: Path) -> str:
    """Return the first line of a recipe's docstring."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]

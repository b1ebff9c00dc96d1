"""YAML and command-line text as a tree of nodes that remember where they stand.

Scalars stay text until the key's type is known, so that `007` for a text key is never the number 7.
A word without a type is read by this grammar (YAML 1.2 with Python's `None`, and no number with a
leading zero):

    null, Null, NULL, None, ~           nothing
    true, True, TRUE, false, ...        a truth value (yes, no, on and off are text)
    12, -3                              an integer
    1e-5, .5, 2., -1.5E+3, .inf, .nan   a float
    anything else, anything quoted      text
"""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from solotune.errors import ConfigError

COMMAND_LINE = "command line"

_NULLS = {"", "~", "null", "Null", "NULL", "None"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOATS = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_NOT_PRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # to YAML, not to JSON
_DOLLAR = re.compile(r"(\\*)\$\{")
# What YAML reads back as the same plain word; everything else is written in double quotes.
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./+-]([A-Za-z0-9_./+\-=@]|:(?=\S)|\\(?=\S)| (?=[^#\s]))*")


@dataclass
class Scalar:
    text: str
    quoted: bool = False  # quoted words are always text
    where: str = COMMAND_LINE

    @property
    def may_be_flow(self) -> bool:
        """Whether this is a bracketed word of the command line, not parsed yet."""
        is_word = self.where == COMMAND_LINE and not self.quoted
        return is_word and self.text.startswith(("[", "{"))


@dataclass
class Sequence:
    items: list["Node"] = field(default_factory=list)
    where: str = COMMAND_LINE


@dataclass
class Mapping:
    items: dict[str, "Node"] = field(default_factory=dict)
    where: str = COMMAND_LINE


Node = Scalar | Sequence | Mapping


def scalar_value(scalar: Scalar) -> bool | int | float | str | None:
    """Return what a word means where no type is known."""
    text = scalar.text
    if scalar.quoted:
        return text
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return _SPECIAL_FLOATS.get(text.lower(), text)


def plain(node: Node) -> Any:
    """Return the node as dicts, lists and scalars, each word by the grammar above."""
    match node:
        case Scalar():
            value = scalar_value(node)
            return expand_home(value) if isinstance(value, str) else value
        case Sequence():
            return [plain(item) for item in node.items]
        case Mapping():
            return {name: plain(item) for name, item in node.items.items()}


def expand_home(text: str) -> str:
    """Return the text with a leading `~/` replaced by the home folder."""
    starts = ("~/", "~\\") if os.name == "nt" else ("~/",)
    return str(Path.home() / text[2:].lstrip("/\\")) if text.startswith(starts) else text


def to_node(value: Any) -> Node:
    """Return a node that reads back as `value`."""
    if isinstance(value, dict):
        return Mapping({str(name): to_node(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return Sequence([to_node(item) for item in value])
    if isinstance(value, float) and not math.isfinite(value):
        return Scalar({math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan"))
    if value is None or isinstance(value, bool | int | float):
        return Scalar("null" if value is None else repr(value))
    return Scalar(str(value), quoted=True)


def dotted_keys(node: Node, key: str = "") -> list[str]:
    """Return the dotted keys of everything below `node`."""
    if isinstance(node, Scalar):
        return []
    children = node.items.items() if isinstance(node, Mapping) else enumerate(node.items)
    prefix = f"{key}." if key else ""
    return [
        found
        for name, child in children
        for found in (f"{prefix}{name}", *dotted_keys(child, f"{prefix}{name}"))
    ]


def lines_of_keys(node: Node, key: str = "") -> dict[str, str]:
    """Return file and line of every dotted key below `node` that stands in a file."""
    if isinstance(node, Scalar):
        return {}
    children = node.items.items() if isinstance(node, Mapping) else enumerate(node.items)
    found = {}
    for name, child in children:
        inner = f"{key}.{name}" if key else str(name)
        found |= {inner: child.where} if at(child.where) else {}
        found |= lines_of_keys(child, inner)
    return found


def at(where: str) -> str:
    """Return the end of an error message that points at a line of a file."""
    return f" ({where})" if where not in ("", COMMAND_LINE) else ""


def read_file(path: Path) -> tuple[Mapping, list[str]]:
    """Return the mapping that a YAML file holds and the faults of its grammar."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    faults: list[str] = []
    node = _parse(text, str(path), faults)
    if not isinstance(node, Mapping):
        if isinstance(node, Scalar) and scalar_value(node) is None:
            return Mapping(where=str(path)), faults
        faults.append(f"{path}: a config is a list of `key: value` lines")
        return Mapping(where=str(path)), faults
    return node, faults


def read_flow(text: str) -> Node:
    """Return the node of a bracketed value on the command line, as `[a, b]` or `{x: 1}`."""
    faults: list[str] = []
    node = _parse(text, COMMAND_LINE, faults)
    if faults:
        raise ConfigError("; ".join(faults))
    return node


def _parse(text: str, name: str, faults: list[str]) -> Node:
    def where(mark: yaml.Mark) -> str:
        return name if name == COMMAND_LINE else f"{name}:{mark.line + 1}"

    try:
        # Tags can name Python objects; anchors can grow without bound: a config needs neither.
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            if getattr(event, "tag", None):
                faults.append(
                    f"{where(event.start_mark)}: the tag {event.tag} is refused: remove it"
                )
            if getattr(event, "anchor", None):
                faults.append(
                    f"{where(event.start_mark)}: anchors and aliases are refused:"
                    " write ${key} where a value is used again"
                )
        if faults:
            return Mapping(where=name)
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where(mark) if mark else name
        faults.append(f"{place}: not YAML: {error.problem or error.context}")
        return Mapping(where=name)
    except yaml.YAMLError as error:
        faults.append(f"{name}: not YAML: {str(error).splitlines()[0]}")
        return Mapping(where=name)

    def convert(node: yaml.Node | None, key: str) -> Node:
        if node is None:
            return Scalar("", where=name)
        place = where(node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, quoted=node.style is not None, where=place)
        if isinstance(node, yaml.SequenceNode):
            items = [convert(item, f"{key}.{index}") for index, item in enumerate(node.value)]
            return Sequence(items, where=place)
        mapping = Mapping(where=place)
        for name_node, value_node in node.value:
            place = where(name_node.start_mark)
            if not isinstance(name_node, yaml.ScalarNode):
                faults.append(f"{place}: a key is one word")
                continue
            child_key = f"{key}.{name_node.value}" if key else name_node.value
            if name_node.value in mapping.items:
                faults.append(f"{child_key}: set twice: keep one of the two ({place})")
            child = convert(value_node, child_key)
            child.where = place  # the line of the key is the line to look at
            mapping.items[name_node.value] = child
        return mapping

    return convert(root, "")


def write(node: Mapping) -> str:
    """Return YAML that `read_file` turns into the same values."""
    return "\n".join(_block(node, "")) + "\n"


def _block(node: Node, indent: str) -> Iterator[str]:
    pairs = (
        [(f"{_word(Scalar(name, quoted=True))}:", item) for name, item in node.items.items()]
        if isinstance(node, Mapping)
        else [("-", item) for item in node.items]
        if isinstance(node, Sequence)
        else []
    )
    for head, item in pairs:
        if isinstance(item, Scalar):
            yield f"{indent}{head} {_word(_escaped(item))}"
        elif isinstance(item, Sequence) and all(isinstance(part, Scalar) for part in item.items):
            words = [_word(_escaped(part)) for part in item.items if isinstance(part, Scalar)]
            yield f"{indent}{head} [{', '.join(words)}]"
        elif not item.items:
            yield f"{indent}{head} {{}}"
        else:
            yield f"{indent}{head}"
            yield from _block(item, indent + "  ")


def _escaped(scalar: Scalar) -> Scalar:
    """Return the scalar with `${` as plain text: a written config holds values, not references."""
    return replace(scalar, text=_DOLLAR.sub(r"\1\1\\${", scalar.text))


def _word(scalar: Scalar) -> str:
    is_text = isinstance(scalar_value(Scalar(scalar.text)), str)
    if not is_text and not scalar.quoted and scalar.text:
        return scalar.text
    if is_text and _PLAIN_TEXT.fullmatch(scalar.text) and not scalar.text.startswith("-"):
        return scalar.text
    if not scalar.quoted and not scalar.text:
        return "null"
    quoted = json.dumps(scalar.text, ensure_ascii=False)
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", quoted)

"""Comments of a YAML file, kept while its keys move."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from solotune.config.nodes import Mapping, write


@dataclass
class Comments:
    """Comments by dotted key: `beside` it on its line, and the lines `above` a key of the top."""

    beside: dict[str, str] = field(default_factory=dict)
    above: dict[str, list[str]] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)

    def move(self, key: str, to: str) -> None:
        """Give the comment beside one key to another."""
        if key in self.beside:
            self.beside[to] = self.beside.pop(key)


def read_comments(text: str) -> Comments:
    """Return the comments of a YAML text, without those at its head."""
    found, lines = Comments(), text.splitlines()
    root = yaml.compose(text, Loader=yaml.BaseLoader)
    for key, name, value in _nodes(root, ""):
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        last = name if is_block else value
        line = lines[last.end_mark.line] if last.end_mark.line < len(lines) else ""
        _, mark, comment = line[last.end_mark.column :].partition("#")
        if mark:
            found.beside[key] = comment.strip()
        first = name.start_mark.line
        while first and lines[first - 1].startswith("#"):
            first -= 1
        if "." not in key and first:  # what begins in the first line is the head of the file
            found.above[key] = lines[first : name.start_mark.line]
    return found


def with_comments(tree: Mapping, comments: Comments) -> str:
    """Return the tree as YAML with its comments."""
    lines, place = [], []
    for line in write(tree).splitlines():
        indent, word = len(line) - len(line.lstrip()), line.lstrip()
        if word.startswith("- "):
            lines.append(line)
            continue
        depth = indent // 2
        place[depth:] = [word.partition(":")[0].strip('"')]
        key = ".".join(place)
        above = comments.above.get(key, []) if not depth else []
        lines += ["", *above] if above else []
        beside = comments.beside.get(key)
        lines.append(f"{line}  # {beside}" if beside else line)
        lines += comments.head if not depth and key == "recipe" else []
    return "\n".join(lines) + "\n"


def _nodes(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield dotted key, key node and value node of everything in a mapping."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            inner = f"{key}.{name.value}" if key else str(name.value)
            yield inner, name, value
            yield from _nodes(value, inner)

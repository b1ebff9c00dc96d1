"""Overrides: `key=value` sets, `~key` deletes, on the tree that the YAML file made."""

import dataclasses
from pathlib import Path

from solotune.config.component import DEFAULT_PATHS, Permissions, path_fault
from solotune.config.nodes import Mapping, Node, Scalar, Sequence, read_flow, scalar_value
from solotune.config.schema import Schema
from solotune.config.suggest import suggest
from solotune.errors import ConfigError, UsageError


@dataclasses.dataclass(frozen=True)
class Override:
    """One word of the command line: `key=value` sets, `~key` (value None) deletes."""

    parts: tuple[str, ...]
    value: Node | None

    @property
    def key(self) -> str:
        return ".".join(self.parts)


def parse_override(word: str) -> Override:
    """Return the override that a word means; raises UsageError where it breaks the grammar."""
    deletes = word.startswith("~")
    _, equals, text = word.partition("=")
    key = key_of(word)
    parts = tuple(key.split("."))
    if deletes and equals:
        raise UsageError(f"{word}: a deletion is ~key, without a value")
    if not deletes and not equals:
        raise UsageError(f"{word}: an override is key=value (or ~key to delete)")
    if not all(parts) or not parts[0].isidentifier():
        raise UsageError(f"{word}: {key or 'nothing'} before `=` is no key, as optimizer.lr is")
    if deletes:
        return Override(parts, None)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return Override(parts, Scalar(text[1:-1], quoted=True))
    return Override(parts, Scalar(text, quoted=text == ""))


def key_of(word: str) -> str:
    """Return the key that an override sets or deletes."""
    return word.removeprefix("~").partition("=")[0]


def open_shorthands(tree: Mapping, schema: Schema, permissions: Permissions) -> None:
    """Turn `dataset: chats.jsonl` and `optimizer: torch.optim.SGD` into mappings."""
    for name, field in schema.items():
        if name in tree.items and field.takes_component:
            tree.items[name] = _component_mapping(name, tree.items[name], permissions)


def _component_mapping(key: str, node: Node, permissions: Permissions) -> Node:
    node = _opened(node)
    text = scalar_value(node) if isinstance(node, Scalar) else None
    if not isinstance(text, str) or "${" in text:
        return node
    is_path = path_fault(text, permissions) is None or text.startswith("torchtune.")
    is_path = is_path and not Path(text).is_file()
    if key in ("dataset", "dataset_val") and not is_path:
        default = Scalar(DEFAULT_PATHS[key], quoted=True, where=node.where)
        source = Scalar(text, quoted=True, where=node.where)
        return Mapping({"_component_": default, "source": source}, where=node.where)
    return Mapping({"_component_": Scalar(text, quoted=True, where=node.where)}, where=node.where)


def apply(
    tree: Mapping, override: Override, schema: Schema, permissions: Permissions
) -> str | None:
    """Set or delete what the override names; return its fault. Missing mappings are made."""
    *path, last = override.parts
    node: Node = tree
    for depth, part in enumerate(path):
        child = _child(node, part)
        if child is None or (isinstance(child, Scalar) and scalar_value(child) is None):
            if override.value is None or not isinstance(node, Mapping):
                return _no_such(override, node, depth)
            child = Mapping()
            _put(node, part, child)
        node = child
    old = _child(node, last)
    if old is None and (override.value is None or not isinstance(node, Mapping)):
        return _no_such(override, node, len(path))
    if override.value is None:
        if isinstance(node, Mapping):
            del node.items[last]
        elif isinstance(node, Sequence):
            del node.items[int(last)]
        return None

    # The type of a top-level key decides whether `[a]` is text; below it, it is a list.
    value = _opened(override.value) if path else override.value
    field = schema.get(override.parts[0])
    if last == "_component_" and path:  # naming another component replaces the node
        named = Mapping({"_component_": value})
        return apply(tree, Override(tuple(path), named), schema, permissions)
    is_node = isinstance(old, Mapping) and "_component_" in old.items
    if is_node or (field and field.takes_component and not path):
        value = _component_mapping(override.key, value, permissions)
    if isinstance(value, Mapping) and isinstance(old, Mapping):
        default = DEFAULT_PATHS.get(override.key)
        if _path_of(old, default) == _path_of(value, default) is not None:
            value = Mapping({**old.items, **value.items}, where=value.where)
    _put(node, last, value)
    return None


def _opened(node: Node) -> Node:
    """Return the list or mapping that a bracketed word of the command line spells, or the word."""
    if not isinstance(node, Scalar) or not node.may_be_flow:
        return node
    try:
        return read_flow(node.text)
    except ConfigError:
        return node


def _path_of(node: Mapping, default: str | None) -> str | None:
    named = node.items.get("_component_")
    return named.text if isinstance(named, Scalar) else default


def _child(node: Node, part: str) -> Node | None:
    if isinstance(node, Mapping):
        return node.items.get(part)
    if isinstance(node, Sequence) and part.isdecimal() and int(part) < len(node.items):
        return node.items[int(part)]
    return None


def _put(node: Node, part: str, child: Node) -> None:
    if isinstance(node, Mapping):
        node.items[part] = child
    elif isinstance(node, Sequence):
        node.items[int(part)] = child


def _no_such(override: Override, node: Node, depth: int) -> str:
    place = ".".join(override.parts[:depth])
    if isinstance(node, Sequence):
        return f"{override.key}: {place} is a list of {len(node.items)} items, counted from 0"
    if isinstance(node, Scalar):
        return f"{override.key}: {place} is {node.text or 'empty'}, which has no parts"
    missing = ".".join(override.parts[: depth + 1])
    guess = suggest(override.parts[depth], node.items, prefix=f"{place}." if place else "")
    return f"{override.key}: the config has no {missing}{guess}"

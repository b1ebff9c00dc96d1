"""Fit a node to a type annotation."""

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from solotune.config.nodes import (
    Mapping,
    Node,
    Scalar,
    Sequence,
    expand_home,
    plain,
    read_flow,
    scalar_value,
)

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", type(None): "None"}


@dataclass(frozen=True)
class Minimum:
    """The smallest value of a parameter, in its annotation: `Annotated[int, Minimum(1)]`."""

    value: int


class Misfit(Exception):
    """A value that is not of the wanted type; its message completes `KEY: ...`."""


def fit(node: Node, annotation: Any, default: Callable[[Node], Any] = plain) -> Any:
    """Return the value of `node` as the annotation wants it, or raise Misfit.

    `default` reads what no plain type claims: a node whose type is a class of some library, or a
    part of a bare list or dict.
    """
    members = _members(annotation)
    if Any in members:
        return default(_opened(node, members))
    value = _try(_opened(node, members), members, default)
    if value is not _NO_FIT:
        for bound in _bounds(annotation):
            if isinstance(value, int | float) and value < bound.value:
                raise Misfit(f"{bound.value} or more is needed, not {_show(node)}")
        return value
    has_plain = any(_is_plain(member) for member in members)
    has_other = any(not _is_plain(member) for member in members if member is not type(None))
    if has_other and (not has_plain or not isinstance(node, Scalar)):
        return default(node)  # a class: its library judges the value
    raise Misfit(f"{describe(annotation)} is needed, not {_show(node)}")


_NO_FIT = object()


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is Annotated:
        return _members(annotation.__origin__)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in _members(member)]
    return [type(None) if annotation is None else annotation]


def _bounds(annotation: Any) -> list[Minimum]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [bound for member in typing.get_args(annotation) for bound in _bounds(member)]
    return [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Minimum)]


def _opened(node: Node, members: list[Any]) -> Node:
    """Parse `[...]` and `{...}` from the command line, but not where the key takes text only."""
    wants_only_text = str in members and not any(_collection(m) for m in members)
    if isinstance(node, Scalar) and node.may_be_flow and not wants_only_text:
        return read_flow(node.text)
    return node


def _try(node: Node, members: list[Any], default: Callable[[Node], Any]) -> Any:
    """Return the value by the first kind of member that takes it; text comes last."""
    if isinstance(node, Scalar):
        value = scalar_value(node)
        for member in members:
            if typing.get_origin(member) is Literal:
                for choice in typing.get_args(member):
                    if choice == node.text or (choice == value and type(choice) is type(value)):
                        return choice
        if type(value) in members:
            return expand_home(value) if isinstance(value, str) else value
        if isinstance(value, int) and not isinstance(value, bool) and float in members:
            return float(value)
        if str in members and value is not None:
            return expand_home(node.text)
        return _NO_FIT
    for member in members:
        origin, arguments = _collection(member), typing.get_args(member)
        if isinstance(node, Sequence) and origin is list:
            item = arguments[0] if arguments else Any
            return [fit(child, item, default) for child in node.items]
        if isinstance(node, Sequence) and origin is tuple:
            if not arguments:
                return tuple(fit(child, Any, default) for child in node.items)
            if arguments[-1] is Ellipsis:
                return tuple(fit(child, arguments[0], default) for child in node.items)
            if len(arguments) == len(node.items):
                pairs = zip(node.items, arguments, strict=True)
                return tuple(fit(child, item, default) for child, item in pairs)
        if isinstance(node, Mapping) and origin is dict:
            item = arguments[1] if arguments else Any
            return {name: fit(child, item, default) for name, child in node.items.items()}
    return _NO_FIT


def _collection(member: Any) -> type | None:
    origin = typing.get_origin(member) or member
    if not isinstance(origin, type) or origin in (str, bytes):
        return None
    for kind in (dict, tuple, list):
        if issubclass(origin, kind):
            return kind
    name = origin.__name__
    return {"Sequence": list, "Iterable": list, "Collection": list, "Mapping": dict}.get(name)


def _is_plain(member: Any) -> bool:
    return member in (int, float, bool, str) or (
        _collection(member) is not None or typing.get_origin(member) is Literal
    )


def describe(annotation: Any) -> str:
    """Return the annotation in the words of a person who writes a config."""
    words = []
    for member in _members(annotation):
        if typing.get_origin(member) is Literal:
            words.extend(str(choice) for choice in typing.get_args(member))
        elif _collection(member):
            kind = _collection(member)
            words.append({list: "a list", tuple: "a list", dict: "a mapping"}[kind or list])
            inner = [part for part in typing.get_args(member) if part is not Ellipsis]
            if kind is tuple and inner and Ellipsis not in typing.get_args(member):
                words[-1] += f" of {len(inner)}"
            if kind is not dict and inner:
                words[-1] += f" (each: {describe(inner[0])})"
        elif member in _WORDS:
            words.append(_WORDS[member])
        elif member is str:
            words.append("text")
    words = list(dict.fromkeys(words))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "a value"


def _show(node: Node) -> str:
    match node:
        case Scalar() if node.quoted:
            return f"the text '{node.text}'" if node.text else "an empty text"
        case Scalar():
            return node.text or "nothing"
        case Sequence():
            return f"a list of {len(node.items)}" if node.items else "an empty list"
        case Mapping():
            return "a mapping"

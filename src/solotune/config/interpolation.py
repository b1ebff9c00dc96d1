"""`${key}` stands for the value of another key."""

import re
from typing import Any

from solotune.config.nodes import Mapping, Node, Scalar, Sequence, at, dotted_keys, to_node
from solotune.config.suggest import suggest

# Resolvers, told by their colon, read the environment or run code. An even number of backslashes
# before `${` leaves it a reference; an odd one makes it text.
_RESOLVER = re.compile(r"(?<!\\)(\\\\)*\$\{[^}]*:")
_REFERENCE = re.compile(r"\$\{([^{}]*)")


def interpolate(tree: Mapping) -> dict[str, str]:
    """Replace every reference in the tree by what it names; return the faults by their keys."""
    texts = _texts(tree)
    if "${" not in repr(texts):
        return {}
    from omegaconf import OmegaConf  # only here: most configs have no reference
    from omegaconf.errors import OmegaConfBaseException

    faults: dict[str, str] = {}
    keys = dotted_keys(tree)
    try:
        resolved = OmegaConf.create(texts)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        fault = "has no value: a reference is ${key}, and plain text with ${ is written \\${"
        return {key: f"{key}: its reference {fault}"}

    def resolve(node: Node, key: str, holder: Any, name: str | int) -> Node:
        match node:
            case Scalar() if "${" not in node.text:
                return node
            case Scalar() if _RESOLVER.search(node.text):
                fault = f"{node.text}: resolvers are refused, only ${{key}} works"
                faults[key] = f"{key}: {fault}{at(node.where)}"
                return node
            case Scalar():
                try:
                    value = holder[name]
                except (OmegaConfBaseException, RecursionError, ValueError):
                    match = _REFERENCE.search(node.text)
                    missing = match.group(1) if match else node.text
                    guess = suggest(missing, [k for k in keys if k != key])
                    faults[key] = f"{key}: ${{{missing}}} has no value{guess}{at(node.where)}"
                    return node
                if isinstance(value, str):
                    return Scalar(value, where=node.where)
                return to_node(OmegaConf.to_container(value, resolve=True))
        inner = holder[name] if key else holder
        prefix = f"{key}." if key else ""
        if isinstance(node, Sequence):
            node.items = [resolve(c, f"{prefix}{i}", inner, i) for i, c in enumerate(node.items)]
        else:
            node.items = {n: resolve(c, f"{prefix}{n}", inner, n) for n, c in node.items.items()}
        return node

    resolve(tree, "", resolved, "")
    return faults


def _texts(node: Node) -> Any:
    match node:
        case Scalar():
            return node.text
        case Sequence():
            return [_texts(item) for item in node.items]
        case Mapping():
            return {name: _texts(item) for name, item in node.items.items()}

"""Which parameters are trained."""

import re

from torch import nn

from solotune.errors import ConfigError


def freeze(model: nn.Module, *, trainable: str | None) -> None:
    """Leave only the parameters trainable whose name holds a match of `trainable`; None: all.

    The pattern, a regular expression, matches whole components: `layers.1` is not `layers.10`,
    `norm` is not `input_layernorm`. Raises ConfigError where it is no pattern or matches nothing.
    """
    if trainable is None:
        return
    try:
        pattern = re.compile(rf"(?:^|\.)(?:{trainable})(?:\.|$)")
    except re.error as error:
        raise ConfigError(
            f"trainable={trainable}: not a regular expression ({error}): use for example "
            "trainable='layers.(2[0-9]|3[01])'"
        ) from None
    names = [name for name, _ in model.named_parameters()]
    if not any(map(pattern.search, names)):
        raise ConfigError(
            f"trainable={trainable} matches no parameter: names are like {names[-1]}, "
            f"{names[len(names) // 2]}"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(pattern.search(name)))

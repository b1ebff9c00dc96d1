"""The kind of device that a tensor is on, or stands for while a run is planned.

A plan runs the code of a run on fake CPU tensors: fake tensors on a device that is not there end
the process. Code that does one thing on a CPU and another on a card asks here, so that a plan goes
the card's way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_stands_for: str | None = None


def device_kind(place: Tensor | torch.device) -> str:
    """Return `cpu`, `cuda` or another type, of a device or of the one that a tensor is on."""
    return _stands_for or (place.type if isinstance(place, torch.device) else place.device.type)


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Let every tensor stand for one on a device of `kind`."""
    global _stands_for
    before, _stands_for = _stands_for, kind
    try:
        yield
    finally:
        _stands_for = before


def is_planning() -> bool:
    """Whether tensors stand for others, so that no kernel runs and no number can be read."""
    return _stands_for is not None


def to_list(tensor: Tensor) -> list[Any]:
    """Return the numbers of a CPU tensor; in a plan one with the lengths of a batch has some."""
    if not is_planning():
        return tensor.tolist()
    with _disable_current_modes():
        return tensor.tolist()

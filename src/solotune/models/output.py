"""The output layer: with a low-rank addition, which a loss takes in place of the weight; gradients.

The sum of the two is as large as the weight and never exists: a loss adds the low-rank part to one
chunk of logits at a time.

Shapes: ... any, T target rows, R rank, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDED = 2**22  # numbers at a time


class AdaptedOutput(NamedTuple):
    """Logits are (hidden @ weight^T + down(hidden) @ up^T) * scale; the weight is frozen.

    `down` takes hidden_TD and the key of the batch's dropout (None: nothing is dropped), and
    returns low_TR.
    """

    weight_VD: Tensor
    down: Callable[[Tensor, int | None], Tensor]
    up_VR: Tensor
    scale_V: Tensor | None


def multiply(hidden: Tensor, output: Tensor | AdaptedOutput) -> Tensor:
    """Return the logits (..., V) of a few hidden states (..., D)."""
    if isinstance(output, Tensor):
        return hidden @ output.T
    low = output.down(hidden, None)
    logits = hidden @ output.weight_VD.T + low @ output.up_VR.T.to(low.dtype)
    return logits if output.scale_V is None else (logits * output.scale_V).to(logits.dtype)


def rounded_in_place(sum_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient's fp32 sum rounded, in the first half of its own memory.

    A second gradient beside it would make the peak. Each piece is written where pieces began that
    were read before.
    """
    if sum_VD.dtype.itemsize <= dtype.itemsize:
        return sum_VD.to(dtype)
    flat = sum_VD.view(-1)
    rounded = flat.view(dtype)[: flat.numel()]
    for target, source in zip(rounded.split(_ROUNDED), flat.split(_ROUNDED), strict=True):
        target.copy_(source.to(dtype))
    return rounded.view(sum_VD.shape)

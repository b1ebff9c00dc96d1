"""Moments of an optimizer in 4, 2 or 1 bytes a number.

bf16 and int8 round at random: a moving average changes by a thousandth of itself a step, which
rounding to nearest would lose each time. int8 is not linear: in blocks of 256 the cube root of a
first moment, the sixth root of a second one, over the block's largest, so that small ones are told
from 0 (linearly 39 % of second moments would be 0). Of the powers 2 to 4 and 4 to 8 these were
within a third of the best whether gradients in a block are alike or differ by 10,000.
"""

from typing import Literal

import torch
from torch import Tensor

from solotune.optim.noise import Noise

StateDtype = Literal["fp32", "bf16", "int8"]
BLOCK = 256  # numbers that share a scale
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def new_moment(
    name: str, parameter: Tensor, dtype: StateDtype, *, signed: bool
) -> dict[str, Tensor]:
    """Return the tensors of a moment of 0 by their names in the optimizer's state."""
    if dtype != "int8":
        return {name: torch.zeros_like(parameter, dtype=_DTYPES[dtype])}
    scales = torch.zeros(-(-parameter.numel() // BLOCK), device=parameter.device)
    kind = torch.int8 if signed else torch.uint8
    return {name: torch.zeros_like(parameter, dtype=kind), f"{name}_scale": scales}


def read_moment(moment: Tensor, scale: Tensor | None) -> Tensor:
    """Return a flat moment in fp32: itself where it is kept so, else a copy."""
    if scale is None:
        return moment.float()
    top, power = _shape(moment)
    value = moment.float().div_(top).pow_(power)
    return _blocks(value).mul_(scale.unsqueeze(1)).flatten()[: moment.numel()]


def write_moment_(moment: Tensor, scale: Tensor | None, value: Tensor, noise: Noise | None) -> None:
    """Keep `value`, fp32 and flat; it may be overwritten."""
    if moment.dtype == torch.float32:
        if value is not moment:
            moment.copy_(value)
        return
    assert noise is not None
    if scale is None:
        bits = value.view(torch.int32)
        bits.add_(noise.bytes_like(value, each=2)).add_(2**15).bitwise_right_shift_(16)
        moment.view(torch.int16).copy_(bits)
        return
    top, power = _shape(moment)
    blocks = _blocks(value)
    torch.amax(blocks.abs(), 1, out=scale)
    share = blocks.abs().div_(scale.clamp(min=1e-38).unsqueeze(1)).flatten()[: value.numel()]
    below = share.pow(1 / power).mul_(top).floor_().clamp_(max=top - 1)
    # Up or down by the distance in `value` itself, so that its mean is kept.
    low, high = (below / top).pow_(power), ((below + 1) / top).pow_(power)
    chance = share.sub_(low).div_(high.sub_(low))
    code = below.add_(chance > noise.bytes_like(value).float().add_(0.5).div_(256))
    if moment.dtype == torch.int8:
        moment.copy_(code.copysign_(value))
    else:  # a second moment of 0 would make its update as large as 1 / eps
        moment.copy_(torch.maximum(code, (value > 0).float()))


def _shape(moment: Tensor) -> tuple[int, int]:
    """Return the largest code and the power that codes are raised to."""
    return (127, 3) if moment.dtype == torch.int8 else (255, 6)


def _blocks(flat: Tensor) -> Tensor:
    """Return a flat tensor as blocks, the last one filled up with 0."""
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, BLOCK)

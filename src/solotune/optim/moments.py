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
    """Return a moment in fp32: itself where it is kept so, else a copy.

    With a `scale`, of shape (rows, numbers of a block), one scale a row.
    """
    if scale is None:
        return moment.float()
    return _raise(moment.float().mul_(1 / _top(moment)), moment).mul_(scale.unsqueeze(1))


def write_moment_(moment: Tensor, scale: Tensor | None, value: Tensor, noise: Noise | None) -> None:
    """Keep `value`, what `read_moment` returned; it may be overwritten."""
    if moment.dtype == torch.float32:  # the value is the moment
        return
    assert noise is not None
    if scale is None:
        bits = value.view(torch.int32)
        moment.copy_(bits.add_(noise.bits(16)).bitwise_and_(-(2**16)).view(torch.float32))
        return
    top = _top(moment)
    size = value.abs()
    largest = size.amax(1)
    scale.copy_(largest)
    share = size.div_(largest.clamp(min=1e-38).unsqueeze(1))
    root = _cube_root(share)
    root = root if moment.dtype == torch.int8 else root.sqrt_()
    below = root.mul_(top).floor_().clamp_(max=top - 1)
    # Up or down by the distance in `value` itself, so that its mean is kept.
    low, high = _raise(below * (1 / top), moment), _raise((below + 1).mul_(1 / top), moment)
    chance = share.sub_(low).div_(high.sub_(low)).clamp_(0, 1)
    luck = noise.bits(8).float().add_(0.5).mul_(1 / 256)
    code = below.add_(chance).add_(luck).floor_()
    if moment.dtype == torch.int8:
        sign = value.view(torch.int32).bitwise_and_(-(2**31))
        moment.copy_(code.view(torch.int32).bitwise_or_(sign).view(torch.float32))
    else:  # a second moment of 0 would make its update as large as 1 / eps
        moment.copy_(torch.maximum(code, value.clamp_(max=1).ceil_()))


def _top(moment: Tensor) -> int:
    return 127 if moment.dtype == torch.int8 else 255


def _raise(share: Tensor, moment: Tensor) -> Tensor:
    """Return what a code stands for: its cube, or sixth power for a second moment."""
    cube = share * share * share
    return cube if moment.dtype == torch.int8 else cube.mul_(cube)


def _cube_root(share: Tensor) -> Tensor:
    """Return cube roots of numbers from 0 to 1, to 5e-5 of themselves: 1e-10 is small enough a 0.

    `pow` would take most of a step. A third of the bits of a number is its root to 4 %, and a step
    of Halley's method makes that its cube.
    """
    x = share.clamp(min=1e-30)
    bits = x.view(torch.int32).float().mul_(1 / 3).add_(0x2A5137A0)
    root = bits.to(torch.int32).view(torch.float32)
    cube = root * root * root
    return root.mul_((cube + x + x).div_(cube + cube + x))

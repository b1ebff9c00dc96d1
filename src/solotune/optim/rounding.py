"""bf16 weights and what rounding takes from them.

A bf16 number is the upper half of an fp32 number, rounded. What it lacks is the lower half, a
number between -2^15 and 2^15 in units of the last bit of fp32. Kept whole (int16) weight and
remainder are an fp32 number; its upper half (int8) counts 256ths of the weight's rounding step.

All tensors have one shape; weights bf16, master weights fp32. Only operators that torch.compile
makes vectors of: int32 and fp32, no masks.
"""

import torch
from torch import Tensor

from solotune.optim.noise import Noise

_UPPER = -(2**16)  # mask of the half of an fp32 number that is a bf16 number


def join(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """Return the fp32 weights whose upper halves, rounded, are `weight`."""
    bits = weight.float().view(torch.int32)
    if remainder is not None:
        lower = remainder.to(torch.int32)
        bits.add_(lower if remainder.dtype == torch.int16 else lower.mul_(256))
    return bits.view(torch.float32)


def split_(master: Tensor, weight: Tensor, remainder: Tensor | None, noise: Noise | None) -> None:
    """Write fp32 weights as bf16 ones and what these miss of them; overwrites `master`.

    int16: nothing is lost. int8: the lowest 8 bits are rounded at random. None: the lowest 16.
    """
    bits = master.view(torch.int32)
    if remainder is None:
        assert noise is not None
        weight.copy_(bits.add_(noise.bits(16)).bitwise_and_(_UPPER).view(torch.float32))
        return
    if remainder.dtype == torch.int8:
        assert noise is not None
        bits.add_(noise.bits(8)).bitwise_and_(-(2**8))
    upper = (bits + 2**15).bitwise_and_(_UPPER)
    lower = bits.sub_(upper)
    remainder.copy_(lower if remainder.dtype == torch.int16 else lower.bitwise_right_shift_(8))
    weight.copy_(upper.view(torch.float32))

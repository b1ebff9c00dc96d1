"""bf16 weights and what rounding takes from them.

A bf16 number is the upper half of an fp32 number, rounded. What it lacks is the lower half, a
number between -2^15 and 2^15 in units of the last bit of fp32. Kept whole (int16) weight and
remainder are an fp32 number; its upper half (int8) counts 256ths of the weight's rounding step.

All tensors are flat and of one length; weights bf16, master weights fp32.
"""

import torch
from torch import Tensor

from solotune.optim.noise import Noise


def join(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """Return the fp32 weights whose upper halves, rounded, are `weight`."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    if remainder is not None:
        lower = remainder.to(torch.int32)
        bits.add_(lower if remainder.dtype == torch.int16 else lower.bitwise_left_shift_(8))
    return bits.view(torch.float32)


def split_(master: Tensor, weight: Tensor, remainder: Tensor | None, noise: Noise | None) -> None:
    """Write fp32 weights as bf16 ones and what these miss of them; overwrites `master`.

    int16: nothing is lost. int8: the lowest 8 bits are rounded at random. None: the lowest 16.
    """
    bits = master.view(torch.int32)
    if remainder is None:
        assert noise is not None
        bits.add_(noise.bytes_like(weight, each=2)).add_(2**15).bitwise_right_shift_(16)
        weight.view(torch.int16).copy_(bits)
        return
    if remainder.dtype == torch.int8:
        assert noise is not None
        bits.add_(noise.bytes_like(weight)).bitwise_right_shift_(8)
        upper = bits.add(2**7).bitwise_right_shift_(8)
        remainder.copy_(bits.sub_(upper << 8))
    else:
        upper = bits.add(2**15).bitwise_right_shift_(16)
        remainder.copy_(bits.sub_(upper << 16))
    weight.view(torch.int16).copy_(upper)

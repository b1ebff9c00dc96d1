"""Weights in 4 bits: how one lies in memory, and how it is made.

One flat uint8 tensor holds a weight: two numbers a byte, then a scale for each block of 64 numbers,
itself in 8 bits with a scale for each 256 of them (double quantisation), and the tables of what 4
and 8 bits mean. As one parameter it is moved, streamed and counted like any other weight. Values
are bitsandbytes', whose kernels run on CPU and cards; figures beside torchao's: docs/qlora.md.

Sources: 2305.14314 (NF4, double quantisation), 2110.02861 (the 8-bit code of the scales).

Shapes: O out, I in, N numbers of a weight, K blocks of them.
"""

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from solotune.errors import ConfigError

KINDS = ("nf4", "fp4")
SCALES_BLOCK = 256  # scales that share a scale; bitsandbytes has no other
_ALIGNED = 256  # bytes: kernels read many at once
# Numbers quantised at once. On a CPU the temporaries are 20 bytes a number.
_PIECE = {"cpu": 2**16}
_PIECE_OF_A_CARD = 2**22


class Parts(NamedTuple):
    """Views of a packed weight; the last three are None where scales are in fp32."""

    codes: Tensor  # uint8, two numbers each
    scales_K: Tensor  # of blocks: uint8, or fp32
    values: Tensor  # the 16 that a number can have, fp32
    scales_of_scales: Tensor | None  # fp32
    scale_values: Tensor | None  # the 256 that a scale can have, fp32
    mean: Tensor | None  # of the scales, fp32, no dimension


@dataclass(frozen=True)
class FourBit:
    """The layout of a weight (O, I) in 4 bits; `double`: its scales are in 8."""

    out_features: int
    in_features: int
    kind: str = "nf4"
    block_size: int = 64
    double: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def num_numbers(self) -> int:
        return self.out_features * self.in_features

    @property
    def num_bytes(self) -> int:
        return sum(map(_up, self.part_bytes))

    @property
    def part_bytes(self) -> list[int]:
        """The sizes of the parts, in their order, without what lies between them."""
        codes, blocks = -(-self.num_numbers // 2), -(-self.num_numbers // self.block_size)
        if not self.double:
            return [codes, 4 * blocks, 4 * 16]
        return [codes, blocks, 4 * 16, 4 * -(-blocks // SCALES_BLOCK), 4 * 256, 4]

    def parts(self, packed: Tensor) -> Parts:
        """Return views of a packed weight."""
        found, start = [], 0
        for size in self.part_bytes:
            found.append(packed[start : start + size])
            start += _up(size)
        codes, scales, values, *of_scales = found
        values = values.view(torch.float32)
        if not self.double:
            return Parts(codes, scales.view(torch.float32), values, None, None, None)
        scales_of_scales, scale_values, mean = (part.view(torch.float32) for part in of_scales)
        return Parts(codes, scales, values, scales_of_scales, scale_values, mean[0])


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


@torch.no_grad()
def pack(dense: Tensor, packed: Tensor, layout: FourBit) -> None:
    """Quantise `dense`, of any floating dtype, into `packed` on the same device, piece by piece."""
    functional = bitsandbytes().functional
    packed.zero_()  # what lies between the parts is compared with them
    codes, scales_K, values, scales_of_scales, scale_values, mean = layout.parts(packed)
    values.copy_(functional.get_4bit_type(layout.kind, device=packed.device))
    numbers_N = dense.reshape(-1)
    absmax_K = scales_K
    if layout.double:
        absmax_K = torch.empty(scales_K.shape, dtype=torch.float32, device=packed.device)
    at_once = _PIECE.get(packed.device.type, _PIECE_OF_A_CARD)
    for start in range(0, len(numbers_N), at_once):
        piece = numbers_N[start : start + at_once]
        if piece.dtype == torch.float64:
            piece = piece.float()
        new, state = functional.quantize_4bit(
            piece, blocksize=layout.block_size, quant_type=layout.kind
        )
        codes[start // 2 :][: new.numel()] = new.view(-1)
        absmax_K[start // layout.block_size :][: state.absmax.numel()] = state.absmax
    if scales_of_scales is not None and scale_values is not None and mean is not None:
        mean.copy_(absmax_K.mean())
        new, state = functional.quantize_blockwise(absmax_K - mean, blocksize=SCALES_BLOCK)
        scale_values.copy_(state.code)
        scales_K.copy_(new)
        scales_of_scales.copy_(state.absmax)


@cache
def bitsandbytes() -> ModuleType:
    """Return the package, imported where it is first used; raises ConfigError where that fails."""
    # It asks for a further package that has a kernel for a layout which is not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except Exception as error:  # a broken installation raises whatever its native part meets
        raise ConfigError(
            f"weights in 4 bits need bitsandbytes, which cannot be imported ({error}): "
            "pip install bitsandbytes, or set quantize_base=null"
        ) from error
    return bitsandbytes

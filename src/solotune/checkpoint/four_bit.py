"""Weights that a Hugging Face folder holds in 4 bits, as transformers saves them with bitsandbytes.

Beside the numbers, under the weight's own name, lie its scales and what is needed to read them:

    K                                      numbers, two a byte, in any dtype
    K.absmax                               scales: fp32, or uint8 under double quantisation
    K.quant_map                            the 16 values, fp32
    K.nested_absmax, K.nested_quant_map    scales of the scales, and the values of a scale
    K.quant_state.bitsandbytes__nf4        kind, shape, block size, mean scale: JSON as uint8

Format: `QuantState.as_dict(packed=True)` of https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solotune.adapters.nf4 import KINDS, SCALES_BLOCK, FourBit, bitsandbytes
from solotune.checkpoint.safetensors_file import StoredTensor
from solotune.checkpoint.stored import stored_weights, text_tower
from solotune.errors import CheckpointError

_STATE = ".quant_state.bitsandbytes__"
# In the order of a layout's parts.
_ENDS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


@dataclass(frozen=True)
class StoredFourBit(StoredTensor):
    """A weight in 4 bits, read as the flat uint8 tensor that `layout` describes."""

    layout: FourBit
    mean: float  # of the scales
    parts: Mapping[str, StoredTensor]  # by the end of their names

    def read_into(self, target: Tensor) -> None:
        assert (target.dtype, target.shape) == (self.dtype, self.shape)
        target.zero_()
        codes, scales_K, values, scales_of_scales, scale_values, mean = self.layout.parts(target)
        _read_bytes(self.parts[""], codes)
        _read_bytes(self.parts[".absmax"], scales_K)
        _read_bytes(self.parts[".quant_map"], values)
        known = bitsandbytes().functional.get_4bit_type(self.layout.kind, device="cpu")
        if not torch.allclose(values, known):  # kernels have them built in
            raise _unreadable(self.parts[".quant_map"], "its values are not bitsandbytes' own")
        if scales_of_scales is not None and scale_values is not None and mean is not None:
            _read_bytes(self.parts[".nested_absmax"], scales_of_scales)
            _read_bytes(self.parts[".nested_quant_map"], scale_values)
            mean.fill_(self.mean)


def stored_four_bit(folder: Path) -> dict[str, FourBit]:
    """Return the layouts of the weights that a model folder holds in 4 bits, by their names there.

    Empty for an unquantised folder, and for one without weights, which may be planned. Raises
    CheckpointError for layouts that cannot be read.
    """
    if not any(folder.glob("*.safetensors*")):
        return {}
    stored = with_four_bit(text_tower(stored_weights(folder))[0])
    return {name: t.layout for name, t in stored.items() if isinstance(t, StoredFourBit)}


def with_four_bit(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return `stored` with each weight in 4 bits as one tensor instead of its parts."""
    joined = dict(stored)
    for state_name in [name for name in stored if _STATE in name]:
        name, _, kind = state_name.partition(_STATE)
        state = _state(joined.pop(state_name))
        ends = _ENDS if "nested_offset" in state else _ENDS[:3]
        if missing := [name + end for end in ends if name + end not in joined]:
            raise CheckpointError(
                f"{state_name} is stored without {missing[0]}: download or copy the folder again"
            )
        joined[name] = _weight(name, kind, state, {end: joined.pop(name + end) for end in ends})
    return joined


def _weight(
    name: str, kind: str, state: dict[str, Any], parts: dict[str, StoredTensor]
) -> StoredFourBit:
    weight, double = parts[""], "nested_offset" in state
    try:
        (rows, columns), block_size = state["shape"], state["blocksize"]
        mean = float(state.get("nested_offset", 0.0))
        layout = FourBit(int(rows), int(columns), kind, int(block_size), double)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(weight, f"its quant_state lacks or misspells {error}") from error
    if kind not in KINDS or layout.block_size < 32 or min(layout.shape) < 1:
        raise _unreadable(weight, f"it is {kind} in blocks of {block_size}")
    if double and state.get("nested_blocksize") != SCALES_BLOCK:
        raise _unreadable(weight, f"nested_blocksize is not {SCALES_BLOCK}")
    for end, num_bytes in zip(_ENDS, layout.part_bytes, strict=False):
        if parts[end].num_bytes != num_bytes:
            raise _unreadable(
                parts[end], f"it has {parts[end].num_bytes:,} bytes and not {num_bytes:,}"
            )
    shape = (layout.num_bytes,)
    return StoredFourBit(weight.path, name, torch.uint8, shape, 0, layout, mean, parts)


def _state(entry: StoredTensor) -> dict[str, Any]:
    """Return the object that lies as JSON in a tensor of bytes."""
    try:
        if entry.dtype != torch.uint8:
            raise ValueError("no bytes")
        state = json.loads(bytes(entry.read().tolist()))
        if not isinstance(state, dict):
            raise ValueError("no object")
    except (ValueError, UnicodeDecodeError) as error:
        raise _unreadable(entry, f"it is no JSON object ({error})") from error
    return state


def _read_bytes(entry: StoredTensor, target: Tensor) -> None:
    entry.read_into(target.view(torch.uint8).view(entry.dtype).view(entry.shape))


def _unreadable(entry: StoredTensor, why: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.path}: {entry.name} cannot be read as a 4-bit weight of bitsandbytes: {why}; use "
        "the unquantised checkpoint"
    )

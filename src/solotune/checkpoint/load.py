"""Weights from a Hugging Face folder into a model built on meta, one tensor at a time.

Each tensor is read into the parameter's own new memory; one that has another dtype on disk, goes to
a device or is quantised passes through the host alone. Peak: the model and one tensor.
"""

import math
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from solotune.adapters.inject import is_adapter
from solotune.adapters.nf4 import FourBit
from solotune.adapters.nf4_linear import four_bit_linears
from solotune.adapters.nf4_product import check_works
from solotune.checkpoint.four_bit import StoredFourBit, with_four_bit
from solotune.checkpoint.safetensors_file import StoredTensor
from solotune.checkpoint.staging import Staging
from solotune.checkpoint.stored import OUTPUT_KEY, stored_weights, text_tower
from solotune.errors import CheckpointError
from solotune.models.auto import check_same_model
from solotune.models.decoder import Decoder

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
COMPARED_ROWS = 4096


@dataclass(frozen=True)
class LoadReport:
    """What was loaded; the counts are parameters by dtype."""

    folder: Path
    device: torch.device
    dtype_on_disk: dict[str, int]
    dtype_loaded: dict[str, int]
    num_parameters: int
    seconds: float
    left_out: dict[str, int]  # parameters that are no part of the text tower, by their first name
    num_new_rows: int = 0  # of the embedding
    trains_new_rows: bool = True
    four_bit_parameters: int = 0
    four_bit_bytes: int = 0  # scales included

    def lines(self) -> list[str]:
        """Return the facts to print at start."""
        lines = [
            f"weights: {self.num_parameters:,} parameters from {self.folder} "
            f"to {self.device} in {self.seconds:.1f} s",
            f"on disk: {_counts(self.dtype_on_disk)}; loaded as: {_counts(self.dtype_loaded)}",
        ]
        if count := self.four_bit_parameters:
            lines.append(
                f"4-bit: {count:,} parameters of {self.num_parameters:,}, "
                f"{8 * self.four_bit_bytes / count:.2f} bits each, scales included"
            )
        if self.left_out:
            lines.append(
                f"left out: {_counts(self.left_out)}: only the text tower is trained and saved"
            )
        if self.num_new_rows:
            stay = "" if self.trains_new_rows else " and stay so: trainable leaves it out"
            lines.append(
                f"added tokens: {self.num_new_rows} rows of the embedding begin as the mean of the "
                f"others{stay}"
            )
        return lines


def load_weights(
    model: Decoder,
    folder: Path,
    *,
    device: torch.device | str,
    on_host: Container[object] | None = None,
    fill_new_rows: bool = True,
) -> LoadReport:
    """Replace every meta parameter of `model` by one on `device`, filled from `folder`.

    Parameters in `on_host` go to host memory. The parameter objects and their dtypes stay; an
    adapter's parameters are left alone. The weights of 4-bit layers are quantised on `device`,
    unless the folder holds them so. Raises CheckpointError, before anything is allocated, where
    names or shapes on disk do not fit the model or a file is damaged.
    `fill_new_rows`: the model's `new_rows` become the mean of the rows before them; a folder that
    a run of this model saved has them already.
    """
    start = time.perf_counter()
    check_same_model(model, folder)
    device = torch.device(device)
    stored, left_out = text_tower(stored_weights(folder))
    stored = with_four_bit(stored)
    # A tied checkpoint may hold the output weight all the same, if it is the embedding.
    extra_output = stored.pop(OUTPUT_KEY, None) if model.tied else None
    named = {name: p for name, p in model.named_parameters() if not is_adapter(name)}
    wanted = {model.to_hf_key(name): parameter for name, parameter in named.items()}
    four_bit = {model.to_hf_key(name): m.layout for name, m in four_bit_linears(model).items()}
    new_rows = model.new_rows if fill_new_rows else ()
    growing = {model.to_hf_key("embed_tokens.weight"), OUTPUT_KEY} if new_rows else set()
    shapes = {key: tuple(parameter.shape) for key, parameter in wanted.items()}
    shapes |= {key: layout.shape for key, layout in four_bit.items()}
    _check_fit(folder, stored, shapes, four_bit, growing=growing, new_rows=new_rows)
    if four_bit:
        check_works(device)

    def place(parameter: Tensor) -> torch.device:
        return torch.device("cpu") if on_host and parameter in on_host else device

    indirect = [key for key, p in wanted.items() if not _is_direct(stored[key], p.dtype, place(p))]
    to_pack = {
        key: layout
        for key, layout in four_bit.items()
        if not isinstance(stored[key], StoredFourBit)
    }
    staging = Staging(
        max((stored[key].num_bytes for key in indirect), default=0),
        device,
        dense_bytes=max((stored[key].num_bytes for key in to_pack), default=0),
    )
    on_disk, loaded = Counter(), Counter()
    for key, parameter in wanted.items():
        assert parameter.is_meta, f"{key} has weights already"
        source = stored[key]
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=place(parameter))
        part = tensor[: source.shape[0]] if key in growing else tensor
        if key in to_pack:
            staging.pack(source, tensor, to_pack[key])
        elif _is_direct(source, parameter.dtype, tensor.device):
            source.read_into(part)
        else:
            staging.copy(source, part)
        replacement = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        # Keeps the parameter's identity for whoever holds it already.
        torch.utils.swap_tensors(parameter, replacement)
        layout, count = four_bit.get(key), math.prod(shapes[key])
        on_disk[_name(source)] += count
        loaded[layout.kind if layout else _dtype_name(parameter.dtype)] += count
    staging.close()

    if extra_output is not None:
        rows = extra_output.shape[0] if new_rows else None
        _check_equal(extra_output, model.output_weight[:rows])
    if new_rows:
        _fill_with_mean(model.embed_tokens.weight, new_rows)
        if not model.tied:
            _fill_with_mean(model.output_weight, new_rows)
    for name, tensor in chain(named.items(), model.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(f"{name} has no weights in a checkpoint and is still on meta")
    return LoadReport(
        folder=folder,
        device=device,
        dtype_on_disk=dict(on_disk),
        dtype_loaded=dict(loaded),
        num_parameters=sum(loaded.values()),
        seconds=time.perf_counter() - start,
        left_out=left_out,
        num_new_rows=len(new_rows),
        trains_new_rows=model.embed_tokens.weight.requires_grad,
        four_bit_parameters=sum(layout.num_numbers for layout in four_bit.values()),
        four_bit_bytes=sum(layout.num_bytes for layout in four_bit.values()),
    )


def _check_fit(
    folder: Path,
    stored: dict[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
    four_bit: Mapping[str, FourBit],
    *,
    growing: Set[str],
    new_rows: Sequence[int],
) -> None:
    """Raise where names, shapes or forms do not fit; `growing` may lack rows of `new_rows`."""
    if missing := [key for key in wanted if key not in stored]:
        repair = "the weights are incomplete or belong to another config.json"
        if missing == [OUTPUT_KEY]:
            repair = (
                "set tie_word_embeddings to true in config.json if its output weight is the "
                "embedding"
            )
        raise CheckpointError(f"{folder} lacks the weights {_some(missing)}: {repair}")
    if unexpected := [key for key in stored if key not in wanted]:
        raise CheckpointError(
            f"{stored[unexpected[0]].path} holds {_some(unexpected)}, which the model of "
            "config.json does not have: the two do not belong together"
        )
    for key, wanted_shape in wanted.items():
        entry, shape = stored[key], wanted_shape
        if isinstance(entry, StoredFourBit):
            if key not in four_bit:
                raise CheckpointError(
                    f"{entry.path}: {key} is in 4 bits, which only adapters can be trained over: "
                    "use the unquantised checkpoint, or lora_finetune_single_device"
                )
            assert entry.layout == four_bit[key], f"{key}: built for another folder"
            continue
        if key in growing and entry.shape[1:] == shape[1:]:
            lacking = range(entry.shape[0], shape[0])
            shape = entry.shape if set(lacking) <= set(new_rows) else shape
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.path}: {key} has the shape {list(entry.shape)} where config.json asks for "
                f"{list(wanted_shape)}: the two do not belong together"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{entry.path}: {key} is stored as {_dtype_name(entry.dtype)}, a quantised "
                "checkpoint: use the unquantised one"
            )


@torch.no_grad()
def _fill_with_mean(weight_VD: Tensor, new_rows: Sequence[int]) -> None:
    """Set `new_rows` to the mean of the rows before them, summed in fp32."""
    before_RD = weight_VD[: new_rows[0]]
    sum_D = torch.zeros(weight_VD.size(1), dtype=torch.float32, device=weight_VD.device)
    for rows_RD in before_RD.split(COMPARED_ROWS):
        sum_D += rows_RD.float().sum(0)
    weight_VD[list(new_rows)] = (sum_D / len(before_RD)).to(weight_VD.dtype)


def _is_direct(entry: StoredTensor, dtype: torch.dtype, device: torch.device) -> bool:
    return entry.dtype == dtype and device.type == "cpu"


def _check_equal(entry: StoredTensor, weight_VD: Tensor) -> None:
    """Raise unless the stored tensor is `weight_VD`; on its device only some rows at a time."""
    stored_VD = entry.read()
    equal = stored_VD.shape == weight_VD.shape and all(
        torch.equal(ours_RD, stored_RD.to(ours_RD.device, ours_RD.dtype))
        for ours_RD, stored_RD in zip(
            weight_VD.detach().split(COMPARED_ROWS), stored_VD.split(COMPARED_ROWS), strict=True
        )
    )
    if not equal:
        raise CheckpointError(
            f"{entry.path}: {OUTPUT_KEY} differs from the embedding, though config.json ties them: "
            "set tie_word_embeddings to false to train both, or remove one of them"
        )


def _name(entry: StoredTensor) -> str:
    return entry.layout.kind if isinstance(entry, StoredFourBit) else _dtype_name(entry.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {dtype}" for dtype, count in counts.items())


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"

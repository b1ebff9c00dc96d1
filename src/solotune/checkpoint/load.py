"""Weights from a Hugging Face folder into a model built on meta, one tensor at a time.

Each tensor is read into the parameter's own new memory; one that has another dtype on disk, or goes
to a device, passes through the host alone. Peak: the model and one tensor.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from solotune.checkpoint.safetensors_file import StoredTensor, read_header
from solotune.errors import CheckpointError
from solotune.models.auto import check_same_model
from solotune.models.decoder import Decoder

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OUTPUT_KEY = "lm_head.weight"
# Old checkpoints carry the rotary frequencies, which follow from config.json.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
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

    def lines(self) -> list[str]:
        """Return the facts to print at start."""
        return [
            f"weights: {self.num_parameters:,} parameters from {self.folder} "
            f"to {self.device} in {self.seconds:.1f} s",
            f"on disk: {_counts(self.dtype_on_disk)}; loaded as: {_counts(self.dtype_loaded)}",
        ]


def load_weights(model: Decoder, folder: Path, *, device: torch.device | str) -> LoadReport:
    """Replace every meta parameter of `model` by one on `device`, filled from `folder`.

    The parameter objects and their dtypes stay. Raises CheckpointError, before anything is
    allocated, where names or shapes on disk do not fit the model or a file is damaged.
    """
    start = time.perf_counter()
    check_same_model(model, folder)
    stored = stored_weights(folder)
    # A tied checkpoint may hold the output weight all the same, if it is the embedding.
    extra_output = stored.pop(OUTPUT_KEY, None) if model.tied else None
    wanted = {model.to_hf_key(name): tensor for name, tensor in model.named_parameters()}
    _check_fit(folder, stored, wanted)

    # One buffer for all that cannot be read in place: allocated and freed one by one, they would
    # leave holes between the parameters (tried with fp32 on disk: 1.7 times the model).
    indirect = [
        stored[key].num_bytes
        for key, parameter in wanted.items()
        if not _is_direct(stored[key], parameter.dtype, device)
    ]
    staging = _Staging(max(indirect, default=0), torch.device(device))
    on_disk, loaded = Counter(), Counter()
    for key, parameter in wanted.items():
        assert parameter.is_meta, f"{key} has weights already"
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if _is_direct(stored[key], parameter.dtype, device):
            stored[key].read_into(tensor)
        else:
            staging.copy(stored[key], tensor)
        replacement = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        # Keeps the parameter's identity for whoever holds it already.
        torch.utils.swap_tensors(parameter, replacement)
        on_disk[_name(stored[key].dtype)] += parameter.numel()
        loaded[_name(parameter.dtype)] += parameter.numel()

    staging.close()

    if extra_output is not None:
        _check_equal(extra_output, model.output_weight)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(f"{name} has no weights in a checkpoint and is still on meta")
    return LoadReport(
        folder=folder,
        device=torch.device(device),
        dtype_on_disk=dict(on_disk),
        dtype_loaded=dict(loaded),
        num_parameters=sum(loaded.values()),
        seconds=time.perf_counter() - start,
    )


class _Staging:
    """Host memory that tensors pass through on their way to another dtype or device.

    For a card two pinned buffers: one is read from the disk while the other is on its way.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        try:
            self._buffers = [self._buffer(num_bytes, pin=on_card) for _ in range(1 + on_card)]
        except RuntimeError:  # WSL2 pins little; pageable memory is slower, not wrong
            self._buffers = [self._buffer(num_bytes, pin=False)]
        self._events: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._on_card, self._turn = on_card, 0

    @staticmethod
    def _buffer(num_bytes: int, *, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)

    def copy(self, source: StoredTensor, target: Tensor) -> None:
        """Fill `target` from the file."""
        index = self._turn % len(self._buffers)
        self._turn += 1
        if (event := self._events[index]) is not None:
            event.synchronize()  # the buffer's last copy has left it
        target.copy_(source.read(self._buffers[index]), non_blocking=True)
        if self._on_card:
            done = torch.cuda.Event()
            done.record()
            self._events[index] = done

    def close(self) -> None:
        """Wait for the copies and free the buffers."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._buffers.clear()


def stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return a folder's weights by name: of model.safetensors, or of the shards in its index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        tensors = read_header(single)
    elif index.is_file():
        tensors = _sharded_weights(index)
    elif any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights in .bin files, which are not read: convert it once with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    else:
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json: "
            "name a Hugging Face model folder"
        )
    return {name: t for name, t in tensors.items() if not name.endswith(IGNORED_SUFFIX)}


def _sharded_weights(index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shard_names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a readable index of shards: download or copy it again"
        ) from error
    tensors: dict[str, StoredTensor] = {}
    for shard in shard_names:
        # A name, not a path. Links are followed: download caches consist of them.
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{index} names the shard {shard!r}, which leaves its folder")
        for name, tensor in read_header(index.parent / shard).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in both {tensors[name].path} and {tensor.path}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(
                f"{index.parent / shard} lacks {name}, which the index puts there: "
                "download or copy it again"
            )
    return tensors


def _check_fit(folder: Path, stored: dict[str, StoredTensor], wanted: Mapping[str, Tensor]) -> None:
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
    for key, parameter in wanted.items():
        entry = stored[key]
        if entry.shape != parameter.shape:
            raise CheckpointError(
                f"{entry.path}: {key} has the shape {list(entry.shape)} where config.json asks for "
                f"{list(parameter.shape)}: the two do not belong together"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{entry.path}: {key} is stored as {_name(entry.dtype)}, a quantised checkpoint: "
                "use the unquantised one"
            )


def _is_direct(entry: StoredTensor, dtype: torch.dtype, device: torch.device | str) -> bool:
    return entry.dtype == dtype and torch.device(device).type == "cpu"


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {dtype}" for dtype, count in counts.items())


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"

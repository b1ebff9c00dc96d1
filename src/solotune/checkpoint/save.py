"""A Hugging Face folder from a model: weights, config.json, generation_config.json.

Weights are cast and written one by one (see safetensors_file.py), so saving needs no memory for a
second model.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solotune.checkpoint.safetensors_file import SourceTensor, write_file
from solotune.errors import CheckpointError

SHARD_BYTES = 5 * 10**9


def weight_sources(
    named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype
) -> list[SourceTensor]:
    """Return what to write for (name, tensor) pairs, in `dtype`.

    One tensor under two names is written once, under the first: readers tie the second to it.
    """
    sources, seen = [], set()
    for name, tensor in named:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        sources.append(SourceTensor(name, dtype, tuple(tensor.shape), lambda tensor=tensor: tensor))
    return sources


def write_weights(
    folder: Path, sources: Sequence[SourceTensor], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write model.safetensors, or shards of up to `shard_bytes` and an index; raises OSError."""
    shards: list[list[SourceTensor]] = [[]]
    filled = 0
    for source in sources:
        if shards[-1] and filled + source.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += source.num_bytes
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / name, shard)
        weight_map |= {source.name: name for source in shard}
    total_bytes = sum(source.num_bytes for source in sources)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def saved_config(
    config: dict[str, Any], *, dtype: torch.dtype, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Return config.json with the dtype of the saved weights and the trained terminators.

    transformers 5 calls the dtype `dtype`, older ones `torch_dtype`: the name that is there stays.
    """
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    saved = config | dict.fromkeys(names, str(dtype).removeprefix("torch."))
    return with_terminators(saved, eos_ids)


def with_terminators(config: dict[str, Any], eos_ids: Sequence[int]) -> dict[str, Any]:
    """Return `config` with `eos_ids` among its `eos_token_id`, which stays as it is if they are."""
    old = config.get("eos_token_id")
    known = old if isinstance(old, list) else [] if old is None else [old]
    new = [token for token in dict.fromkeys(eos_ids) if token not in known]
    if not new:
        return config
    ids = known + new
    return config | {"eos_token_id": ids if len(ids) > 1 else ids[0]}


def write_json(path: Path, value: object) -> None:
    """Write `value` as Hugging Face files have it; raises OSError."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value

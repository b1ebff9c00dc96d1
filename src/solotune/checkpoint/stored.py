"""The weights in a Hugging Face folder by name, whatever files they lie in; nothing is read yet."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from solotune.checkpoint.bin_file import read_bin
from solotune.checkpoint.safetensors_file import StoredTensor, read_header
from solotune.errors import CheckpointError

OUTPUT_KEY = "lm_head.weight"
# Old checkpoints carry the rotary frequencies, which follow from config.json.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# How multimodal folders begin the names of their text tower's weights.
TEXT_TOWER = re.compile(r"(model\.)?language_model\.(model\.)?")


def stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return a folder's weights by name: of one file, or of the shards in its index.

    Safetensors before .bin, where a folder holds both.
    """
    for stem, suffix, read in (
        ("model", "safetensors", read_header),
        ("pytorch_model", "bin", read_bin),
    ):
        single, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if single.is_file():
            tensors = read(single)
        elif index.is_file():
            tensors = _sharded_weights(index, read)
        else:
            continue
        return {name: t for name, t in tensors.items() if not name.endswith(IGNORED_SUFFIX)}
    raise CheckpointError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json: "
        "name a Hugging Face model folder"
    )


def text_tower(
    stored: dict[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """Return the weights of a model for text, and how many others a multimodal folder has."""
    if not any(TEXT_TOWER.match(name) for name in stored):
        return stored, {}
    text: dict[str, StoredTensor] = {}
    left_out = Counter()
    for name, tensor in stored.items():
        if match := TEXT_TOWER.match(name):
            rest = name[match.end() :]
            text[rest if rest == OUTPUT_KEY else f"model.{rest}"] = tensor
        elif name == OUTPUT_KEY:
            text[name] = tensor
        else:
            part = name.removeprefix("model.").partition(".")[0]
            left_out[part] += math.prod(tensor.shape)
    return text, dict(left_out)


def _sharded_weights(
    index: Path, read: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
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
        for name, tensor in read(index.parent / shard).items():
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

"""The base model of an adapter: which folder it is, and whether it is the one trained on."""

import hashlib
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from solotune.checkpoint.folders import model_folder
from solotune.checkpoint.safetensors_file import StoredTensor
from solotune.checkpoint.stored import OUTPUT_KEY, stored_weights, text_tower
from solotune.errors import CheckpointError

SAMPLED = 1024  # numbers of each tensor
FOUR_BIT = "4bit"  # begins the fingerprint of such a folder
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_DOWNLOADED = ".downloaded_from"  # written by `tune download`


def find_base(name: str | None, adapter: Path, *, base_dir: str | Path | None) -> Path:
    """Return the folder of the base model that the adapter in `adapter` names, or `base_dir`.

    A name of the Hub is looked for in ./models, where `tune download` puts it, and in the Hub's
    cache; nothing is fetched. Raises CheckpointError where the folder is not found.
    """
    if base_dir is not None:
        return model_folder(base_dir, key="base_dir")
    if name is None:
        raise CheckpointError(f"{adapter} does not name its base model: set base_dir")
    if Path(name).is_dir():
        return model_folder(name, key="base_model_name_or_path")
    if _HUB_NAME.fullmatch(name):
        downloaded = Path("models", name.partition("/")[2])
        if is_base(name, downloaded):
            return downloaded
        from huggingface_hub import try_to_load_from_cache  # only here: it is slow to import

        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
        raise CheckpointError(
            f"{adapter} is an adapter of {name}, which is not on this machine: "
            f"`tune download {name}`, or set base_dir to its folder"
        )
    raise CheckpointError(
        f"{adapter} is an adapter of {name}, which does not exist here: set base_dir to the "
        "folder of that model"
    )


def is_base(name: str, folder: Path) -> bool:
    """Whether `name` means `folder`: as its path, or as the model that was downloaded to it."""
    mark = folder / _DOWNLOADED
    if mark.is_file() and mark.read_text(encoding="utf-8").strip() == name:
        return True
    return Path(name).resolve() == folder.resolve()


def base_name(folder: Path) -> str:
    """Return what an adapter's file should call the model in `folder`: its absolute path."""
    return str(folder.resolve())


def fingerprint(folder: Path) -> str:
    """Return a text that differs between models: of names, shapes, some numbers of each tensor.

    It is the same for a copy in other files, in fp32, or beside a vision tower: numbers are
    rounded to bf16. A folder in 4 bits has one of its own, which begins with FOUR_BIT.
    """
    stored, _ = text_tower(stored_weights(folder))
    embedding = stored.get("model.embed_tokens.weight")
    digest = hashlib.sha256()
    is_plain = all(tensor.dtype.is_floating_point for tensor in stored.values())
    for name, tensor in sorted(stored.items()):
        sample = _sample(tensor)
        if name == OUTPUT_KEY and embedding is not None and _equal(sample, _sample(embedding)):
            continue  # a tied weight that is stored all the same
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(bytes(sample.view(torch.uint8).numpy()))
    return f"{'' if is_plain else FOUR_BIT + ' '}1 {digest.hexdigest()[:32]}"


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _sample(tensor: StoredTensor) -> Tensor:
    """Return up to SAMPLED numbers from the middle of a tensor, as bf16 if they are floats."""
    if tensor.shape:
        rows = tensor.shape[0]
        count = max(1, min(rows, SAMPLED * rows // max(1, math.prod(tensor.shape))))
        middle = (rows - count) // 2
        tensor = tensor.rows(middle, middle + count)
    numbers = tensor.read().flatten()[:SAMPLED]
    return numbers.bfloat16() if numbers.dtype.is_floating_point else numbers

"""One pytorch_model.bin, read without running anything that it holds.

The file is a pickle in a zip. `torch.load(weights_only=True)` builds tensors and containers alone;
with `mmap=True` the values stay in the file until each is copied. Files from before torch 1.6 are
no zip and are refused.
"""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from solotune.checkpoint.safetensors_file import StoredTensor
from solotune.errors import CheckpointError


@dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """A tensor whose values are in a mapped file."""

    mapped: Tensor

    def read_into(self, target: Tensor) -> None:
        assert (target.dtype, target.shape) == (self.dtype, self.shape)
        target.copy_(self.mapped)

    def rows(self, start: int, stop: int) -> StoredTensor:
        mapped = self.mapped[start:stop]
        return replace(self, shape=tuple(mapped.shape), mapped=mapped)


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; raises CheckpointError for anything else in it."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: download or copy it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no file of tensors that torch loads with weights_only=True: download it "
            "again, or use safetensors"
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not tensors by name")
    for name, tensor in loaded.items():
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not (isinstance(name, str) and dense):
            kind = str(getattr(tensor, "layout", type(tensor).__name__))
            raise CheckpointError(
                f"{path}: {name!r} is no plain tensor but {kind}: use safetensors"
            )
    return {
        name: MappedTensor(path, name, tensor.dtype, tuple(tensor.shape), 0, tensor.detach())
        for name, tensor in loaded.items()
    }

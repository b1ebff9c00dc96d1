"""One safetensors file, read and written tensor by tensor.

Layout: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`,
then the data (https://github.com/huggingface/safetensors#format).

The safetensors package is not used for it. Its `save_file` wants all tensors at once, in host
memory and in the dtype to be saved: with 419 MB of bf16 tensors to be saved as fp32, anonymous
memory rises by 839 MB; `write_file` needs 34 MB, the largest tensor (safetensors 0.8.0; saved as
they are, neither needs any). Its `load_file` maps the file: weights change when the file is
written to.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solotune.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
PIECE_BYTES = 64 * 2**20  # one system call moves less than 2 GiB


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that was checked to hold it."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def read_into(self, target: Tensor) -> None:
        """Fill `target`: contiguous, in host memory, of the stored dtype and shape."""
        assert (target.dtype, target.shape) == (self.dtype, self.shape)
        memory = _bytes_of(target)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                done = 0
                while done < len(memory):
                    count = file.readinto(memory[done : done + PIECE_BYTES])
                    if not count:
                        raise _damaged(self.path, f"it ends inside {self.name}")
                    done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error

    def read(self, buffer: Tensor | None = None) -> Tensor:
        """Return the tensor in fresh host memory, or in the first bytes of a uint8 `buffer`."""
        if buffer is None:
            tensor = torch.empty(self.shape, dtype=self.dtype)
        else:
            tensor = buffer[: self.num_bytes].view(self.dtype).view(self.shape)
        self.read_into(tensor)
        return tensor

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """Return the part [start:stop] of the first axis, as a tensor in the same file."""
        stop = min(stop, self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + start * row_bytes)

    def pieces(self, num_bytes: int) -> Iterator["StoredTensor"]:
        """Yield the tensor in parts of about `num_bytes`, in order."""
        if not self.shape:
            yield self
            return
        count = max(1, num_bytes * self.shape[0] // max(1, self.num_bytes))
        for start in range(0, self.shape[0], count):
            yield self.rows(start, start + count)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SourceTensor:
    """A tensor to be written: what the header says of it, and how to get it in its turn."""

    name: str
    dtype: torch.dtype  # on disk
    shape: tuple[int, ...]
    # any device, dtype and layout; or its parts along the first axis, one by one
    get: Callable[[], Tensor | Iterator[Tensor]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, after checking that the file really holds them."""
    header, data_start, file_bytes = _read_json(path)
    try:
        header.pop("__metadata__", None)
        tensors = {name: _entry(path, name, entry, data_start) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header is not readable") from error

    for tensor in tensors.values():
        end = tensor.offset + tensor.num_bytes
        if end > file_bytes:
            raise _damaged(path, f"{tensor.name} would end at byte {end:,} of {file_bytes:,}")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that the header holds beside the tensors."""
    metadata = _read_json(path)[0].get("__metadata__")
    entries = metadata.items() if isinstance(metadata, dict) else ()
    return {key: value for key, value in entries if isinstance(value, str)}


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header of a file, the byte at which its data starts, and its length in bytes."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"it has only {file_bytes} bytes")
            if prefix == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`"
                )
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"its header would be {header_bytes:,} bytes long")
            text = file.read(header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: download or copy it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    try:
        header = json.loads(text)
    except ValueError as error:
        raise _damaged(path, "its header is not readable") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not readable")
    return header, 8 + header_bytes, file_bytes


def write_file(
    path: Path, sources: Sequence[SourceTensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the tensors with `format: pt`, each fetched, cast and written before the next one.

    Raises OSError; the caller owns the folder and knows what to clean up.
    """
    # Wider types first: every tensor then starts at a multiple of its item size.
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for source in ordered:
        header[source.name] = {
            "dtype": CODES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [start, start + source.num_bytes],
        }
        start += source.num_bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8

    with path.open("wb", buffering=0) as file:
        _write(file, memoryview(struct.pack("<Q", len(text)) + text))
        for source in ordered:
            got = source.get()
            num_rows = 0
            for part in [got] if isinstance(got, Tensor) else got:
                # First to the host, then the cast: a full card has no room for a second copy.
                tensor = part.detach().cpu().to(source.dtype)
                num_rows += len(tensor) if tensor.dim() else 0
                assert tensor.shape[1:] == source.shape[1:], source.name
                _write(file, _bytes_of(tensor.contiguous()))
                del tensor, part  # before the next one is made
            assert num_rows == (source.shape[0] if source.shape else 0), source.name
            del got


def _entry(path: Path, name: str, entry: dict, data_start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: {name} has the unsupported dtype {entry['dtype']}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if min((0, start, *shape)) < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(name)
    return StoredTensor(path, name, dtype, shape, data_start + start)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(file, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += file.write(memory[done : done + PIECE_BYTES])


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated or damaged ({what}): download or copy it again")

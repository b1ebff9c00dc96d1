"""Tokens on disk, mapped into memory: a second start reads what the first one made.

An entry is a folder, named by a hash of everything that decides the tokens:

    <cache_dir>/<key>/
      tokens.int32, trained.uint8                  of all samples, one after the other
      lengths.int64, targets.int64, rows.uint64    one number a sample
      header.json                                  report, hashes of the above, hash of itself

It is written beside its place and renamed, so that it is whole or not there.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from solotune.data.cache_key import file_hash, json_hash
from solotune.data.report import Report
from solotune.data.samples import (
    Batching,
    SampleSet,
    SampleWriter,
    combine_hashes,
    content_hash,
)
from solotune.errors import DataError

WORTH_TOKENS = 1 << 20  # fewer are made again in a second or two, and stay in memory
_KEPT_DAYS = 30  # since an entry was last read
_ENTRY = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}-\w+")
_TYPES = {
    "tokens": np.dtype(np.int32),
    "trained": np.dtype(np.uint8),
    "lengths": np.dtype(np.int64),
    "targets": np.dtype(np.int64),
    "rows": np.dtype(np.uint64),
}
_CONTENT, _INDEX = ("tokens", "trained"), ("lengths", "targets", "rows")


class _Damaged(Exception):
    """What is wrong with an entry."""


class CacheEntry:
    """The place of one set of tokens in the cache; `place` is its folder, there or not."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.place = folder / key
        self.fault: str | None = None  # why an entry that is there was not used

    def read(self, *, batching: Batching | None = None) -> SampleSet | None:
        """The samples of the entry, or None where there is none that is whole.

        Every byte is compared with the hashes of the header, at about 1 GB/s.
        """
        try:
            header = self._header()
            for name in _TYPES:
                wanted, found = header["bytes"][name], self._file(name).stat().st_size
                if wanted != found:
                    raise _Damaged(f"{name} has {found} bytes instead of {wanted}")
            # read in blocks, not through the map: the pages then count as no memory of ours
            if header["content"] != combine_hashes(*(file_hash(self._file(n)) for n in _CONTENT)):
                raise _Damaged("the tokens are not those that were written")
            arrays = {name: _mapped(self._file(name), dtype) for name, dtype in _TYPES.items()}
            if header["index"] != content_hash(*(arrays[name] for name in _INDEX)):
                raise _Damaged("the lengths are not those that were written")
            report = Report.from_json(header["report"])
        except (_Damaged, FileNotFoundError) as damage:
            if self.place.exists():
                what = damage if isinstance(damage, _Damaged) else "a file is missing"
                self.fault = f"{self.place} is damaged ({what}) and was made again"
                shutil.rmtree(self.place, ignore_errors=True)
            return None
        except OSError as error:
            self.fault = f"{self.place} cannot be read: {error.strerror}"
            return None
        with contextlib.suppress(OSError):
            os.utime(self._file("header"))  # when it was last of use
        return SampleSet(
            tokens_T=arrays["tokens"],
            trained_T=arrays["trained"],
            lengths_N=arrays["lengths"],
            targets_N=arrays["targets"],
            rows_N=arrays["rows"],
            report=report,
            batching=batching,
            content=header["content"],
            facts=[f"tokens read from the cache {self.place}"],
        )

    def _file(self, name: str) -> Path:
        return self.place / ("header.json" if name == "header" else f"{name}.{_TYPES[name]}")

    def _header(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._file("header").read_text(encoding="utf-8"))
            checked = stored.pop("header")
        except (ValueError, AttributeError, KeyError):
            raise _Damaged("its header cannot be read") from None
        if checked != json_hash(stored):
            raise _Damaged("its header is not the one that was written")
        return stored


class CacheWriter(SampleWriter):
    """Collects samples in memory, and from `WORTH_TOKENS` on in the files of an entry.

    Where the disk refuses, all of them stay in memory and a fact of the SampleSet says so.
    """

    def __init__(self, entry: CacheEntry) -> None:
        super().__init__()
        self._entry = entry
        self._facts = [entry.fault] if entry.fault else []
        self._folder: Path | None = None  # while files are written
        self._files: dict[str, BinaryIO] = {}
        self._hashes = {name: hashlib.blake2b() for name in _CONTENT}
        self._num_tokens = 0
        self._may_write = True

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _store(self, tokens: bytes, trained: bytes) -> None:
        if self._folder is None:
            super()._store(tokens, trained)
            if self._may_write and len(self._trained) >= WORTH_TOKENS:
                self._begin()
            return
        try:
            self._write(tokens, trained)
        except OSError as error:
            self._give_up(error)
            super()._store(tokens, trained)

    def finish(
        self, *, report: Report, batching: Batching | None = None, name: str = "dataset"
    ) -> SampleSet:
        """The SampleSet of all samples added, mapped from the new entry where there is one."""
        if self._folder is not None:
            try:
                samples = self._publish(report, batching)
                samples.name = name
                return samples
            except OSError as error:
                self._give_up(error)
        samples = super().finish(report=report, batching=batching, name=name)
        samples.facts += self._facts
        return samples

    def _begin(self) -> None:
        """Move what is in memory to files."""
        try:
            self._entry.folder.mkdir(parents=True, exist_ok=True)
            prefix = f".{self._entry.key}-"
            self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._entry.folder))
            for name in _CONTENT:
                self._files[name] = self._path(name).open("wb", buffering=0)
            self._write(bytes(self._tokens), bytes(self._trained))
        except OSError as error:
            self._num_tokens = 0  # all of them are still in memory
            self._give_up(error)
        else:
            self._tokens, self._trained = bytearray(), bytearray()

    def _write(self, tokens: bytes, trained: bytes) -> None:
        for name, data in zip(_CONTENT, (tokens, trained), strict=True):
            self._hashes[name].update(data)
            view = memoryview(data)
            while view:
                view = view[self._files[name].write(view) :]
        self._num_tokens += len(trained)

    def _give_up(self, error: OSError) -> None:
        """Take what was written back into memory and go on there."""
        if self._num_tokens and self._folder is not None:
            for name, data in zip(_CONTENT, (self._tokens, self._trained), strict=True):
                with self._path(name).open("rb") as file:
                    data += file.read(self._num_tokens * _TYPES[name].itemsize)
        self._remove()
        self._may_write = False
        where = self._entry.folder
        self._facts.append(
            f"tokens are not cached: {where}: {error.strerror or error}; choose another folder "
            "with dataset.cache_dir, or null to do without"
        )

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.{_TYPES[name]}"

    def _remove(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _publish(self, report: Report, batching: Batching | None) -> SampleSet:
        """Complete the files, put them in their place and map them. Raises OSError."""
        assert self._folder is not None
        index = self._index()
        header: dict[str, Any] = {
            "key": self._entry.key,
            "content": combine_hashes(*self._hashes.values()),
            "index": content_hash(*index.values()),
            "bytes": {
                **{name: self._num_tokens * _TYPES[name].itemsize for name in _CONTENT},
                **{name: values.nbytes for name, values in index.items()},
            },
            "report": report.to_json(),
        }
        header["header"] = json_hash(header)
        for name, values in index.items():
            self._files[name] = self._path(name).open("wb")
            self._files[name].write(values.tobytes())
        self._files["header"] = (self._folder / "header.json").open("wb")
        self._files["header"].write(json.dumps(header, indent=1).encode())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        try:
            self._folder.rename(self._entry.place)
        except OSError:
            if not self._entry.place.exists():
                raise
            # another process was faster: its entry is the same, and ours is not needed
        else:
            self._folder = None
            _sync_folder(self._entry.folder)
        samples = self._entry.read(batching=batching)
        if samples is None:
            raise DataError(
                f"dataset.cache_dir: {self._entry.place} cannot be read right after it was written "
                f"({self._entry.fault or 'it is gone'}): look at the disk, or set the key to null"
            )
        self._remove()
        samples.facts = [*self._facts, f"tokens written to the cache {self._entry.place}"]
        _remove_old(self._entry.folder)
        return samples


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/solotune/tokens, or that of ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "solotune" / "tokens"


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _sync_folder(folder: Path) -> None:
    """Make a rename last; Windows has no such call for folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(folder: Path) -> None:
    """Remove entries that no run has read for long, and what a killed run has left."""
    now = time.time()
    for path in folder.iterdir():
        try:
            if _ENTRY.fullmatch(path.name):
                days = (now - (path / "header.json").stat().st_mtime) / 86400
                is_old = days > _KEPT_DAYS
            else:
                days = (now - path.stat().st_mtime) / 86400
                is_old = bool(_UNFINISHED.fullmatch(path.name)) and days > 1
        except OSError:
            continue
        if is_old:
            shutil.rmtree(path, ignore_errors=True)

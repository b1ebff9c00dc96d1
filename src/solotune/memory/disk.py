"""Activations in memory-mapped files: where host memory is short too.

Saves:    the host memory of what is offloaded, but a few staging buffers.
Costs:    its bytes written to the disk and read back, each step.
Excludes: nothing.
Label:    bit-exact. Figures: docs/activation_offloading.md
"""

import os
import tempfile
from collections import defaultdict, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from solotune.device_kind import is_planning
from solotune.errors import CheckpointError
from solotune.memory.host import HostMemory, Moved
from solotune.memory.workers import Worker

_MOST_PENDING = 4  # writes: a slow disk must not collect staging buffers


class Disk:
    """Files in `folder` that have no name: their space is free again however the process ends.

    One thread writes and reads, so that the main one never waits for the disk before it has to. A
    file that is done with is used again for the next tensor of its size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # bytes -> mapped files
        self._pending: deque[Future[None]] = deque()
        self._worker = Worker("activations")

    def move(self, host: HostMemory, source: Tensor) -> "OnDisk":
        """Return a tensor on its way to a file."""
        return OnDisk(host, self, source)

    def take_file(self, like: Tensor) -> Tensor:
        """Return mapped memory shaped like a tensor. Raises CheckpointError on a full disk."""
        waiting = self._free[like.nbytes]
        flat = waiting.pop() if waiting else self._new_file(like.nbytes)
        return flat.view(like.dtype).view(like.shape)

    def give_file(self, mapped: Tensor) -> None:
        """Take mapped memory back."""
        flat = mapped.view(-1).view(torch.uint8)
        self._free[flat.numel()].append(flat)

    def write(self, host: HostMemory, mapped: Tensor, staged: Tensor, done: Any) -> None:
        """Write a staged copy once the event `done` is over, and give its buffer back."""
        self._pending.append(self._worker.submit(host.write_home, mapped, staged, done))
        while len(self._pending) > _MOST_PENDING:
            self._pending.popleft().result()

    def read(self, host: HostMemory, mapped: Tensor) -> Future[Tensor]:
        """Return what will be a staged copy; behind all that was written before."""
        return self._worker.submit(host.stage, mapped)

    def _new_file(self, num_bytes: int) -> Tensor:
        if is_planning():
            return torch.empty(num_bytes, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                allocate(file, num_bytes)
                return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(num_bytes,)))
        except OSError as error:
            raise CheckpointError(
                f"activation_offload_to=disk: {self.folder} cannot hold {num_bytes / 2**20:.0f} "
                f"MiB more ({error.strerror}): make room, or use activation_offload_to=host"
            ) from None


class OnDisk(Moved):
    """A tensor on its way to a file, and, once asked for, on its way back."""

    def __init__(self, host: HostMemory, disk: Disk, source: Tensor) -> None:
        super().__init__(host, source)
        self._disk = disk
        self._mapped = disk.take_file(source)
        disk.write(host, self._mapped, self._buffer, self._written)
        self._staged: Future[Tensor] | None = None

    def read_ahead(self) -> None:
        if self._staged is None:
            self._staged = self._disk.read(self._host, self._mapped)

    def fetch(self) -> None:
        if self._returned is None:
            self.read_ahead()
            assert self._staged is not None
            self._buffer, self._written = self._staged.result(), None
            self._disk.give_file(self._mapped)
            super().fetch()


def allocate(file: BinaryIO, num_bytes: int) -> None:
    """Give a file its blocks now: a hole that the disk cannot fill would kill the process later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return
    zeros = bytes(2**20)
    for start in range(0, num_bytes, len(zeros)):
        file.write(zeros[: num_bytes - start])

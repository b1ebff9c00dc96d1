"""Where the optimizer's state lives: on the host, or in memory-mapped files.

Saves:    all state on the device but two parameters'.
Costs:    on a card two copies of the state a step, beside the backward; on disk the bytes of the
          state read and written each step.
Excludes: bitsandbytes' paged optimizers, whose state is host memory already.
Label:    bit-exact. Figures: docs/optimizer_state.md
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from solotune.device_kind import device_kind, is_planning
from solotune.errors import CheckpointError, ConfigError
from solotune.memory.disk import allocate
from solotune.memory.host import HostMemory
from solotune.memory.workers import Worker

SMALLEST_BYTES = 4096  # tensors below it stay: step counters, quantisation maps


@dataclass
class _Slot:
    """A tensor of the state by where it is found, and its home."""

    owner: Any  # the state's dict, or a tensor subclass that the tensor is a part of
    name: str
    home: Tensor

    def set(self, tensor: Tensor) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = tensor
        else:
            setattr(self.owner, self.name, tensor)


class StateHome:
    """Keeps an optimizer's state off the device between the steps of each parameter.

    `folder` None: in host memory. Otherwise in files of `folder`, which is emptied first: live
    state is never a checkpoint. What is pinned is a few staging buffers; what stands behind them is
    pageable memory or the file cache.
    """

    def __init__(self, optimizer: Optimizer, *, host: HostMemory, folder: Path | None) -> None:
        if getattr(optimizer, "is_paged", False):
            raise ConfigError(
                f"optimizer_state: {type(optimizer).__name__} pages its state itself: use "
                "optimizer_state=device, or the optimizer without Paged"
            )
        self.optimizer = optimizer
        self.host = host
        self.folder = folder
        # On CPU the optimizer steps the mapped files themselves.
        self._in_place = folder is not None and device_kind(host.device) == "cpu"
        self._num_files = 0
        self.num_bytes = 0  # of all state here: what a step reads, and writes
        self._slots: dict[nn.Parameter, list[_Slot]] = {}
        self._on_way: dict[nn.Parameter, list[tuple[_Slot, Future[Tensor]]]] = {}
        self._written: list[Future[None]] = []
        # One thread, so that what is queued for it runs in order: a read of a home comes after
        # the write to it.
        self._worker = Worker("optimizer-state")
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    @contextmanager
    def on_device(self, parameter: nn.Parameter, *, then: nn.Parameter | None) -> Iterator[None]:
        """Have the state of `parameter` on the device inside, and start on that of `then`."""
        self._start(parameter)
        for slot, buffer in self._on_way.pop(parameter, []):
            staged = buffer.result()
            tensor = torch.empty_like(staged, device=parameter.device)
            done = self.host.queues.copy(tensor, staged)
            self.host.give_buffer(staged, done)
            self.host.queues.wait(done)
            slot.set(tensor)
        if then is not None:
            self._start(then)
        yield
        self.keep(parameter)

    def keep(self, parameter: nn.Parameter) -> None:
        """Send the state of `parameter` home; at its first time, make it one."""
        if parameter not in self._slots:
            self._slots[parameter] = self._move_in(parameter)
            return
        for slot in self._slots[parameter]:
            value = _value(slot)
            if value is slot.home:
                continue
            staged = self.host.take_buffer(value)
            done = self.host.queues.copy(staged, value)
            self._written.append(self._worker.submit(self.host.write_home, slot.home, staged, done))
            slot.set(slot.home)
        while len(self._written) > 8:  # a slow disk must not collect buffers
            self._written.pop(0).result()

    def lines(self) -> list[str]:
        """Return the facts to print once the state is made."""
        gib = self.num_bytes / 2**30
        if self.folder is None:
            return [f"optimizer state: {gib:.2f} GiB in host memory"]
        return [
            f"optimizer state: {gib:.2f} GiB in {self.folder}, read and written each step "
            f"(1000 steps write {gib * 1000 / 1024:.2f} TiB: mind the endurance of an SSD)"
        ]

    def flush(self) -> None:
        """Wait until all state is home, where a save can read it."""
        for written in self._written:
            written.result()
        self._written.clear()

    def close(self) -> None:
        """End the worker and delete the files."""
        self._worker.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, parameter: nn.Parameter) -> None:
        """Let the worker copy the homes of a parameter's state into pinned buffers."""
        if self._in_place or parameter in self._on_way or parameter not in self._slots:
            return
        self._on_way[parameter] = [
            (slot, self._worker.submit(self.host.stage, slot.home))
            for slot in self._slots[parameter]
        ]

    def _move_in(self, parameter: nn.Parameter) -> list[_Slot]:
        slots = []
        for owner, name, value in _large_tensors(self.optimizer.state[parameter]):
            home = self._new_home(value)
            home.copy_(value)
            slot = _Slot(owner, name, home)
            slot.set(home)
            slots.append(slot)
            self.num_bytes += value.nbytes
        return slots

    def _new_home(self, value: Tensor) -> Tensor:
        if self.folder is None or is_planning():
            return torch.empty_like(value, device="cpu")
        path = self.folder / f"{self._num_files}.bin"
        self._num_files += 1
        try:
            with path.open("wb") as file:
                allocate(file, value.nbytes)
        except OSError as error:
            raise CheckpointError(
                f"optimizer_state=disk: {path} cannot get {value.nbytes / 2**20:.0f} MiB "
                f"({error.strerror}): make room, or use optimizer_state=host"
            ) from None
        flat = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype)
        return flat.view(value.shape)


def state_home(
    optimizer: Optimizer, where: str, *, host: HostMemory, output_dir: Path
) -> StateHome | None:
    """Return the home of an optimizer's state for a value of `optimizer_state`; device: None."""
    if where == "device":
        return None
    folder = output_dir / "optimizer_state" if where == "disk" else None
    return StateHome(optimizer, host=host, folder=folder)


def _value(slot: _Slot) -> Tensor:
    return slot.owner[slot.name] if isinstance(slot.owner, dict) else getattr(slot.owner, slot.name)


def _large_tensors(state: dict[str, Any]) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield (owner, name, tensor) of the state's large tensors, parts of subclasses among them."""
    for name, value in list(state.items()):
        if not isinstance(value, Tensor):
            continue
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = [(value, part, getattr(value, part)) for part in names]
        else:
            parts = [(state, name, value)]
        yield from (part for part in parts if part[2].nbytes >= SMALLEST_BYTES)

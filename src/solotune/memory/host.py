"""The one place where a tensor meets the host: reads, and copies to host memory and back.

On a card copies run on a side stream through pinned buffers that are used again; on CPU a copy goes
into other storage, so that what is tested there is a real move.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from solotune.memory.streams import CpuQueues, CudaQueues, Queues
from solotune.memory.workers import Worker


class ActivationStore(Protocol):
    """Where activations go instead of host memory."""

    def move(self, host: "HostMemory", source: Tensor) -> "Moved": ...


class WeightStore(Protocol):
    """Where the weights of blocks are that are not on the device: see resident_layers.py."""

    def __contains__(self, parameter: object) -> bool: ...
    def open(self, host: "HostMemory") -> None: ...
    def memory(self) -> Iterator[tuple[Tensor, str]]: ...
    def start(self) -> None: ...
    def settle(self) -> None: ...
    def visit(
        self, block: nn.Module, *, coming: Sequence[nn.Module], writes: bool
    ) -> AbstractContextManager[None]: ...


class Visits(Protocol):
    """Returns what to enter around the next block; `writes`: it is stepped inside."""

    def __call__(self, *, writes: bool = False) -> AbstractContextManager[None]: ...


class HostMemory:
    """Host side of a run on `device`.

    Activations go to `activations` where it is given, else they wait in host memory. Weights that
    `weights` holds come from there. `poison` overwrites a source after its move: on CPU source and
    copy would otherwise be equally good, and no test of offloading could fail.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        activations: ActivationStore | None = None,
        weights: WeightStore | None = None,
        poison: bool = False,
    ) -> None:
        self.device = device
        self.activations = activations
        self.weights = weights
        self.poison = poison
        self.bytes_moved = 0  # to the host, over the run
        self.queues: Queues = CudaQueues(device) if device.type == "cuda" else CpuQueues()
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(
            list
        )  # bytes -> buffer, event
        self._may_pin = device.type == "cuda"
        self._lock = threading.Lock()  # optimizer state is staged by a thread
        if weights is not None:
            weights.open(self)

    def read(self, *values: Tensor) -> list[float]:
        """Return the values of scalar tensors, in one read of the device."""
        return torch.stack([value.detach().float() for value in values]).tolist()

    def move_activation(self, source: Tensor) -> "Moved":
        """Return an activation on its way out."""
        if self.activations is not None:
            return self.activations.move(self, source)
        return Moved(self, source)

    def visits(self, blocks: Iterable[nn.Module]) -> Visits:
        """Return what to call before each of `blocks`, in their order, to have its weights here."""
        weights, order = self.weights, list(blocks)
        if weights is None:
            return lambda *, writes=False: nullcontext()
        weights.start()
        numbers = iter(range(len(order)))

        def visit(*, writes: bool = False) -> AbstractContextManager[None]:
            number = next(numbers)
            return weights.visit(order[number], coming=order[number + 1 :], writes=writes)

        return visit

    def settle(self) -> None:
        """Wait until all weights are where a save can read them."""
        if self.weights is not None:
            self.weights.settle()

    def ring(self, num_bytes: int) -> "Ring":
        """Return buffers of host memory: three that are pinned, two where no more can be."""
        flats = [self._new_buffer(num_bytes) for _ in range(3)]
        if self.device.type == "cuda" and not self._may_pin:
            del flats[2]
        return Ring(self.queues, flats)

    def take_buffer(self, like: Tensor) -> Tensor:
        """Return host memory shaped like a tensor, pinned where there is a card."""
        with self._lock:
            waiting = self._free[like.nbytes]
            for index, (buffer, last_use) in enumerate(waiting):
                if last_use is None or self.queues.is_done(last_use):
                    del waiting[index]
                    return buffer.view(like.dtype).view(like.shape)
        return self._new_buffer(like.nbytes).view(like.dtype).view(like.shape)

    def give_buffer(self, buffer: Tensor, last_use: Any) -> None:
        """Take a buffer back; it is not handed out before the event `last_use`."""
        flat = buffer.view(-1).view(torch.uint8)
        with self._lock:
            self._free[flat.numel()].append((flat, last_use))

    def stage(self, home: Tensor) -> Tensor:
        """Return a copy of pageable or mapped memory in a buffer; for a worker thread."""
        return self.take_buffer(home).copy_(home)

    def write_home(self, home: Tensor, staged: Tensor, done: Any) -> None:
        """Write a buffer home once the event `done` is over, and take it back; for a worker."""
        self.queues.synchronize(done)
        home.copy_(staged)
        self.give_buffer(staged, None)

    def _new_buffer(self, num_bytes: int) -> Tensor:
        if self._may_pin:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._may_pin = False
                print(
                    f"warning: {num_bytes / 2**20:.0f} MiB of host memory cannot be pinned "
                    f"({str(error).splitlines()[0]}): copies to and from the host now wait for "
                    "each other"
                )
        return torch.empty(num_bytes, dtype=torch.uint8)


class Ring:
    """Host buffers of one size, used in turn, between pageable memory and the device.

    A thread copies on the side of the pageable memory, in the order of the calls: what is read
    there comes after what was written before. `views` cuts a buffer into parts shaped like the
    `homes` there.
    """

    def __init__(self, queues: Queues, flats: Sequence[Tensor]) -> None:
        self.buffers = [RingBuffer(flat) for flat in flats]
        self._queues = queues
        self._turn = 0
        self._worker = Worker("ring")

    def stage(
        self, homes: Sequence[Tensor], views: Callable[[Tensor], Sequence[Tensor]]
    ) -> "RingBuffer":
        """Let the thread copy `homes` into a buffer, which is to be sent."""
        buffer = self._take()
        buffer.task = self._worker.submit(self._gather, buffer, homes, views)
        return buffer

    def send(self, buffer: "RingBuffer", target: Tensor) -> Any:
        """Queue the copy of a staged buffer to the device; return the event of its end."""
        assert buffer.task is not None
        staged = buffer.task.result()
        buffer.copied = self._queues.copy(target, buffer.flat[: len(target)], after=staged)
        return buffer.copied

    def receive(
        self, source: Tensor, homes: Sequence[Tensor], views: Callable[[Tensor], Sequence[Tensor]]
    ) -> Any:
        """Queue the copy of `source`, uint8, from the device, and let the thread write it home.

        Returns the event after which the device's memory may change.
        """
        buffer = self._take()
        free = None if buffer.task is None else buffer.task.result()
        buffer.copied = self._queues.copy(buffer.flat[: len(source)], source, after=free)
        buffer.task = self._worker.submit(self._scatter, buffer, homes, views)
        return buffer.copied

    def settle(self) -> None:
        """Wait until all is home."""
        for buffer in self.buffers:
            if buffer.task is not None:
                buffer.task.result()

    def _take(self) -> "RingBuffer":
        """Return the next buffer, once the thread is done with it."""
        buffer = self.buffers[self._turn % len(self.buffers)]
        self._turn += 1
        if buffer.task is not None:
            buffer.task.result()
        return buffer

    def _gather(self, buffer: "RingBuffer", homes, views) -> Any:
        if buffer.copied is not None:
            self._queues.synchronize(buffer.copied)
        for part, home in zip(views(buffer.flat), homes, strict=True):
            part.copy_(home)
        return self._queues.host_used(buffer.flat, "write")

    def _scatter(self, buffer: "RingBuffer", homes, views) -> Any:
        self._queues.synchronize(buffer.copied)
        for part, home in zip(views(buffer.flat), homes, strict=False):  # the trained come first
            home.copy_(part)
        return self._queues.host_used(buffer.flat, "read")


@dataclass(eq=False)
class RingBuffer:
    """One buffer of a ring."""

    flat: Tensor  # uint8
    task: Future[Any] | None = None  # the thread's last use of it
    copied: Any = None  # the event of its last copy to or from the device


class Moved:
    """A tensor on its way to the host, and, once asked for, on its way back."""

    def __init__(self, host: HostMemory, source: Tensor) -> None:
        self._host = host
        source = source.detach()
        host.bytes_moved += source.nbytes
        host.queues.uses(source, "write")  # what computes it may still be queued
        self._buffer = host.take_buffer(source)
        self._written = host.queues.copy(self._buffer, source)
        self._returned: tuple[Tensor, Any] | None = None

    def read_ahead(self) -> None:
        """Prepare for `fetch`, where there is something to prepare."""

    def fetch(self) -> None:
        """Start the way back, once."""
        if self._returned is None:
            target = torch.empty_like(self._buffer, device=self._host.device)
            self._host.queues.uses(target, "write")  # so may be the last user of its memory
            done = self._host.queues.copy(target, self._buffer, after=self._written)
            self._host.give_buffer(self._buffer, done)
            self._returned = target, done

    def take(self) -> Tensor:
        """Return the tensor on the device, safe to use by what is queued from now on; once."""
        self.fetch()
        assert self._returned is not None
        tensor, done = self._returned
        self._host.queues.wait(done)
        self._host.queues.uses(tensor, "read")
        return tensor

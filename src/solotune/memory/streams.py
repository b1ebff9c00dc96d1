"""The two queues of a device, compute and copy, and what orders them.

On a card they are CUDA streams. On CPU copies run at once, and a log of what would have run where,
in which order and after which event, can be kept: `unordered` finds in it what a card could do in
the wrong order. So the logic of offloading is tested where there is no card.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

COMPUTE, COPY, HOST = "compute", "copy", "host"


class Queues(Protocol):
    """A device's compute queue and a copy queue beside it; what an event is, is its own."""

    def copy(self, target: Tensor, source: Tensor, *, after: Any = None) -> Any:
        """Queue a copy behind all work queued so far and `after`; return the event of its end."""
        ...

    def wait(self, event: Any) -> None:
        """Let what is computed from now on run after `event`."""
        ...

    def uses(self, tensor: Tensor, kind: Literal["read", "write"]) -> None:
        """Say that what is queued to be computed uses a tensor; only a log listens."""
        ...

    def is_done(self, event: Any) -> bool: ...

    def synchronize(self, event: Any) -> None:
        """Let a worker thread, never the main one, wait for `event`."""
        ...

    def host_used(self, tensor: Tensor, kind: Literal["read", "write"]) -> Any:
        """Say that a worker thread has used host memory; return what a copy is to wait for."""
        ...


class CudaQueues:
    """The current stream and one side stream of a card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)

    def copy(
        self, target: Tensor, source: Tensor, *, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        # Also a fresh target must wait: its memory may have a last user still queued.
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            if after is not None:
                self._side.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._side)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._side)  # not handed out again before the copy has run
        return done

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def uses(self, tensor: Tensor, kind: Literal["read", "write"]) -> None:
        pass

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def host_used(self, tensor: Tensor, kind: Literal["read", "write"]) -> None:
        return None  # a copy that is queued now comes after what the host has done


@dataclass(frozen=True)
class Access:
    """One use of a piece of memory in a queue; `memory` is its storage's address."""

    queue: str
    memory: int
    kind: Literal["read", "write"]


@dataclass(frozen=True)
class Mark:
    """An event: `record` in a queue, or a queue's `wait` for it."""

    queue: str
    event: int
    kind: Literal["record", "wait"]


@dataclass
class CpuQueues:
    """Copies at once; the log tells what a card would have queued."""

    log: list[Access | Mark] = field(default_factory=list)
    logging: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # threads share it
    _kept: list[Tensor] = field(default_factory=list)

    def copy(self, target: Tensor, source: Tensor, *, after: int | None = None) -> int:
        target.copy_(source)
        behind_compute = self._record(COMPUTE)
        self._mark(COPY, behind_compute, "wait")
        if after is not None:
            self._mark(COPY, after, "wait")
        self._access(COPY, source, "read")
        self._access(COPY, target, "write")
        return self._record(COPY)

    def wait(self, event: int) -> None:
        self._mark(COMPUTE, event, "wait")

    def is_done(self, event: int) -> bool:
        return True

    def synchronize(self, event: int) -> None:
        self._mark(HOST, event, "wait")

    def host_used(self, tensor: Tensor, kind: Literal["read", "write"]) -> int:
        self._access(HOST, tensor, kind)
        return self._record(HOST)

    def uses(self, tensor: Tensor, kind: Literal["read", "write"]) -> None:
        self._access(COMPUTE, tensor, kind)

    def _access(self, queue: str, tensor: Tensor, kind: Literal["read", "write"]) -> None:
        if self.logging:
            self._kept.append(tensor)  # so that no address stands for two pieces of memory
            self.log.append(Access(queue, tensor.untyped_storage().data_ptr(), kind))

    def _record(self, queue: str) -> int:
        event = next(self._numbers)
        self._mark(queue, event, "record")
        return event

    def _mark(self, queue: str, event: int, kind: Literal["record", "wait"]) -> None:
        if self.logging:
            self.log.append(Mark(queue, event, kind))


def unordered(log: list[Access | Mark]) -> list[tuple[Access, Access]]:
    """Return pairs of uses of the same memory, one a write, that no event orders.

    Vector clocks: a queue's clock counts its own operations and what it has waited for.
    """
    clocks: dict[str, dict[str, int]] = {}
    recorded: dict[int, dict[str, int]] = {}
    earlier: dict[int, list[tuple[Access, int]]] = {}
    found = []
    for entry in log:
        clock = clocks.setdefault(entry.queue, {})
        if isinstance(entry, Mark):
            if entry.kind == "record":
                recorded[entry.event] = dict(clock)
            else:
                for queue, count in recorded.get(entry.event, {}).items():
                    clock[queue] = max(clock.get(queue, 0), count)
            continue
        clock[entry.queue] = clock.get(entry.queue, 0) + 1
        for before, count in earlier.setdefault(entry.memory, []):
            conflict = "write" in (before.kind, entry.kind)
            if conflict and clock.get(before.queue, 0) < count:
                found.append((before, entry))
        earlier[entry.memory].append((entry, clock[entry.queue]))
    return found

"""A memory tracker that also counts what a step computes and moves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from solotune.memory.timeline import Peak
from solotune.memory.tracker import Life, MemoryTracker, parts_of, replaced, tensors_in
from solotune.plan.allocator import Event, reserved_bytes, rounded
from solotune.plan.kernels import flops, held_inside, is_entered
from solotune.plan.outcomes import Outcomes

_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
# From torch 2.13 on a run sets that pinned buffers keep their size.
_PINS_POWERS_OF_TWO = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@dataclass(frozen=True)
class Step:
    """What one optimizer step has needed; bytes."""

    micro_batches: int
    device: Peak
    reserved: int  # by a card's allocator, with the holes in it; elsewhere as allocated
    host: Peak
    together: int  # on device and host at one moment: where both are one memory
    pinned: int  # of the host, as the system hands it out
    pinned_use: int  # what of it is used
    disk: Peak
    to_device: int  # copied from the host
    to_host: int
    disk_read: int
    disk_written: int
    costs: np.ndarray  # of each operator: operations, bytes read and written

    @property
    def flops(self) -> int:
        return int(self.costs[:, 0].sum())


@dataclass(frozen=True)
class _Mark:
    """How far everything had come when a step began or ended."""

    moment: int
    costs: int
    copies: int
    files: int


class StepWatch(MemoryTracker):
    """Watches steps on fake tensors that stand for those of a device of `kind`.

    `pairs` is how many (query, key) one attention layer computes for a micro-batch.
    """

    all_fake = True

    def __init__(
        self, *args: Any, kind: str, pairs: float, fake: FakeTensorMode, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.kind, self.pairs = kind, pairs
        self.costs: list[tuple[int, int]] = []
        self._copies: list[tuple[str, int]] = []
        self._files: list[tuple[str, Life]] = []
        self._steps: list[tuple[int, _Mark, _Mark]] = []
        self._outcomes = Outcomes(fake, kind)
        self._inside: dict[Any, tuple[int, list[tuple[int, int]]]] = {}  # of opaque operators

    def __enter__(self) -> "StepWatch":
        super().__enter__()
        enter, host = self._undo.enter_context, self.host
        enter(replaced(host, "read", lambda read, *values: [1.0] * len(values)))
        enter(replaced(host, "stage", self._stage))
        enter(replaced(host, "write_home", self._write_home))
        enter(replaced(host.queues, "copy", self._copy))
        enter(replaced(torch, "compile", self._compiled))
        return self

    @contextmanager
    def step(self, micro_batches: int) -> Iterator[None]:
        """Count what happens inside as one step."""
        begin = self._mark_now()
        yield
        self._steps.append((micro_batches, begin, self._mark_now()))

    def steps(self) -> list[Step]:
        """Return what each step has needed, after the watch is left."""
        on_card = self.kind == "cuda"
        timeline = self.timeline(self._size if on_card else lambda life: life.num_bytes)
        pinned, used = self._pinned(self._size), self._pinned(lambda life: life.num_bytes)
        found = []
        for micro_batches, begin, end in self._steps:
            part = timeline.part(begin.moment, end.moment)
            span = slice(begin.moment, end.moment + 1)
            device = part.peak("device")
            copies = self._copies[begin.copies : end.copies]
            files = [f for f in self._files[begin.files : end.files] if f[1].place == "disk"]
            found.append(
                Step(
                    micro_batches=micro_batches,
                    device=device,
                    reserved=device.num_bytes,
                    host=part.peak("host"),
                    together=int(part.total("device", "host").max()),
                    pinned=int(pinned[span].max()),
                    pinned_use=int(used[span].max()),
                    disk=part.peak("disk"),
                    to_device=sum(size for way, size in copies if way == "to_device"),
                    to_host=sum(size for way, size in copies if way == "to_host"),
                    disk_read=sum(life.num_bytes for way, life in files if way == "read"),
                    disk_written=sum(life.num_bytes for way, life in files if way == "written"),
                    costs=np.array(self.costs[begin.costs : end.costs], np.int64).reshape(-1, 2),
                )
            )
        if on_card:
            reserved = reserved_bytes(self._of_device())
            found = [replace(step, reserved=r) for step, r in zip(found, reserved, strict=True)]
        return found

    def run_fake(self, func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Run an operator; one of ours, which is opaque on fake tensors, with eyes open once."""
        if func in _NUMBERS:
            return 1.0  # a number that is read decides no size
        if not is_entered(func, self.kind):
            return self._outcomes.run(func, inputs, args, kwargs)
        kind = self._outcomes.kind(func, args, kwargs)
        if kind not in self._inside:
            moment, first = self.moments, len(self.costs)
            result = self.enter(func, "cpu", args, kwargs)
            self._inside[kind] = self.highest_since(moment), self.costs[first:]
            return result
        result = self._outcomes.run(func, inputs, args, kwargs)
        held, costs = self._inside[kind]
        self.costs += costs
        self.pass_by(held, new=tensors_in((result,)) or inputs)
        return result

    def ran(self, func: Any, inputs: list[Tensor], results: list[Tensor]) -> int:
        if not _is_view(func) and not is_entered(func, self.kind):
            touched = sum(map(_touched, inputs)) + sum(map(_touched, results))
            self.costs.append((flops(func, inputs, self.pairs), touched))
        return held_inside(func, inputs, results, self.kind)

    def _mark_now(self) -> _Mark:
        return _Mark(self.moments, len(self.costs), len(self._copies), len(self._files))

    @staticmethod
    def _size(life: Life) -> int:
        """Return what a storage takes on a card, or of host memory that is pinned for one."""
        if life.place == "device":
            return rounded(life.num_bytes)
        rounds = life.pinned and _PINS_POWERS_OF_TWO
        return 1 << (life.num_bytes - 1).bit_length() if rounds else life.num_bytes

    def _pinned(self, sizes: Callable[[Life], int]) -> np.ndarray:
        """Return the bytes of pinned memory at the start and after each event."""
        start = sum(sizes(life) for life in self._before if life.pinned)
        changes = [sign * sizes(life) if life.pinned else 0 for _, _, life, sign in self._events]
        return np.cumsum([start, *changes])

    def _of_device(self) -> Iterator[list[Event]]:
        """Yield the events of device memory of each step; the first has the start."""
        events = [
            Event(id(life), life.num_bytes, 1) for life in self._before if life.place == "device"
        ]
        done = 0
        for _, _, end in self._steps:
            for _, _, life, sign in self._events[done : end.moment]:
                if life.place == "device":
                    events.append(Event(id(life), life.num_bytes, sign))
            yield events
            events, done = [], end.moment

    def _compiled(self, compile: Callable[..., Any], function: Any = None, **settings: Any) -> Any:
        """Return what stands for a compiled function: a fused one holds no intermediate result."""
        if function is None:
            return partial(self._compiled, compile, **settings)

        def fused(*args: Any, **kwargs: Any) -> Any:
            moment, first = self.moments, len(self.costs)
            result = function(*args, **kwargs)
            inside = {id(life) for _, _, life, sign in self._events[moment:] if sign > 0}
            inside &= {id(life) for _, _, life, sign in self._events[moment:] if sign < 0}
            self._events[moment:] = [e for e in self._events[moment:] if id(e[2]) not in inside]
            operations = sum(count for count, _ in self.costs[first:])
            given = tensors_in((args, tuple(kwargs.values())))
            parts = chain.from_iterable(map(parts_of, given))
            self.costs[first:] = [(operations, 2 * sum(map(_touched, parts)))]
            return result

        return fused

    # What goes over the bus, and to a disk.

    def _copy(self, copy: Callable[..., Any], target: Tensor, source: Tensor, **after: Any) -> Any:
        (life,) = self.see(target, is_new=False)
        self._copies.append(("to_host" if life.place == "host" else "to_device", source.nbytes))
        return copy(target, source, **after)

    def _stage(self, stage: Callable[..., Any], home: Tensor) -> Any:
        self._files += [("read", life) for life in self.see(home, is_new=False)]
        return stage(home)

    def _write_home(self, write: Callable[..., Any], home: Tensor, *rest: Any) -> Any:
        self._files += [("written", life) for life in self.see(home, is_new=False)]
        return write(home, *rest)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator always returns its input's storage, and writes nothing."""
    composite = "CompositeImplicitAutograd"  # `to` and `reshape`, which may copy
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
        return False
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _touched(tensor: Tensor) -> int:
    """Return the bytes that an operator reads or writes of a tensor; an expanded one is small."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())

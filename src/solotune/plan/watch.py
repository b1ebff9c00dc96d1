"""A memory tracker that also counts what a step computes and moves."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from solotune.memory.timeline import Peak
from solotune.memory.tracker import Event, Life, MemoryTracker, parts_of, replaced, tensors_in
from solotune.plan.allocator import Block, reserved_bytes, rounded
from solotune.plan.kernels import flops, held_inside, is_entered
from solotune.plan.outcomes import Outcomes

_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
# From torch 2.13 on a run sets that pinned buffers keep their size.
_PINS_POWERS_OF_TWO = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


Stretch = tuple[str, bool, bool]  # the phase, whether backward has begun, outside of modules


class Held(NamedTuple):
    """The most that was held at one time in a stretch of a step; bytes."""

    device: Peak
    host: Peak
    disk: Peak
    together: int  # on device and host at one moment: where both are one memory


@dataclass(frozen=True)
class Step:
    """What one optimizer step has needed; bytes."""

    micro_batches: int
    # By stretch: what is highest in one may grow faster with micro-batches than the peak of all.
    held: dict[Stretch, Held]
    reserved: int  # by a card's allocator, with the holes in it; elsewhere as allocated
    pinned: int  # of the host, as the system hands it out
    pageable: int  # of the host
    to_device: int  # copied from the host
    to_host: int
    disk_read: int
    disk_written: int
    costs: np.ndarray  # of each operator: operations, bytes read and written

    @property
    def flops(self) -> int:
        return int(self.costs[:, 0].sum())

    @property
    def allocated(self) -> int:
        return max(held.device.num_bytes for held in self.held.values())


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
        pinned = self._pinned()
        pageable = timeline.total("host") - pinned
        found = []
        for micro_batches, begin, end in self._steps:
            held = {}
            events = self._events[begin.moment : end.moment]
            for stretch, moments in _stretches(events, begin.moment):
                part = timeline.at(moments)
                held[stretch] = Held(
                    device=part.peak("device"),
                    host=part.peak("host"),
                    disk=part.peak("disk"),
                    together=int(part.total("device", "host").max()),
                )
            copies = self._copies[begin.copies : end.copies]
            files = [f for f in self._files[begin.files : end.files] if f[1].place == "disk"]
            step = Step(
                micro_batches=micro_batches,
                held=held,
                reserved=0,
                pinned=int(pinned[begin.moment : end.moment + 1].max()),
                pageable=int(pageable[begin.moment : end.moment + 1].max()),
                to_device=sum(size for way, size in copies if way == "to_device"),
                to_host=sum(size for way, size in copies if way == "to_host"),
                disk_read=sum(life.num_bytes for way, life in files if way == "read"),
                disk_written=sum(life.num_bytes for way, life in files if way == "written"),
                costs=np.array(self.costs[begin.costs : end.costs], np.int64).reshape(-1, 2),
            )
            found.append(replace(step, reserved=step.allocated))
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

    def _pinned(self) -> np.ndarray:
        """Return the bytes of pinned memory at the start and after each event."""
        start = sum(self._size(life) for life in self._before if life.pinned)
        changes = [e.sign * self._size(e.life) if e.life.pinned else 0 for e in self._events]
        return np.cumsum([start, *changes])

    def _of_device(self) -> Iterator[list[Block]]:
        """Yield the events of device memory of each step; the first has the start."""
        blocks = [
            Block(id(life), life.num_bytes, 1) for life in self._before if life.place == "device"
        ]
        done = 0
        for _, _, end in self._steps:
            for event in self._events[done : end.moment]:
                if event.life.place == "device":
                    blocks.append(Block(id(event.life), event.life.num_bytes, event.sign))
            yield blocks
            blocks, done = [], end.moment

    def _compiled(self, compile: Callable[..., Any], function: Any = None, **settings: Any) -> Any:
        """Return what stands for a compiled function: a fused one holds no intermediate result."""
        if function is None:
            return partial(self._compiled, compile, **settings)

        def fused(*args: Any, **kwargs: Any) -> Any:
            moment, first = self.moments, len(self.costs)
            result = function(*args, **kwargs)
            begun = {id(e.life) for e in self._events[moment:] if e.sign > 0}
            inside = begun & {id(e.life) for e in self._events[moment:] if e.sign < 0}
            self._events[moment:] = [e for e in self._events[moment:] if id(e.life) not in inside]
            operations = sum(count for count, _ in self.costs[first:])
            given = tensors_in((args, tuple(kwargs.values())))
            parts = itertools.chain.from_iterable(map(parts_of, given))
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


def _stretches(events: list[Event], first: int) -> Iterator[tuple[Stretch, np.ndarray]]:
    """Yield parts of a step, and the moments of each; `first` is the one before the events."""
    phases_E = np.array([event.phase for event in events])
    has_begun_E = np.logical_or.accumulate(phases_E == "backward")
    is_between_E = np.array([event.is_between for event in events])
    for stretch in itertools.product(np.unique(phases_E), (False, True), (False, True)):
        phase, has_begun, is_between = stretch
        chosen_E = (phases_E == phase) & (has_begun_E == has_begun) & (is_between_E == is_between)
        if chosen_E.any():
            yield stretch, first + 1 + np.flatnonzero(chosen_E)


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

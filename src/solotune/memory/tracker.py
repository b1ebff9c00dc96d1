"""What is alive during a step, by what it is for: every storage from its first operator to its end.

A dispatch mode sees each tensor that an operator takes or returns, and a weak reference tells when
its storage is freed. So it works on CPU, on a card, and on meta and fake tensors, which have no
memory at all. It does not see what an operator allocates and frees inside itself (sorting, a fused
loss, a matrix product's workspace), except inside custom operators that are written in Python;
on fake tensors these are opaque too. Compiled code is opaque: inside, everything runs uncompiled.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from solotune.memory.disk import Disk
from solotune.memory.host import HostMemory
from solotune.memory.optimizer_state import SMALLEST_BYTES
from solotune.memory.stepping import Stepper
from solotune.memory.timeline import CATEGORIES, PLACES, Timeline
from solotune.models import Decoder


@dataclass(eq=False)
class Life:
    """A storage's use for one thing; `source`: what it is a copy of, whose category it shares."""

    num_bytes: int
    place: str
    category: str
    source: "Life | None" = None
    pinned: bool = False

    def final_category(self) -> str:
        return self.category if self.source is None else self.source.final_category()


class Event(NamedTuple):
    """A storage's beginning (sign 1) or end (-1)."""

    seconds: float
    phase: str  # the last one: forward, backward or step
    life: Life
    sign: int
    is_between: bool  # outside of modules, backward and steps


class MemoryTracker:
    """Follows live storages while it is entered; `timeline()` tells afterwards what was alive.

    A storage's category may become known late (a gradient is one when it is handed to a weight): it
    then counts for its whole life. Takes a new tracker each step, or one for several steps that are
    told apart by `moments`.
    """

    all_fake = False  # whether every operator makes fake tensors, also of real ones

    def __init__(
        self, model: Decoder, *, loss_fn: nn.Module, stepper: Stepper, host: HostMemory
    ) -> None:
        self.model, self.loss_fn, self.stepper, self.host = model, loss_fn, stepper, host
        self._live: dict[int, Life] = {}  # by the address of the storage object
        self._ends: dict[int, weakref.ref] = {}
        self._before: list[Life] = []  # what was alive at the start
        self._events: list[Event] = []
        self._within: list[str] = []  # forward, loss, step: the innermost last
        self._phase = "forward"
        self._undo = ExitStack()

    def __enter__(self) -> "MemoryTracker":
        self._parameters = list(self.model.parameters())  # a walk over all modules is slow
        self._of_size: dict[int, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            self._of_size.setdefault(parameter.numel(), []).append(parameter)
        for tensor in (*self._parameters, *self.model.buffers()):
            self._mark(tensor, "weights")
        if self.host.weights is not None:
            for tensor, place in self.host.weights.memory():
                self._mark(tensor, "weights", place)
        self._mark_gradients(self._parameters)
        self._mark_state()
        for module in (*self.model.blocks, self.model.norm, self.loss_fn):
            enter = partial(self._enter, "loss" if module is self.loss_fn else "forward")
            self._undo.callback(module.register_forward_pre_hook(enter).remove)
            leave = module.register_forward_hook(self._leave, always_call=True)
            self._undo.callback(leave.remove)
        self._undo.enter_context(replaced(self.stepper, "step", self._step))
        self._undo.enter_context(
            replaced(self.host, "take_buffer", partial(self._take_buffer, "host"))
        )
        if isinstance(self.host.activations, Disk):
            take_file = partial(self._take_buffer, "disk")
            self._undo.enter_context(replaced(self.host.activations, "take_file", take_file))
        self._undo.enter_context(replaced(self.host, "_new_buffer", self._new_buffer))
        self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        self._operators = self._undo.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
        self._mark_gradients(self._parameters)
        self._mark_state()
        self._ends.clear()

    @property
    def moments(self) -> int:
        """How many allocations and ends there were so far."""
        return len(self._events)

    def run_fake(self, func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on tensors without memory."""
        return func(*args, **kwargs)

    def enter(self, func: Any, device: str, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator's kernel for a kind of device, followed inside."""
        key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device))
        with self._operators:  # which the key leads past
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def ran(self, func: Any, inputs: list[Tensor], results: list[Tensor]) -> int:
        """Hear of an operator; return the bytes that it held inside itself, where that is known."""
        return 0

    def timeline(self, sizes: Callable[[Life], int] = lambda life: life.num_bytes) -> Timeline:
        """Return what was alive, after the tracker is left; `sizes` says what a storage takes."""
        keys = [(place, category) for place in PLACES for category in CATEGORIES]
        column = {key: index for index, key in enumerate(keys)}
        deltas = np.zeros((len(self._events) + 1, len(keys)), dtype=np.int64)
        for life in self._before:
            deltas[0, column[life.place, life.final_category()]] += sizes(life)
        columns = [column[e.life.place, e.life.final_category()] for e in self._events]
        changes = [e.sign * sizes(e.life) for e in self._events]
        deltas[np.arange(1, len(deltas)), columns] = changes
        times = [event.seconds for event in self._events]
        return Timeline(
            np.array([*times[:1], *times]) - np.array(times[:1]),
            ["forward", *(event.phase for event in self._events)],
            dict(zip(keys, deltas.cumsum(0).T, strict=True)),
        )

    def see(self, tensor: Tensor, *, is_new: bool) -> list[Life]:
        """Note what lives in a tensor; not `is_new`: unless known, it was alive at the start."""
        lives = []
        for part in (tensor,) if _is_plain(tensor) else parts_of(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            life = self._live.get(key)
            if life is None:
                on_host = part.device.type == "cpu" != self.model.device.type
                place = "host" if on_host else "device"
                life = Life(storage.nbytes(), place, self._category(part, is_new=is_new))
                self._live[key] = life
                self._ends[key] = weakref.ref(storage, partial(self._end, key))
                if is_new:
                    self._event(life, 1)
                else:
                    self._before.append(life)
            lives.append(life)
        return lives

    def pass_by(self, num_bytes: int, *, new: list[Tensor]) -> None:
        """Note bytes that an operator has held and let go, besides what it returns."""
        life = Life(num_bytes, "device", self._category(new[0], is_new=True))
        self._event(life, 1)
        self._event(life, -1)

    def _end(self, key: int, _: weakref.ref) -> None:
        del self._ends[key]
        self._event(self._live.pop(key), -1)

    def highest_since(self, moment: int) -> int:
        """Return the most bytes above those at a moment; nothing is known to be elsewhere yet."""
        signed = (event.sign * event.life.num_bytes for event in self._events[moment:])
        return max(accumulate(signed, initial=0))

    def _event(self, life: Life, sign: int) -> None:
        is_between = False
        if self._within:
            self._phase = "step" if self._within[-1] == "step" else "forward"
        elif _in_backward():
            self._phase = "backward"
        else:
            is_between = True
        self._events.append(Event(time.perf_counter(), self._phase, life, sign, is_between))

    def _category(self, tensor: Tensor, *, is_new: bool) -> str:
        within = self._within[-1] if self._within else None
        if within == "step":
            return "optimizer state"
        if within == "loss" and tensor.is_floating_point():
            if tensor.shape == self.model.output_weight.shape:
                return "gradients"  # also its fp32 sum over chunks
            is_row = tensor.shape[-1:] == self.model.output_weight.shape[-1:]
            return "activations" if is_row else "logits"
        return "activations" if is_new and (within or _in_backward()) else "other"

    def _mark(self, tensor: Tensor, category: str, place: str | None = None) -> None:
        for life in self.see(tensor, is_new=False):
            life.category, life.pinned = category, life.pinned or place == "pinned"
            life.place = "host" if place == "pinned" else place or life.place

    def _mark_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients")

    def _mark_state(self) -> None:
        for parameter in self.stepper.optimizer.state:
            for part, place in state_parts(self.stepper, parameter):
                self._mark(part, "optimizer state", None if place == "device" else place)

    # What stands around the code that runs.

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._within.append(name)
        for leaf in tree_leaves(args):  # a block's input is made before any block
            for life in self.see(leaf, is_new=False) if isinstance(leaf, Tensor) else ():
                life.category = "activations" if life.category == "other" else life.category

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._within.pop()

    def _step(
        self, step: Callable[[list[nn.Parameter]], None], parameters: Iterable[nn.Parameter]
    ) -> None:
        parameters = list(parameters)
        self._mark_gradients(parameters)
        self._within.append("step")
        step(parameters)
        self._within.pop()

    def _new_buffer(self, make: Callable[[int], Tensor], num_bytes: int) -> Tensor:
        buffer = make(num_bytes)
        (life,) = self.see(buffer, is_new=True)
        life.place, life.pinned = "host", True
        return buffer

    def _take_buffer(self, place: str, take: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        self._mark_gradients(self._of_size.get(like.numel(), ()))  # of which it may be one
        (source,), buffer = self.see(like, is_new=False), take(like)
        (life,) = self.see(buffer, is_new=True)
        if life.place == place and life.source is not None:  # used again: for something else
            self._event(life, -1)
            life = Life(life.num_bytes, life.place, life.category, pinned=life.pinned)
            self._live[buffer.untyped_storage()._cdata] = life
            self._event(life, 1)
        life.place, life.source = place, source
        return buffer


class _Operators(TorchDispatchMode):
    """Shows a tracker the tensors of every operator."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def _show(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # asked by autograd all the time
            return args[0].fake_device
        tracker, kwargs = self._tracker, kwargs or {}
        inputs = tensors_in(args)
        if kwargs:
            inputs += tensors_in(tuple(kwargs.values()))
        if any(not _is_plain(t) and is_traceable_wrapper_subclass(t) for t in inputs):
            return NotImplemented  # its own operators on its parts come by
        for tensor in inputs:  # what torch.tensor makes is first seen when it is handed out
            tracker.see(tensor, is_new=func is torch.ops.aten.lift_fresh.default)
        result = self._run(func, inputs, args, kwargs)
        results = tensors_in((result,))
        for tensor in results:
            tracker.see(tensor, is_new=True)
        if inside := tracker.ran(func, inputs, results):
            tracker.pass_by(inside, new=results or inputs)
        return result

    def _run(self, func, inputs: list[Tensor], args, kwargs):
        without_memory = any(isinstance(t, FakeTensor) or t.is_meta for t in inputs)
        if not inputs or without_memory or self._tracker.all_fake:
            return self._tracker.run_fake(func, inputs, args, kwargs)
        if func.namespace == "aten":
            return func(*args, **kwargs)
        # A custom operator: run its kernel with eyes open.
        device = next((t.device.type for t in inputs if not t.is_cpu), "cpu")
        return self._tracker.enter(func, device, args, kwargs)


# Not in the class body, where torch wraps it for the compiler, which is off: some percent of time.
_Operators.__torch_dispatch__ = _Operators._show


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results: as tree_leaves, in a tenth of the time."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def state_parts(stepper: Stepper, parameter: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield the plain tensors of a parameter's optimizer state, and where each is between steps."""
    home = stepper.home
    away = "host" if home is None or home.folder is None else "disk"
    # bitsandbytes' managed memory: the host's, of which a card takes what a step touches
    is_paged = getattr(stepper.optimizer, "is_paged", False) and parameter.numel() >= _PAGED_FROM
    for value in tree_leaves(dict(stepper.optimizer.state[parameter])):
        for part in parts_of(value) if isinstance(value, Tensor) else ():
            is_large = part.nbytes >= SMALLEST_BYTES
            yield part, away if is_large and (is_paged or home is not None) else "device"


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_PAGED_FROM = 100_000  # numbers of a parameter, below which bitsandbytes pages nothing


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: itself, or the parts of a subclass."""
    if not _is_plain(tensor) and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    else:
        yield tensor


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Let `by(method, ...)` stand for a method of `owner`, or a function of a module."""
    was_own, method = name in vars(owner), getattr(owner, name)
    setattr(owner, name, partial(by, method))
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)

"""Optimizers in a plan: parameters of one shape step once, the others take over what it needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from solotune.plan.watch import StepWatch


@dataclass
class _Known:
    """What the step of one parameter has needed."""

    new: dict[str, Any]  # state that it has made, as tensors on meta
    held: int  # bytes at most, above those at its start
    costs: list[tuple[int, int]]


class Repeats:
    """Stands for `step_only` of a Stepper.

    An optimizer that goes from parameter to parameter holds nothing of one when it steps the next.
    One that takes them all at once (`foreach`) runs as it is.
    """

    def __init__(self, watch: StepWatch, optimizer: Optimizer) -> None:
        self.watch, self.optimizer = watch, optimizer
        groups = enumerate(optimizer.param_groups)
        self._group_of = {p: number for number, group in groups for p in group["params"]}
        self._known: dict[Any, _Known] = {}

    def step(
        self, step_only: Callable[[list[nn.Parameter]], None], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Step the parameters, or let them have the state that such a step would have made."""
        if any(group.get("foreach") for group in self.optimizer.param_groups):
            step_only(list(parameters))
            return
        for parameter in parameters:
            self._step_one(step_only, parameter)

    def _step_one(
        self, step_only: Callable[[list[nn.Parameter]], None], parameter: nn.Parameter
    ) -> None:
        grad, state = parameter.grad, self.optimizer.state
        assert grad is not None
        has_state = bool(state.get(parameter))
        shapes = (parameter.shape, parameter.stride(), grad.stride(), grad.dtype)
        kind = (*shapes, parameter.dtype, self._group_of[parameter], has_state)
        known = self._known.get(kind)
        if known is None:
            moment, first = self.watch.moments, len(self.watch.costs)
            step_only([parameter])
            held = self.watch.highest_since(moment)
            new = {} if has_state else {n: _shape_of(v) for n, v in state[parameter].items()}
            self._known[kind] = _Known(new, held, self.watch.costs[first:])
            return
        made = sum(map(_bytes_of, known.new.values()))
        state[parameter] |= {name: _made(value) for name, value in known.new.items()}
        self.watch.costs += known.costs
        self.watch.pass_by(max(known.held - made, 0), new=[parameter])


def _shape_of(value: Any) -> Any:
    """Return a stand-in on meta for a fake tensor; a real one, a table of an optimizer, is kept."""
    if isinstance(value, FakeTensor):
        with _disable_current_modes():
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
    return _rebuilt(value, _shape_of) if is_traceable_wrapper_subclass(value) else value


def _made(value: Any) -> Any:
    """Return a new fake tensor for a stand-in."""
    if is_traceable_wrapper_subclass(value):
        return _rebuilt(value, _made)
    if isinstance(value, Tensor) and value.is_meta:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return value


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Tensor:
    """Return a tensor subclass with its parts changed."""
    names, context = value.__tensor_flatten__()
    parts = {name: change(getattr(value, name)) for name in names}
    unflatten = type(value).__tensor_unflatten__
    return unflatten(parts, context, value.size(), value.stride())


def _bytes_of(value: Any) -> int:
    """Return the bytes that a stand-in stands for."""
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return sum(_bytes_of(getattr(value, name)) for name in names)
    return value.nbytes if isinstance(value, Tensor) and value.is_meta else 0

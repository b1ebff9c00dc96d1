"""Operators on fake tensors, each kind of call once: the next gets results of the same shapes.

A step calls an operator on the same shapes in every block. FakeTensorMode's own cache takes three
times as long, as it must be right for tensors that change their shape, symbols and aliases.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_DEVICE = torch.device("cpu")
_KNOWN: dict[
    str, dict[Any, Any]
] = {}  # by kind of device; shapes alone, so that a search of many plans learns them once
_TENSORS = (FakeTensor, Tensor, nn.Parameter)


class _Result(NamedTuple):
    """A tensor that an operator returns: an input itself, a view of one, or a new one."""

    source: int | None  # the input's place
    is_input: bool
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Outcomes:
    """What operators have returned, by operator and arguments."""

    def __init__(self, fake: FakeTensorMode, kind: str) -> None:
        self.fake = fake
        self._known = _KNOWN.setdefault(kind, {})
        with torch._C._DisableTorchDispatch():
            first = FakeTensor(fake, torch.empty(0, device="meta"), _DEVICE)
        self._attributes = dict(vars(first))  # which all of one mode and device share

    def kind(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what calls with results of the same shapes have in common; None: unknown."""
        kind = func, _kinds(args), _kinds(kwargs.items()) if kwargs else None
        try:
            hash(kind)
        except TypeError:
            return None
        return kind

    def run(self, func: Any, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """Return an operator's results."""
        kind = self.kind(func, args, kwargs)
        known = self._known.get(kind)
        if known is not None:
            return self._make(known, inputs)
        shapes = _kinds(inputs)
        result = func(*args, **kwargs)
        if kind is not None and shapes == _kinds(inputs):
            outcome = _outcome(result, inputs)
            if outcome is not None:
                self._known[kind] = outcome
        return result

    def _make(self, outcome: Any, inputs: Sequence[Tensor]) -> Any:
        if isinstance(outcome, tuple) and not isinstance(outcome, _Result):
            return tuple(self._make(one, inputs) for one in outcome)
        if isinstance(outcome, list):
            return [self._make(one, inputs) for one in outcome]
        assert isinstance(outcome, _Result)
        if outcome.is_input:
            assert outcome.source is not None
            return inputs[outcome.source]
        with torch._C._DisableTorchDispatch():
            if outcome.source is None:
                tensor = torch.empty_strided(
                    outcome.size, outcome.stride, dtype=outcome.dtype, device="meta"
                )
            else:
                storage = inputs[outcome.source].untyped_storage()
                tensor = torch.empty(0, dtype=outcome.dtype, device="meta")
                tensor.set_(storage, outcome.offset, outcome.size, outcome.stride)
        # As FakeTensor's own constructor, which spends more on its checks than all else costs here.
        made = Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=_DEVICE
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made


def _kinds(values: Iterable[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            layout = value.shape, value.stride(), value.storage_offset(), value.requires_grad
            found.append((kind, value.dtype, layout))
        elif kind in (list, tuple):
            found.append(_kinds(value))
        else:
            found.append((kind, value))  # as 1 and 1.0 are equal, and make other dtypes
    return tuple(found)


def _outcome(result: Any, inputs: Sequence[Tensor]) -> Any:
    """Return how to make results like these; None: not from shapes alone."""
    if isinstance(result, list | tuple):
        outcomes = [_outcome(one, inputs) for one in result]
        return None if None in outcomes else type(result)(outcomes)
    if not isinstance(result, FakeTensor) or result.device != _DEVICE:
        return None
    for place, tensor in enumerate(inputs):
        if result is tensor:
            return _Result(place, True, result.shape, result.stride(), 0, result.dtype)
    storage = result.untyped_storage()
    source = None
    for place, tensor in enumerate(inputs):
        if tensor.untyped_storage()._cdata == storage._cdata:
            source = place if isinstance(tensor, FakeTensor) else None
            if source is None:
                return None
            break
    spans = zip(result.shape, result.stride(), strict=True)
    needed = 1 + sum((size - 1) * stride for size, stride in spans) if result.numel() else 0
    if source is None and storage.nbytes() != needed * result.element_size():
        return None
    return _Result(
        source, False, result.shape, result.stride(), int(result.storage_offset()), result.dtype
    )

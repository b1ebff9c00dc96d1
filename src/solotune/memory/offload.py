"""Activation offloading: block inputs wait for backward in host memory.

Saves:    the block inputs, (B, S, D) a block: with checkpointing, all activations but one block's.
Costs:    two copies a block input; on a card they run beside the computation.
Excludes: running without checkpointing (in this version).
Label:    bit-exact. Figures: docs/activation_offloading.md
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from solotune.memory.host import HostMemory


class _Moved:
    """A tensor on the host, and, once asked for, on its way back."""

    def __init__(self, host: "HostMemory", source: Tensor) -> None:
        self.host = host
        self.copy, self.written = host.to_host(source)
        self.returned: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fetch(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the way back, once; return the tensor and the event to wait for."""
        if self.returned is None:
            self.returned = self.host.to_device(self.copy, self.written)
        return self.returned


class BlockInputs:
    """Hooks that move what autograd saves around a block, for one forward and its backward."""

    def __init__(self, host: "HostMemory", *, keep: Iterable[Tensor]) -> None:
        self.host = host
        self._keep = {t.untyped_storage().data_ptr() for t in keep}  # hooks see weights as views
        self._moved: list[_Moved | None] = []  # in the order of the forward
        self._sources: list[Tensor] = []

    @contextmanager
    def around_block(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        if self.host.poison:
            for source in self._sources:
                source.data.fill_(torch.nan)
        self._sources.clear()

    def _pack(self, tensor: Tensor) -> Tensor | int:
        kept = tensor.untyped_storage().data_ptr() in self._keep
        if kept or not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        if self.host.poison:
            self._sources.append(tensor)
        self._moved.append(_Moved(self.host, tensor))
        return len(self._moved) - 1

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved, self._moved[packed] = self._moved[packed], None
        if moved is None:
            raise RuntimeError("an offloaded activation is needed twice: run forward again")
        tensor, ready = moved.fetch()
        below = self._moved[packed - 1] if packed > 0 else None
        if below is not None:  # backward goes down: its copy runs beside this block's backward
            below.fetch()
        if ready is not None:
            torch.cuda.current_stream(self.host.device).wait_event(ready)
        return tensor

"""Activation offloading: what blocks keep for backward waits in host memory.

Saves:    with checkpointing the block inputs, (B, S, D) a block: all activations but one block's.
Costs:    two copies of each; on a card they run beside the computation.
Excludes: running without checkpointing (in this version).
Label:    bit-exact. Figures: docs/activation_offloading.md
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from solotune.memory.host import HostMemory, Moved


def offload_activations(
    host: HostMemory, *, keep: Iterable[Tensor]
) -> Callable[[], AbstractContextManager[None]]:
    """Return what to enter around each block so that its input waits for backward on the host.

    For one forward and its backward. `keep` are tensors that stay: weights, which a compiled block
    saves too, and the context, which all blocks share.
    """
    return BlockInputs(host, keep=keep).around_block


class BlockInputs:
    """Hooks that move what autograd saves around a block, for one forward and its backward."""

    def __init__(self, host: HostMemory, *, keep: Iterable[Tensor]) -> None:
        self.host = host
        self._keep = {t.untyped_storage().data_ptr() for t in keep}  # hooks see weights as views
        self._moved: list[Moved | None] = []  # in the order of the forward
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
        self._moved.append(Moved(self.host, tensor))
        return len(self._moved) - 1

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved, self._moved[packed] = self._moved[packed], None
        if moved is None:
            raise RuntimeError("an offloaded activation is needed twice: run forward again")
        tensor = moved.take()
        below = self._moved[packed - 1] if packed > 0 else None
        if below is not None:  # backward goes down: its copy runs beside this block's backward
            below.fetch()
        return tensor

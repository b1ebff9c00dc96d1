"""Activation offloading: what blocks keep for backward waits in host memory, or on disk.

Saves:    with checkpointing the block inputs, (B, S, D) a block: all activations but one block's.
          Without, all that a block keeps, and nothing is computed twice.
Costs:    two copies of each; on a card they run beside the computation.
Excludes: nothing.
Label:    bit-exact. Figures: docs/activation_offloading.md
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from solotune.memory.host import HostMemory, Moved


def offload_activations(
    host: HostMemory, *, keep: Iterable[Tensor]
) -> Callable[[], AbstractContextManager[None]]:
    """Return what to enter around each block so that what it saves waits for backward elsewhere.

    For one forward and its backward. `keep` are tensors that stay: weights, the context, which all
    blocks share, and the embedded batch, which autograd holds anyhow.
    """
    return _Stash(host, keep=keep).around_block


@dataclass
class _Stashed:
    """A storage that has left the device."""

    moved: Moved
    uses: int = 0  # saved tensors that are part of it and were not asked for yet
    flat: Tensor | None = None  # on the device again


class _Saved(NamedTuple):
    """A saved tensor as a part of a storage."""

    storage: int  # its place in the order of the forward
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stash:
    """Hooks that move what autograd saves around a block, for one forward and its backward.

    Whole storages move, once: operators save the same tensor again and again, and views of it.
    """

    def __init__(self, host: HostMemory, *, keep: Iterable[Tensor]) -> None:
        self.host = host
        self._keep = {t.untyped_storage()._cdata for t in keep}  # hooks see weights as views
        self._stashed: list[_Stashed | None] = []  # in the order of the forward
        self._indexes: dict[tuple[int, int, torch.dtype], int] = {}
        self._refs: list[StorageWeakRef] = []  # while they live no other storage has the address
        self._sources: list[Tensor] = []

    @contextmanager
    def around_block(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        if self.host.poison:
            for source in self._sources:
                source.data.fill_(torch.nan)
        self._sources.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        is_kept = storage._cdata in self._keep
        if is_kept or not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        ref = StorageWeakRef(storage)
        key = (ref.cdata, tensor._version, tensor.dtype)  # what is changed in place is another one
        if key not in self._indexes:
            whole = (storage.nbytes() // tensor.element_size(),)
            flat = tensor.detach().as_strided(whole, (1,), 0)
            if self.host.poison:
                self._sources.append(flat)
            self._indexes[key] = len(self._stashed)
            self._stashed.append(_Stashed(self.host.move_activation(flat)))
            self._refs.append(ref)
        index = self._indexes[key]
        stashed = self._stashed[index]
        assert stashed is not None
        stashed.uses += 1
        return _Saved(index, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        stashed = self._stashed[saved.storage]
        if stashed is None:
            raise RuntimeError("an offloaded activation is needed twice: run forward again")
        if stashed.flat is None:
            stashed.flat = stashed.moved.take()
            self._prepare_below(saved.storage)
        stashed.uses -= 1
        if stashed.uses == 0:
            self._stashed[saved.storage] = None
        return stashed.flat.as_strided(saved.size, saved.stride, saved.offset)

    def _prepare_below(self, index: int) -> None:
        """Start what backward needs next, going down: its copy runs beside the computation."""
        below = [stashed for stashed in self._stashed[max(index - 2, 0) : index] if stashed]
        if below:
            below[-1].moved.fetch()
            below[0].moved.read_ahead()

"""The one place where a tensor meets the host: reads, and copies to host memory and back.

On a card copies run on a side stream through pinned buffers that are used again; on CPU a copy goes
into other storage, so that what is tested there is a real move.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from solotune.memory.offload import BlockInputs


class HostMemory:
    """Host side of a run on `device`.

    `poison` overwrites a source after its move: on CPU source and copy would otherwise be equally
    good, and no test of offloading could fail.
    """

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        self.device = device
        self.poison = poison
        self.bytes_moved = 0  # to the host, over the run
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # bytes -> pinned buffers

    def read(self, *values: Tensor) -> list[float]:
        """Return the values of scalar tensors, in one read of the device."""
        return torch.stack([value.detach().float() for value in values]).tolist()

    def offload_activations(
        self, *, keep: Iterable[Tensor]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return what to enter around each block so that its input waits for backward on the host.

        For one forward and its backward. `keep` are tensors that stay: weights, which a compiled
        block saves too, and the context, which all blocks share.
        """
        return BlockInputs(self, keep=keep).around_block

    def to_host(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy of `source` to the host; return the copy and the event that ends it."""
        self.bytes_moved += source.nbytes
        if self._stream is None:
            return source.detach().clone(memory_format=torch.contiguous_format), None
        buffer = self._pinned(source)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(source.detach(), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        source.record_stream(self._stream)  # not reused before the copy has read it
        return buffer, done

    def to_device(
        self, copy: Tensor, written: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy back; return the tensor and the event to wait for before using it."""
        if self._stream is None:
            return copy, None
        target = torch.empty(copy.shape, dtype=copy.dtype, device=self.device)
        # The allocator may hand out memory whose last user is still queued on the compute stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if written is not None:
                self._stream.wait_event(written)
            target.copy_(copy, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        target.record_stream(self._stream)
        # The side stream is in order: the next copy into this buffer runs after this one.
        self._free[copy.untyped_storage().nbytes()].append(copy)
        return target, done

    def _pinned(self, source: Tensor) -> Tensor:
        """Return a pinned buffer shaped like `source`, an old one where the size fits."""
        waiting = self._free[source.nbytes]
        storage = waiting.pop() if waiting else None
        if storage is None:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return storage.view(-1).view(source.dtype).view(source.shape)

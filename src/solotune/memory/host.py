"""The one place where a tensor meets the host: reads, and copies to host memory and back.

On a card copies run on a side stream through pinned buffers that are used again; on CPU a copy goes
into other storage, so that what is tested there is a real move.
"""

import threading
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from solotune.memory.streams import CpuQueues, CudaQueues, Queues


class ActivationStore(Protocol):
    """Where activations go instead of host memory."""

    def move(self, host: "HostMemory", source: Tensor) -> "Moved": ...


class HostMemory:
    """Host side of a run on `device`.

    Activations go to `activations` where it is given, else they wait in host memory. `poison`
    overwrites a source after its move: on CPU source and copy would otherwise be equally good, and
    no test of offloading could fail.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        activations: ActivationStore | None = None,
        poison: bool = False,
    ) -> None:
        self.device = device
        self.activations = activations
        self.poison = poison
        self.bytes_moved = 0  # to the host, over the run
        self.queues: Queues = CudaQueues(device) if device.type == "cuda" else CpuQueues()
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(
            list
        )  # bytes -> buffer, event
        self._may_pin = device.type == "cuda"
        self._lock = threading.Lock()  # optimizer state is staged by a thread

    def read(self, *values: Tensor) -> list[float]:
        """Return the values of scalar tensors, in one read of the device."""
        return torch.stack([value.detach().float() for value in values]).tolist()

    def move_activation(self, source: Tensor) -> "Moved":
        """Return an activation on its way out."""
        if self.activations is not None:
            return self.activations.move(self, source)
        return Moved(self, source)

    def take_buffer(self, like: Tensor) -> Tensor:
        """Return host memory shaped like a tensor, pinned where there is a card."""
        with self._lock:
            waiting = self._free[like.nbytes]
            for index, (buffer, last_use) in enumerate(waiting):
                if last_use is None or self.queues.is_done(last_use):
                    del waiting[index]
                    return buffer.view(like.dtype).view(like.shape)
        return self._new_buffer(like.nbytes).view(like.dtype).view(like.shape)

    def give_buffer(self, buffer: Tensor, last_use: Any) -> None:
        """Take a buffer back; it is not handed out before the event `last_use`."""
        flat = buffer.view(-1).view(torch.uint8)
        with self._lock:
            self._free[flat.numel()].append((flat, last_use))

    def stage(self, home: Tensor) -> Tensor:
        """Return a copy of pageable or mapped memory in a buffer; for a worker thread."""
        return self.take_buffer(home).copy_(home)

    def write_home(self, home: Tensor, staged: Tensor, done: Any) -> None:
        """Write a buffer home once the event `done` is over, and take it back; for a worker."""
        self.queues.synchronize(done)
        home.copy_(staged)
        self.give_buffer(staged, None)

    def _new_buffer(self, num_bytes: int) -> Tensor:
        if self._may_pin:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._may_pin = False
                print(
                    f"warning: {num_bytes / 2**20:.0f} MiB of host memory cannot be pinned "
                    f"({str(error).splitlines()[0]}): copies to and from the host now wait for "
                    "each other"
                )
        return torch.empty(num_bytes, dtype=torch.uint8)


class Moved:
    """A tensor on its way to the host, and, once asked for, on its way back."""

    def __init__(self, host: HostMemory, source: Tensor) -> None:
        self._host = host
        source = source.detach()
        host.bytes_moved += source.nbytes
        host.queues.uses(source, "write")  # what computes it may still be queued
        self._buffer = host.take_buffer(source)
        self._written = host.queues.copy(self._buffer, source)
        self._returned: tuple[Tensor, Any] | None = None

    def read_ahead(self) -> None:
        """Prepare for `fetch`, where there is something to prepare."""

    def fetch(self) -> None:
        """Start the way back, once."""
        if self._returned is None:
            target = torch.empty_like(self._buffer, device=self._host.device)
            self._host.queues.uses(target, "write")  # so may be the last user of its memory
            done = self._host.queues.copy(target, self._buffer, after=self._written)
            self._host.give_buffer(self._buffer, done)
            self._returned = target, done

    def take(self) -> Tensor:
        """Return the tensor on the device, safe to use by what is queued from now on; once."""
        self.fetch()
        assert self._returned is not None
        tensor, done = self._returned
        self._host.queues.wait(done)
        self._host.queues.uses(tensor, "read")
        return tensor

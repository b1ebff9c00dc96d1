"""Host memory that tensors pass through on their way to another dtype, form or device."""

import torch
from torch import Tensor

from solotune.adapters.nf4 import FourBit, pack
from solotune.checkpoint.safetensors_file import StoredTensor


class Staging:
    """Buffers of `num_bytes`: for a card two pinned ones, of which one is read from the disk while
    the other is on its way, and `dense_bytes` of the card's own for tensors that are packed there.

    Allocated once: one by one they would leave holes between the parameters (tried with fp32 on
    disk: 1.7 times the model).
    """

    def __init__(self, num_bytes: int, device: torch.device, *, dense_bytes: int = 0) -> None:
        self._on_card = device.type == "cuda"
        try:
            self._buffers = [
                _new_buffer(num_bytes, pin=self._on_card) for _ in range(1 + self._on_card)
            ]
        except RuntimeError:  # WSL2 pins little; pageable memory is slower, not wrong
            self._buffers = [_new_buffer(num_bytes, pin=False)]
        self._events: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._dense: Tensor | None = None
        if device.type != "cpu":
            self._dense = torch.empty(dense_bytes, dtype=torch.uint8, device=device)
        self._turn = 0

    def copy(self, source: StoredTensor, target: Tensor) -> None:
        """Fill `target` from the file."""
        target.copy_(source.read(self._next_buffer()), non_blocking=True)
        self._record()

    def pack(self, source: StoredTensor, packed: Tensor, layout: FourBit) -> None:
        """Quantise what is in the file into `packed`: on the device, wherever `packed` is."""
        dense, target = source.read(self._next_buffer()), packed
        if self._dense is not None:
            on_device = self._dense[: dense.nbytes].view(dense.dtype).view(dense.shape)
            dense = on_device.copy_(dense, non_blocking=True)
            self._record()
            target = packed.to(dense.device)
        pack(dense, target, layout)
        if target is not packed:
            packed.copy_(target)

    def close(self) -> None:
        """Wait for the copies and free the buffers."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        self._buffers.clear()
        self._dense = None

    def _next_buffer(self) -> Tensor:
        """Return the buffer whose turn it is, after its last copy has left it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if (event := self._events[self._turn]) is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def _record(self) -> None:
        if self._on_card:
            done = torch.cuda.Event()
            done.record()
            self._events[self._turn] = done


def _new_buffer(num_bytes: int, *, pin: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)

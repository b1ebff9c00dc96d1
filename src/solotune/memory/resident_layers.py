"""Layers streamed from the host: the matrices of some blocks are on the device while in use.

Saves:    the weights of all streamed blocks but two.
Costs:    host memory for them; each is copied to the device twice a step (three times with
          clipping) and home once if it was trained, beside the computation of other blocks.
Excludes: every schedule but layer-major, which it implies with optimizer_in_bwd.
Label:    bit-exact. Figures: docs/resident_layers.md
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from solotune.adapters.inject import is_adapter
from solotune.errors import ConfigError
from solotune.memory.host import HostMemory, RingBuffer
from solotune.models import Decoder

_SLOTS = 2  # on the device: the block that computes, and the next one on its way
_ALIGNED = 512  # bytes: where a weight starts, as the allocator of a card has it


@dataclass(frozen=True)
class _Layout:
    """A block's streamed weights and where each lies in a slot, the trained ones first."""

    parameters: list[nn.Parameter]
    starts: list[int]  # bytes
    num_bytes: int
    num_trained: int
    trained_bytes: int  # from the start of the slot

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the weights as views of a slot or a buffer, uint8."""
        return [
            flat[start : start + p.nbytes].view(p.dtype).view(p.shape)
            for p, start in zip(self.parameters, self.starts, strict=True)
        ]


@dataclass(eq=False)
class _Slot:
    """Memory on the device that blocks take in turn."""

    flat: Tensor  # uint8
    block: nn.Module | None = None
    ready: Any = None  # the event after which its weights are there
    last_use: int = 0
    saved: Any = None  # the event after which its changed weights have left


class StreamedLayers:
    """The blocks whose matrices live in host memory, all but `resident` of them; None: no block.

    A parameter holds its home in host memory and, during a visit of its block, a slot on the
    device. So checkpoints are read and written at home, once `settle` has returned. One-dimensional
    weights stay on the device: they are 0.003 % of all. Resident blocks lie between the streamed
    ones, so that their computation hides the copies.
    """

    def __init__(self, model: Decoder, *, resident: int | None) -> None:
        blocks = list(model.blocks)
        if resident is not None and resident >= len(blocks):
            raise ConfigError(
                f"resident_layers={resident} streams no block of this model, which has "
                f"{len(blocks)}: use less, or null to keep all on the device"
            )
        kept = len(blocks) if resident is None else resident
        before = [(n * kept + len(blocks) // 2) // len(blocks) for n in range(len(blocks) + 1)]
        self._layouts = {
            block: _layout(block) for n, block in enumerate(blocks) if before[n] == before[n + 1]
        }
        self._streamed = {p for layout in self._layouts.values() for p in layout.parameters}
        self._slots: list[_Slot] = []
        self._staged: dict[nn.Module, RingBuffer] = {}
        self._visits = 0

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter's home is host memory."""
        return parameter in self._streamed

    def open(self, host: HostMemory) -> None:
        """Allocate the slots on the device, and the ring of host buffers between them and home."""
        self._host = host
        if not self._layouts:
            return
        num_bytes = max(layout.num_bytes for layout in self._layouts.values())
        self._slots = [
            _Slot(torch.empty(num_bytes, dtype=torch.uint8, device=host.device))
            for _ in range(min(_SLOTS, len(self._layouts)))
        ]
        self._ring = host.ring(num_bytes)

    def memory(self) -> Iterator[tuple[Tensor, str]]:
        """Yield all that holds streamed weights, and where: device, host, or pinned there."""
        for slot in self._slots:
            yield slot.flat, "device"
        if self._slots:
            for buffer in self._ring.buffers:
                yield buffer.flat, "pinned"
        for parameter in self._streamed:
            in_slot = any(_is_view(parameter, slot.flat) for slot in self._slots)
            yield parameter, "device" if in_slot else "host"

    def start(self) -> None:
        """Forget what slots hold: homes may have changed since the last step."""
        self._staged.clear()
        for slot in self._slots:
            slot.block = None

    @contextmanager
    def visit(
        self, block: nn.Module, *, coming: Sequence[nn.Module], writes: bool
    ) -> Iterator[None]:
        """Have the weights of `block` on the device inside, and start on those that come next.

        `writes`: they are stepped inside, and the trained ones go home at the end.
        """
        self._visits += 1
        slot = self._fetch(block, busy=block) if block in self._layouts else None
        following = (b for b in dict.fromkeys(coming) if b in self._layouts and b is not block)
        for distance, other in enumerate(islice(following, _SLOTS)):
            if distance == 0:
                self._fetch(other, busy=block)
            else:
                self._stage(other)
        if slot is None:
            yield
            return
        layout, queues = self._layouts[block], self._host.queues
        queues.wait(slot.ready)
        queues.uses(slot.flat, "read")
        homes = [p.data for p in layout.parameters]
        _set_data(layout.parameters, layout.views(slot.flat))
        try:
            yield
        finally:
            _set_data(layout.parameters, homes)
        if writes and layout.num_trained:
            queues.uses(slot.flat, "write")
            changed = slot.flat[: layout.trained_bytes]
            slot.saved = self._ring.receive(changed, homes[: layout.num_trained], layout.views)

    def settle(self) -> None:
        """Wait until all weights are home."""
        if self._slots:
            self._ring.settle()

    def _stage(self, block: nn.Module) -> None:
        """Let a block's weights be copied to a buffer, unless they are on their way already."""
        if block not in self._staged and all(slot.block is not block for slot in self._slots):
            layout = self._layouts[block]
            homes = [p.data for p in layout.parameters]
            self._staged[block] = self._ring.stage(homes, layout.views)

    def _fetch(self, block: nn.Module, *, busy: nn.Module) -> _Slot:
        """Return the slot that a block is in, or on its way to; `busy` keeps its own."""
        for slot in self._slots:
            if slot.block is block:
                slot.last_use = self._visits
                return slot
        self._stage(block)
        free = [slot for slot in self._slots if slot.block is None or slot.block is not busy]
        slot = min(free, key=lambda slot: (slot.block is not None, slot.last_use))
        if self._host.poison:
            self._overwrite(slot)
        slot.block, slot.last_use = block, self._visits
        part = slot.flat[: self._layouts[block].num_bytes]
        slot.ready = self._ring.send(self._staged.pop(block), part)
        return slot

    def _overwrite(self, slot: _Slot) -> None:
        """Make every number of a slot NaN, so that a test sees where a copy is missing."""
        if slot.saved is not None:
            self._host.queues.wait(slot.saved)
        slot.flat.fill_(255)
        self._host.queues.uses(slot.flat, "write")


def _layout(block: nn.Module) -> _Layout:
    matrices = [p for name, p in block.named_parameters() if _is_streamed(name, p)]
    matrices.sort(key=lambda p: not p.requires_grad)
    starts, end, trained_bytes = [], 0, 0
    for parameter in matrices:
        starts.append(end)
        end += -(-parameter.nbytes // _ALIGNED) * _ALIGNED
        trained_bytes = end if parameter.requires_grad else trained_bytes
    num_trained = sum(p.requires_grad for p in matrices)
    return _Layout(matrices, starts, end, num_trained, trained_bytes)


def _is_streamed(name: str, parameter: nn.Parameter) -> bool:
    """Whether a block's weight is large: a matrix, or one in 4 bits, and no adapter's."""
    is_large = parameter.dim() > 1 or not parameter.is_floating_point()
    return is_large and not is_adapter(name)


def _set_data(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _is_view(tensor: Tensor, whole: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == whole.untyped_storage()._cdata

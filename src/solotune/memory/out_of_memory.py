"""Out of memory in a step: what was in it, and the cheapest keys that would have saved enough.

The sizes of weights, gradients and optimizer state are those of the live tensors. What a key would
save is the difference of two estimates of the peak, which the formulas of docs/memory_report.md
give for this model, batch and optimizer.

Shapes: B rows of a micro-batch, S tokens a row, D width.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from solotune.data import Batch
from solotune.errors import UserError
from solotune.memory.keys import is_layer_major
from solotune.memory.stepping import Stepper
from solotune.memory.tracker import state_parts
from solotune.models import Block, Context, Decoder
from solotune.training import peak_bytes

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def explain_out_of_memory(
    model: Decoder, *, stepper: Stepper, group: Sequence[Batch], on: Mapping[str, Any]
) -> Iterator[None]:
    """Turn an allocator's failure inside into one UserError; `on` are the values of MEMORY_KEYS."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; on CPU there is no other type
        asked = _bytes_asked(error)
        if asked is None:
            raise
        sizes = measure(model, stepper, group)
        raise UserError(_message(asked, sizes, on, device=model.device)) from error


@dataclass(frozen=True)
class Sizes:
    """What the peak is made of, in bytes."""

    weights: int  # of the whole model
    block_weights: int  # of the largest block
    gradients_now: int
    state_now: int  # of the optimizer, on the device
    state: int  # once every parameter has some
    numbers: int  # parameters that step
    gradients: int  # of all parameters
    block_gradients: int  # of the largest block
    embedding: int
    blocks: int
    rows: int  # of a micro-batch
    row_input: int  # a block's input, of one row
    row_activations: int  # what a block keeps for backward, of one row


def measure(model: Decoder, stepper: Stepper, group: Sequence[Batch]) -> Sizes:
    """Return the sizes of a model, its optimizer and the largest micro-batch of a group."""
    largest = max(group, key=lambda batch: batch.tokens_BS.numel())
    rows, tokens = largest.tokens_BS.shape
    width, itemsize = model.output_weight.size(1), model.output_weight.element_size()
    trained = [p for p in model.parameters() if p.requires_grad]
    has_state = [p for p in trained if p in stepper.optimizer.state]
    parts = [part for p in has_state for part in state_parts(stepper, p)]
    state = sum(part.nbytes for part, place in parts if place == "device")
    share = sum(p.nbytes for p in has_state) / sum(p.nbytes for p in trained)
    block = max(model.blocks, key=lambda block: sum(p.nbytes for p in block.parameters()))
    return Sizes(
        weights=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        block_weights=sum(p.nbytes for p in block.parameters()),
        gradients_now=sum(p.grad.nbytes for p in trained if p.grad is not None),
        state_now=state,
        state=int(state / share) if share else 0,
        numbers=sum(p.numel() for p in trained),
        gradients=sum(p.nbytes for p in trained),
        block_gradients=sum(p.nbytes for p in block.parameters() if p.requires_grad),
        embedding=model.output_weight.nbytes,
        blocks=len(model.blocks),
        rows=rows,
        row_input=tokens * width * itemsize,
        row_activations=_bytes_kept(model, largest) // rows,
    )


def _bytes_kept(model: Decoder, batch: Batch) -> int:
    """Return what one block keeps for its backward, from a run on tensors without memory."""
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad():
        tokens, positions, segments = (
            torch.empty(t.shape, dtype=t.dtype, device=model.device)
            for t in (batch.tokens_BS, batch.positions_BS, batch.segments_BM)
        )
        context = model.context(positions, segments)
        known |= {t.untyped_storage()._cdata for t in context.tensors()}
        x_BSD = model.embed(tokens).requires_grad_()
        layer = _Layer(model.blocks[0])
        weights = {  # a streamed block's are not on the device
            name: torch.empty_like(p, device=model.device).requires_grad_(p.requires_grad)
            for name, p in layer.named_parameters()
        }
        known |= {p.untyped_storage()._cdata for p in weights.values()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out_BSD = functional_call(layer, weights, (x_BSD, context))
    del fake, out_BSD
    return sum(kept.values())


class _Layer(nn.Module):
    """A block without its checkpointing, uncompiled."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        assert isinstance(block, Block)
        self.block = block

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        return self.block.layer(x_BSD, context)


def weights_on_device(sizes: Sizes, on: Mapping[str, Any]) -> int:
    """Return the bytes of weights on the device: where they are streamed, two blocks' of these."""
    if on["resident_layers"] is None:
        return sizes.weights
    away = max(sizes.blocks - on["resident_layers"] - 2, 0)
    return sizes.weights - away * sizes.block_weights


def estimate_peak(sizes: Sizes, on: Mapping[str, Any]) -> int:
    """Return the bytes of a step at its peak under the values of MEMORY_KEYS."""
    rows = min(sizes.rows, on["batch_size"])
    one_input, block = rows * sizes.row_input, rows * sizes.row_activations
    inputs, count = sizes.blocks * one_input, on["gradient_accumulation_steps"]
    layer_major = is_layer_major(on)
    if layer_major:  # each micro-batch: what one block passes to the next, and its positions
        activations = 2 * count * one_input + block
    elif on["enable_activation_offloading"]:
        activations = 2 * one_input + block
    elif not on["enable_activation_checkpointing"]:
        activations = sizes.blocks * block
    elif on["ac_option"] == "op":  # attention's output is as large as the input
        activations = 2 * inputs + block
    elif on["ac_option"] is not None:  # every k-th block is recomputed, the others keep all
        activations = inputs + (sizes.blocks - sizes.blocks // on["ac_option"] + 1) * block
    else:
        activations = inputs + block
    activations += 9 * one_input  # final norm in fp32, target rows and their gradient, positions
    loss = 3 * sizes.embedding  # its gradient summed in fp32, and one chunk's
    if layer_major:
        backward = activations + max(sizes.block_gradients + sizes.embedding, loss - block)
    elif on["optimizer_in_bwd"]:
        backward = activations + loss
    elif count > 1:  # the first micro-batch's gradients wait while the second is in forward
        backward = activations + sizes.gradients + loss
    else:
        backward = max(activations + loss, 9 * one_input + block + sizes.gradients)
    state = sizes.state if on["optimizer_state"] == "device" else 0
    if "optimizer" in on:
        state = min(state, 2 * sizes.numbers)
    return weights_on_device(sizes, on) + state + backward


def choices(on: Mapping[str, Any], *, device: torch.device) -> list[tuple[dict[str, Any], str]]:
    """Return the keys that are not set yet, the cheapest first, with what they cost."""
    checkpointing = {
        "enable_activation_checkpointing": True,
        "ac_mode": "full",
        "ac_option": None,
    }
    half = {
        "batch_size": max(on["batch_size"] // 2, 1),
        "gradient_accumulation_steps": on["gradient_accumulation_steps"] * 2,
    }
    candidates: list[tuple[dict[str, Any], str]] = [
        ({"optimizer_in_bwd": True}, "costs at most 5 % of the time"),
        (half, "costs little time, and changes nothing else"),
        (checkpointing, "costs a third more time"),
        (checkpointing | {"enable_activation_offloading": True}, "costs host memory and copies"),
        ({"optimizer_state": "host"}, "costs host memory and copies"),
        ({"optimizer_state": "disk"}, "costs time, and wears an SSD"),
        ({"optimizer_in_bwd": True, "resident_layers": 0}, "costs host memory and copies"),
        ({"optimizer": "bitsandbytes.optim.AdamW8bit"}, "costs precision of the state"),
    ]
    # Where device and host are one, these save nothing.
    on_host = (candidates[3], candidates[4], candidates[6])
    left = [c for c in candidates if not (device.type == "cpu" and c in on_host)]
    if on["batch_size"] == 1:
        left.remove(candidates[1])
    news = [({k: v for k, v in change.items() if on.get(k) != v}, cost) for change, cost in left]
    return [(change, cost) for change, cost in news if change]


def advice(
    sizes: Sizes, on: Mapping[str, Any], *, needed: int, device: torch.device
) -> tuple[str, list[tuple[dict[str, Any], int, str]]]:
    """Return an introduction and up to three changes, each with the bytes it saves and its cost."""
    peak = estimate_peak(sizes, on)
    saving = [
        (change, peak - estimate_peak(sizes, {**on, **change}), cost)
        for change, cost in choices(on, device=device)
    ]
    saving = [one for one in saving if one[1] > 0]
    enough = [one for one in saving if one[1] >= needed]
    if enough:
        return "each of these alone would save enough, the cheapest first:", enough[:3]
    together: dict[str, Any] = {}
    for count, (change, _, _) in enumerate(saving, start=1):
        together |= change
        if peak - estimate_peak(sizes, {**on, **together}) >= needed:
            return "none of these alone would save enough, together they would:", saving[:count]
    return "not even these together would save enough; take a smaller model:", saving


def _message(asked: int, sizes: Sizes, on: Mapping[str, Any], *, device: torch.device) -> str:
    held = _bytes_held(device)
    needed = max(asked, estimate_peak(sizes, on) - held)
    weights = weights_on_device(sizes, on)
    rest = max(held - weights - sizes.gradients_now - sizes.state_now, 0)
    shown = {
        "weights": weights,
        "gradients": sizes.gradients_now,
        "optimizer state": sizes.state_now,
        "activations, logits and all else": rest,
    }
    opening, changes = advice(sizes, on, needed=needed, device=device)
    lines = [
        f"out of memory on {device}: a step held {_gib(held)} and asked for {_gib(asked)} more",
        "held: " + ", ".join(f"{name} {_gib(size)}" for name, size in shown.items()),
        f"at least {_gib(needed)} must go; {opening}",
    ]
    if sizes.state == 0 and on["optimizer_state"] == "device":
        lines.insert(2, "the optimizer's state is made at the end of the first step, on top of it")
    for change, saves, cost in changes:
        keys = " ".join(f"{key}={value}" for key, value in change.items())
        lines.append(f"  {keys}  saves about {_gib(saves)}, {cost}")
    return "\n".join(lines)


def _bytes_asked(error: RuntimeError) -> int | None:
    """Return what an allocator could not give, read from its message; None: another failure."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        found = re.search(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
        return int(float(found[1]) * _UNITS[found[2]]) if found else 0
    found = re.search(r"DefaultCPUAllocator.* allocate (\d+) bytes", text)
    return int(found[1]) if found else None


def _bytes_held(device: torch.device) -> int:
    """Return what the allocator has handed out; on CPU what the process has in memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return peak_bytes(device)
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

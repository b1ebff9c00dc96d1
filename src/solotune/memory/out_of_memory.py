"""Out of memory in a step: what was in it, and the cheapest keys that would have saved enough.

The sizes of weights, gradients and optimizer state are those of the live tensors. What a key would
save is the difference of two plans of the run, with it and without.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from solotune.errors import UserError
from solotune.memory.stepping import Stepper
from solotune.memory.tracker import state_parts
from solotune.models import Decoder
from solotune.training import peak_bytes

# Returns the peak of the run in bytes with some keys changed; None where they are not valid.
PeakWith = Callable[[Mapping[str, Any]], int | None]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def explain_out_of_memory(
    model: Decoder, *, stepper: Stepper, on: Mapping[str, Any], peak_with: PeakWith | None
) -> Iterator[None]:
    """Turn an allocator's failure inside into one UserError; `on` are the values of MEMORY_KEYS."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; on CPU there is no other type
        asked = _bytes_asked(error)
        if asked is None:
            raise
        raise UserError(_message(asked, model, stepper, on, peak_with)) from error


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
    on: Mapping[str, Any], *, needed: int, device: torch.device, peak_with: PeakWith
) -> tuple[str, list[tuple[dict[str, Any], int, str]]]:
    """Return an introduction and up to three changes, each with the bytes it saves and its cost."""
    peak = peak_with({})
    assert peak is not None, "the run itself is valid"
    saving: list[tuple[dict[str, Any], int, str]] = []
    for change, cost in choices(on, device=device):
        other = peak_with(change)
        if other is not None and other < peak:
            saving.append((change, peak - other, cost))
    enough = [one for one in saving if one[1] >= needed]
    if enough:
        return "each of these alone would save enough, the cheapest first:", enough[:3]
    together: dict[str, Any] = {}
    for count, (change, _, _) in enumerate(saving, start=1):
        other = peak_with(together | change)
        if other is None:
            continue
        together |= change
        if peak - other >= needed:
            return "none of these alone would save enough, together they would:", saving[:count]
    return "not even these together would save enough; take a smaller model:", saving


def held_by(model: Decoder, stepper: Stepper, *, held: int) -> dict[str, int]:
    """Return what the device holds, in bytes, by what it is for; `held` is all of it."""
    parameters = list(model.parameters())
    here = [t for t in (*parameters, *model.buffers()) if t.device.type == model.device.type]
    sizes = {
        "weights": sum(tensor.nbytes for tensor in here),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer state": sum(
            part.nbytes
            for p in stepper.optimizer.state
            for part, place in state_parts(stepper, p)
            if place == "device"
        ),
    }
    return sizes | {"activations, logits and all else": max(held - sum(sizes.values()), 0)}


def _message(
    asked: int,
    model: Decoder,
    stepper: Stepper,
    on: Mapping[str, Any],
    peak_with: PeakWith | None,
) -> str:
    device, held = model.device, _bytes_held(model.device)
    shown = held_by(model, stepper, held=held)
    lines = [
        f"out of memory on {device}: a step held {_gib(held)} and asked for {_gib(asked)} more",
        "held: " + ", ".join(f"{name} {_gib(size)}" for name, size in shown.items()),
    ]
    if not stepper.optimizer.state and on["optimizer_state"] == "device":
        lines.append("the optimizer's state is made at the end of the first step, on top of it")
    peak = peak_with({}) if peak_with else None
    if peak_with is None or peak is None:
        lines.append("`tune plan ... --vram auto` looks for a configuration that fits")
        return "\n".join(lines)
    needed = max(asked, peak - held)
    opening, changes = advice(on, needed=needed, device=device, peak_with=peak_with)
    lines.append(f"at least {_gib(needed)} must go; {opening}")
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

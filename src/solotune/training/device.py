"""Choice of the device, and the seeds of a run."""

import os
import random
import sys

import torch

from solotune.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device of a `device` key; `auto` takes the first of cuda, xpu, mps, cpu.

    Raises ConfigError for a device that is not there.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "xpu": hasattr(torch, "xpu") and torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    kind = name.partition(":")[0]
    if not available.get(kind):
        there = ", ".join(kind for kind, there in available.items() if there)
        raise ConfigError(f"device={name} is not available here: use device=auto (has: {there})")
    if kind == "cuda" and sys.platform != "win32":
        # Without it freed blocks of other sizes cannot be joined; read at the first allocation.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # pinned memory and kernels would open card 0 too
        torch.empty(0, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name} cannot be used ({reason}): use device=auto") from None
    return device


def describe_device(device: torch.device) -> str:
    """Return one printed line: the device, its name, its memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{device}: {torch.cuda.get_device_name(device)}, {total / 2**30:.1f} GiB"
    if device.type == "cpu":
        return f"cpu: {torch.get_num_threads()} threads"
    return str(device)


def set_seed(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python's and torch's generators; `deterministic` also refuses unordered kernels.

    Raises ConfigError for a seed that numpy would not take.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed}: use 0 or more, and less than 2**32")
    random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch < 2.13 refuses
        torch.use_deterministic_algorithms(True)

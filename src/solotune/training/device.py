"""Choice of the device, and the seeds of a run."""

import os
import random
import sys

import torch
from torch.torch_version import TorchVersion

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
    if kind == "cuda":
        configure_allocator()
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # pinned memory and kernels would open card 0 too
        torch.empty(0, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name} cannot be used ({reason}): use device=auto") from None
    return device


def configure_allocator() -> None:
    """Set torch's allocators, which read their settings at the first allocation.

    Without expandable segments freed blocks of other sizes cannot be joined. Pinned memory would be
    rounded up to a power of two: 0.5 GiB for a layer of 0.41. What the user has set stays.
    """
    settings = [] if sys.platform == "win32" else ["expandable_segments:True"]
    if TorchVersion(torch.__version__) >= "2.13":  # an older one stops at a name it does not know
        settings.append("pinned_max_round_threshold_mb:1")
    if settings and "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ",".join(settings))


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

"""What a device can do: its memory, and how fast it computes and copies."""

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from solotune.config.suggest import suggest
from solotune.errors import ConfigError

# Of what a data sheet promises a training step gets this: large products in bf16 about two thirds
# of the peak, element by element about four fifths of the bandwidth. A measured profile gets all.
_SHEET_PRODUCTS, _SHEET_BANDWIDTH = 0.65, 0.8
_LAUNCH_SECONDS = {"cuda": 6e-6, "cpu": 4e-6}  # at least, of an operator in eager mode
_DISK_GB_PER_S = 1.0  # unless measured: an NVMe drive, written for long


@dataclass(frozen=True)
class DeviceProfile:
    """Speeds in the units of data sheets: 10^12 operations and 10^9 bytes a second."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_gib: float
    bf16_tflops: float  # dense, with fp32 sums
    fp32_tflops: float
    memory_gb_per_s: float
    bus_gb_per_s: float  # one way, pinned
    disk_gb_per_s: float = _DISK_GB_PER_S  # written
    measured: bool = True  # False: from a data sheet

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def seconds_of(self, costs: np.ndarray, *, dtype: str) -> float:
        """Return the time of operators, given (operations, bytes) of each, one after the other."""
        tflops = self.bf16_tflops if dtype == "bf16" else self.fp32_tflops
        products, bandwidth = (1.0, 1.0) if self.measured else (_SHEET_PRODUCTS, _SHEET_BANDWIDTH)
        computing = costs[:, 0] / (tflops * 1e12 * products)
        moving = costs[:, 1] / (self.memory_gb_per_s * 1e9 * bandwidth)
        longest = np.maximum(computing, moving)
        return float(np.maximum(longest, _LAUNCH_SECONDS[self.kind]).sum())


def shipped_profiles() -> dict[str, Path]:
    """Return the profiles that come with solotune, by name."""
    folder = Path(str(files("solotune.plan"))) / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def measured_path() -> Path:
    """Return where the profile of this machine is kept: in the user's folder for caches."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "solotune" / "device_profile.yaml"


def find_profile(name: str) -> DeviceProfile:
    """Return the profile of a name: `measured`, a shipped one, or a YAML file.

    Raises ConfigError for one that is not there or is no profile.
    """
    shipped = shipped_profiles()
    path = shipped.get(name.lower())
    if name == "measured":
        path = measured_path()
        if not path.is_file():
            raise ConfigError("device-profile=measured: measure it first: tune plan --measure")
    elif path is None:
        path = Path(name).expanduser()
        if not path.is_file():
            guess = suggest(name.lower(), shipped) or f": use measured, {', '.join(shipped)}"
            raise ConfigError(f"device-profile={name} is neither a profile nor a file{guess}")
    return read_profile(path)


def read_profile(path: Path) -> DeviceProfile:
    """Return the profile in a YAML file; raises ConfigError where it is none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            reason = f"{error.problem}, line {error.problem_mark.line + 1}"
        raise ConfigError(f"device profile {path} cannot be read: {reason}") from None
    fields = {field.name: field for field in dataclasses.fields(DeviceProfile)}
    values = values if isinstance(values, dict) else {}
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    unknown = [str(name) for name in values if name not in fields]
    if missing or unknown:
        faults = [f"lacks {', '.join(missing)}"] if missing else []
        faults += [f"holds {', '.join(unknown)}, which no profile has"] if unknown else []
        raise ConfigError(f"device profile {path} {' and '.join(faults)}")
    for name, value in values.items():
        if fields[name].type is float and not (type(value) in (int, float) and value > 0):
            raise ConfigError(f"device profile {path}: {name}={value!r}: use a number above 0")
    if values["kind"] not in _LAUNCH_SECONDS:
        raise ConfigError(f"device profile {path}: kind={values['kind']!r}: use cuda or cpu")
    return DeviceProfile(**values)


def write_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a profile as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dataclasses.asdict(profile), sort_keys=False), encoding="utf-8")


def measure_profile(device: torch.device, folder: Path) -> DeviceProfile:
    """Return what this machine can do, in some seconds; 256 MiB go to `folder` and are deleted."""
    on_card = device.type == "cuda"
    width = 8192 if on_card else 1024
    numbers = 2**28 if on_card else 2**25
    left, right = (torch.randn(width, width, device=device) for _ in range(2))
    speed: dict[str, float] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = left.to(dtype), right.to(dtype)
        speed[name] = 2 * width**3 / _seconds(lambda a=a, b=b: a @ b, device) / 1e12
    source = torch.zeros(numbers, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    bandwidth = 2 * numbers / seconds / 1e9
    bus = bandwidth / 2
    if on_card:
        pinned = torch.empty(numbers, dtype=torch.uint8, pin_memory=True)
        bus = numbers / _seconds(lambda: target.copy_(pinned, non_blocking=True), device) / 1e9
    name, memory = "CPU", host_bytes()
    if on_card:
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    figures = speed["bf16"], speed["fp32"], bandwidth, bus, _disk_speed(folder)
    rounded = [float(f"{figure:.3g}") for figure in figures]
    return DeviceProfile(
        name, "cuda" if on_card else "cpu", round(memory / 2**30, 1), *rounded, measured=True
    )


def host_bytes() -> int:
    """Return the memory that this process may have: the machine's, or its control group's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else "max"
        if text.isdigit():
            total = min(total, int(text))
    return total


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the time of one call, the best of three spans of about half a second."""

    def span(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / count

    span(1)
    count = max(1, min(1000, int(0.5 / span(1))))
    return min(span(count) for _ in range(3))


def _disk_speed(folder: Path) -> float:
    """Return GB a second written to the disk of `folder`, until they are there."""
    block, path = os.urandom(2**24), folder / f".solotune-{os.getpid()}"
    try:
        begin = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(16):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return 16 * len(block) / (time.perf_counter() - begin) / 1e9
    except OSError:
        return _DISK_GB_PER_S
    finally:
        path.unlink(missing_ok=True)

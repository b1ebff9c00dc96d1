"""What a machine has: memory of the device and the host, disk."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from solotune.errors import ConfigError
from solotune.plan.device_profile import host_bytes
from solotune.plan.needs import CONTEXT, GIB, Needs

# A plan is trusted to this: predicted peaks are within 1 % of measured ones, but the order of what
# is freed on side streams is a card's own.
MARGIN = 0.03

_UNITS = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"([\d.]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may take; None: not known, so nothing is compared."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    @property
    def is_set(self) -> bool:
        return any(size is not None for size in (self.device, self.host, self.disk))

    def faults(self, needs: Needs, *, margin: float = 0.0) -> list[str]:
        """Return what does not fit, and by how much; `margin` is the share that stays free."""
        wanted = [
            ("device memory", needs.reserved, self.device),
            ("host memory", needs.host_total, self.host),
            ("disk", needs.disk_total, self.disk),
        ]
        found = []
        for name, need, size in wanted:
            if size is None or need <= size * (1 - margin):
                continue
            over = (
                f"{(need - size) / GIB:.2f} too much" if need > size else f"{margin:.0%} stays free"
            )
            found.append(f"{name} {need / GIB:.2f} GiB of {size / GIB:.2f}, {over}")
        return found

    def excess(self, needs: Needs, *, margin: float) -> float:
        """Return how far a plan is from fitting, as a share of what there is; 0: it fits."""
        pairs = (
            (needs.reserved, self.device),
            (needs.host_total, self.host),
            (needs.disk_total, self.disk),
        )
        return sum(
            max(0.0, need / (size * (1 - margin)) - 1) for need, size in pairs if size is not None
        )


def parse_size(text: str, *, flag: str) -> int:
    """Return the bytes of `12GiB`, `12GB` or `12`, which is GiB; raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ConfigError(f"{flag}={text}: use a size as 12GiB, 12GB or 12")
    prefix, binary = match[2].lower(), bool(match[3])
    if not prefix:
        return int(number * (GIB if not text.strip().lower().endswith("b") else 1))
    step = 1024 if binary else 1000
    return int(number * step ** ("kmgt".index(prefix) + 1))


def free_of_device(device: torch.device) -> int:
    """Return what a run may take of a card: what is free, and the context that asking has made."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + CONTEXT


def free_of_host() -> int:
    """Return the host memory that a run may take: what the system says is available."""
    path = Path("/proc/meminfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, host_bytes())
    return host_bytes()


def free_of_disk(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, or of the nearest one above that is there."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free

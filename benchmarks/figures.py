"""What benchmark scripts share: the conditions of a run, tables, and the figures of a docs page."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB, GIB = 2**20, 2**30


def conditions(device: str, *packages: str) -> str:
    """Return one Markdown paragraph: day, device, host, commit and versions of `packages`."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = ", ".join(f"{name} {package_version(name)}" for name in packages)
    return (
        f"{date.today()}, {device}, {os.cpu_count()} cores, {memory_gib:.0f} GiB of memory, "
        f"{platform.system()}.  \n"
        f"solotune at {commit or 'an unknown commit'}, {versions}, "
        f"Python {platform.python_version()}."
    )


def package_version(name: str) -> str:
    """Return the version of an installed package, or `missing`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def cpu_name() -> str:
    """Return what /proc/cpuinfo calls the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown CPU")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, all columns but the first to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_figures(path: Path, text: str, *, script: str) -> None:
    """Put the figures between the page's markers; what people wrote around them stays."""
    begin, end = f"<!-- figures: written by benchmarks/{script} -->", "<!-- end of figures -->"
    page = path.read_text() if path.exists() else f"{begin}\n{end}\n"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"error: {path} lacks {begin} or {end}: add both, or name another file")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")

"""The folder of a run or sweep that names none: ./runs/<config>-<time>, never one that exists."""

import time
from pathlib import Path


def default_folder(config: str | None, *, prefix: str = "") -> Path:
    """Return ./runs/<prefix><config>-<time>; `config` is what the user called it, or None."""
    name = Path(config).with_suffix("").as_posix().replace("/", "-") if config else "run"
    return Path("runs") / f"{prefix}{name.strip('-.')}-{time.strftime('%Y%m%d-%H%M%S')}"


def make_unused(folder: Path) -> Path:
    """Make `folder`, numbered where another run started in the same second."""
    candidate, number = folder, 2
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1

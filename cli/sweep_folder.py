"""What a sweep leaves behind: its runs, sweep.json, and the table as sweep.csv and sweep.md."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from solotune.config import ConfigError
from solotune.config.sweep import Axis, Run, name_of

from .sweep_result import DIVERGED, DONE, measure, read_rows

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two sweeps out of one folder
    fcntl = None

NUMBERS = ("val_loss", "best_val_loss", "loss", "steps", "seconds", "peak_memory_gib")
_HEADS = ("final val", "best val", "train loss", "steps", "seconds", "peak GiB")
_FORMATS = ("{:.4f}", "{:.4f}", "{:.4f}", "{}", "{:.1f}", "{:.2f}")


@dataclass
class Row:
    """One run: the name of its folder, the swept keys with their values, and what it came to."""

    name: str
    values: dict[str, str]
    status: str = ""  # done, diverged, failed, stopped; nothing before its end
    error: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to run; a failed run is tried again."""
        return self.status in (DONE, DIVERGED)

    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


class SweepFolder:
    """The folder of a sweep; `about` is what all of its runs have in common."""

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        self.path, self.about = path, about
        self.rows: list[Row] = []
        file = path / "sweep.json"
        if resume and not file.is_file():
            raise ConfigError(f"resume_from_checkpoint: {path} holds no sweep (no sweep.json)")
        if resume:
            self._read(file)
        elif path.is_dir() and any(path.iterdir()):
            raise ConfigError(
                f"output_dir={path} is not empty: name another, or go on with the sweep in it with "
                "resume_from_checkpoint=True"
            )

    def _read(self, file: Path) -> None:
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            self.rows = [Row(**row) for row in held["runs"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: not a sweep's ({error}): name another folder") from None
        for key, now in self.about.items():
            if held.get(key) != now:
                raise ConfigError(
                    f"{self.path}: the sweep was begun with {key} {_shown(held.get(key))}, not "
                    f"{_shown(now)}: give the same words, or another output_dir"
                )

    def plan(self, axes: Sequence[Axis], runs: Sequence[Run]) -> None:
        """Take `runs` as the ones to do, in this order; what earlier ones came to is kept."""
        keys = [axis.key for axis in axes]
        for row in self.rows:
            if list(row.values) != keys:
                raise ConfigError(
                    f"{self.path}: the sweep was begun over {', '.join(row.values)}, in this order:"
                    " sweep the same keys, or name another output_dir"
                )
        earlier = {tuple(row.values.values()): row for row in self.rows}
        wanted = [
            earlier.pop(run, None) or Row(name_of(axes, run), dict(zip(keys, run, strict=True)))
            for run in runs
        ]
        self.rows = [*wanted, *(row for row in earlier.values() if row.is_over)]

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Yield an open file that says that a sweep, or a run of it, is at work in this folder."""
        with (self.path / ".lock").open("a+") as lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.seek(0)
                    raise ConfigError(
                        f"{self.path}: a run of this sweep is still going, as process "
                        f"{lock.read().strip()}: wait for its end, or end it"
                    ) from None
            yield lock.fileno()

    def measure(self, row: Row) -> None:
        """Read what a run has logged."""
        row.numbers = measure(read_rows(self.path / row.name))
        if row.status != DONE:  # its last validation may be the one before the first step
            row.numbers["val_loss"] = None

    def write(self) -> None:
        """Write sweep.json, sweep.csv and sweep.md anew."""
        held = {**self.about, "runs": [asdict(row) for row in self.rows]}
        _replace(self.path / "sweep.json", json.dumps(held, indent=2) + "\n")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        keys = list(self.rows[0].values)
        writer.writerow([*keys, *NUMBERS, "status", "error", "folder"])
        for row in self.rows:
            numbers = [row.numbers.get(name) for name in NUMBERS]
            writer.writerow([*row.values.values(), *numbers, row.status, row.error, row.name])
        _replace(self.path / "sweep.csv", text.getvalue())
        header, *cells = self.table()
        lines = [header, ["---"] * len(header), *cells]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        _replace(self.path / "sweep.md", "".join(f"| {' | '.join(x)} |\n" for x in escaped))

    def table(self) -> list[list[str]]:
        """Return the table with its header, the lowest final loss first."""
        header = [*self.rows[0].values, *_HEADS, "status"]
        return [header, *(_cells(row) for row in sorted(self.rows, key=_rank))]


def _rank(row: Row) -> tuple[bool, float]:
    loss = compared(row)
    return (loss is None, loss or 0.0)


def compared(row: Row) -> float | None:
    """Return the number by which a run is judged: validation loss, or training loss without one."""
    if row.status != DONE:
        return None
    held = row.numbers
    return held.get("loss") if held.get("val_loss") is None else held["val_loss"]


def _cells(row: Row) -> list[str]:
    numbers = [
        "" if (value := row.numbers.get(name)) is None else form.format(value)
        for name, form in zip(NUMBERS, _FORMATS, strict=True)
    ]
    status = row.status or "waiting"
    return [*row.values.values(), *numbers, f"{status}: {row.error}" if row.error else status]


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Return a table for the terminal, its columns aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) and value else str(value or "nothing")


def _replace(path: Path, text: str) -> None:
    """Replace a file: a reader, or a sweep that goes on, sees the old text or the new."""
    writing = path.with_name(f".writing-{path.name}")
    writing.write_text(text, encoding="utf-8")
    writing.replace(path)

"""Where the metrics go beside metrics.jsonl: a table, TensorBoard, Weights & Biases."""

import csv
import importlib
import io
import json
from pathlib import Path
from typing import Any, Literal, Protocol

from solotune.checkpoint.folders import write_text
from solotune.errors import ConfigError


class MetricLogger(Protocol):
    """What `metric_logger` may name: built early, so that a missing package costs nothing."""

    def start(self, output_dir: Path, *, first_step: int) -> None:
        """Begin a run in `output_dir`; what was logged after `first_step` will come again."""
        ...

    def log(self, row: dict[str, Any]) -> None:
        """Take one row: `step`, and numbers by name, or numbers by category by name."""
        ...

    def close(self) -> None: ...


class CSVLogger:
    """Writes metrics.csv: a row a step, a column a metric; a later metric adds a column."""

    def start(self, output_dir: Path, *, first_step: int) -> None:
        self._path = output_dir / "metrics.csv"
        self._columns: list[str] = []
        rows = []
        if first_step and self._path.is_file():
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if _step(row) <= first_step]
        self._write(rows)

    def log(self, row: dict[str, Any]) -> None:
        flat = _flat(row)
        if set(flat) - set(self._columns):
            with self._path.open(encoding="utf-8", newline="") as file:
                self._write([*csv.DictReader(file), flat])
            return
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(flat)

    def close(self) -> None:
        pass

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if self._columns:
            writer.writeheader()
        writer.writerows(rows)
        write_text(self._path, text.getvalue())


class TensorBoardLogger:
    """Writes scalars to `tensorboard` in the run's folder; look at them with tensorboard."""

    def __init__(self) -> None:
        _import("tensorboard", extra="tensorboard")

    def start(self, output_dir: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in _flat(row).items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()  # a run that ends in an error closes nothing

    def close(self) -> None:
        self._writer.close()


class WandBLogger:
    """Sends rows to Weights & Biases; a resumed run goes on as the same one there.

    `mode`: online | offline | disabled. `name` None lets the service choose.
    """

    def __init__(
        self,
        *,
        project: str = "solotune",
        entity: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] = "online",
    ) -> None:
        self._wandb = _import("wandb", extra="wandb")
        self._settings = {"project": project, "entity": entity, "name": name, "mode": mode}

    def start(self, output_dir: Path, *, first_step: int) -> None:
        remembered = output_dir / "wandb_run_id"
        run_id = remembered.read_text().strip() if first_step and remembered.is_file() else None
        self._run = self._wandb.init(
            dir=str(output_dir), id=run_id, resume="allow" if run_id else None, **self._settings
        )
        # Plotted by our step and not by the service's counter, which never goes back.
        self._run.define_metric("*", step_metric="step")
        write_text(remembered, f"{self._run.id}\n")

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(_flat(row))

    def close(self) -> None:
        self._run.finish()


def _import(package: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"metric_logger needs the package {package}: pip install 'solotune[{extra}]', or "
            "remove the key"
        ) from None


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with `{"memory": {"weights": 1}}` as `{"memory/weights": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{part}": number for part, number in value.items()}
        else:
            flat[name] = value if isinstance(value, int | float | str) else json.dumps(value)
    return flat


def _step(row: dict[str, Any]) -> int:
    return int(row["step"])

"""Metrics go to a table, to TensorBoard and to Weights & Biases; a resumed run goes on there."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from solotune.errors import ConfigError
from solotune.training import CSVLogger, TensorBoardLogger, WandBLogger


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_metric_that_comes_later_adds_a_column(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path, first_step=0)
    logger.log({"step": 1, "loss": 0.5})
    logger.log({"step": 1, "val_loss": 0.25, "memory_device_gib": {"weights": 1.5}})
    logger.log({"step": 2, "loss": 0.125})
    first, validation, second = table(tmp_path)
    assert first == {"step": "1", "loss": "0.5", "val_loss": "", "memory_device_gib/weights": ""}
    assert (validation["val_loss"], validation["memory_device_gib/weights"]) == ("0.25", "1.5")
    assert (second["step"], second["loss"]) == ("2", "0.125")


def test_a_resumed_table_drops_the_rows_that_come_again(tmp_path: Path) -> None:
    for first_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        logger = CSVLogger()
        logger.start(tmp_path, first_step=first_step)
        for step in steps:
            logger.log({"step": step, "loss": step / 8})
        logger.close()
    assert [row["step"] for row in table(tmp_path)] == ["1", "2", "3", "4"]
    CSVLogger().start(tmp_path, first_step=0)
    assert table(tmp_path) == []


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, losses in ((0, {1: 0.5, 2: 0.25, 3: 9.0}), (2, {3: 0.125})):
        logger = TensorBoardLogger()
        logger.start(tmp_path, first_step=first_step)
        for step, loss in losses.items():
            logger.log({"step": step, "loss": loss})
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 0.25), (3, 0.125)]


class Service:
    """Stands for wandb: notes what it is asked for."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **settings: Any) -> SimpleNamespace:
        self.runs.append(settings)
        return SimpleNamespace(
            id=settings["id"] or "abc123",
            define_metric=lambda *names, **options: None,
            log=self.rows.append,
            finish=self.finish,
        )

    def finish(self) -> None:
        self.finished += 1


def test_a_resumed_run_goes_on_as_the_same_one_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    for first_step in (0, 2, 0):
        logger = WandBLogger(project="p", mode="offline")
        logger.start(tmp_path, first_step=first_step)
        logger.log({"step": first_step + 1, "loss": 0.5, "memory": {"weights": 1}})
        logger.close()
    assert [run["id"] for run in service.runs] == [None, "abc123", None]
    assert service.runs[0]["project"] == "p"
    assert service.rows[0] == {"step": 1, "loss": 0.5, "memory/weights": 1}
    assert service.finished == 3
    assert json.dumps(service.rows)


@pytest.mark.parametrize(("logger", "package"), [(TensorBoardLogger, "tensorboard"),
                                                 (WandBLogger, "wandb")])  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, logger: type, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}: .*solotune\[{package}"):
        logger()

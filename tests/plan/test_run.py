"""A run says what it needs before weights are read, refuses what cannot fit, and compares."""

import json
from pathlib import Path

import pytest
import torch

from solotune.plan import run as plan_of_run
from solotune.plan.budget import Budget
from tests.recipes.conftest import TRAINING, basics, chats, models, tune

__all__ = ["chats", "models"]  # fixtures

each_training = pytest.mark.parametrize("recipe", TRAINING, ids=lambda path: path.stem)


@each_training
def test_predicted_stands_beside_measured_and_the_weights_are_those_without_a_plan(
    recipe: Path, models: dict[str, Path], chats: Path, tmp_path: Path, capsys
) -> None:
    shared = basics(models["tied"], chats, recipe=recipe)[:]
    for name, planned in (("with", True), ("without", False)):
        words = [w for w in shared if not w.startswith("plan=")]
        assert tune("run", recipe, *words, f"plan={planned}", f"output_dir={tmp_path / name}") == 0
        out = capsys.readouterr().out
        assert ("plan: " in out) == planned
        assert ("memory: planned " in out) == planned
    rows = [json.loads(line) for line in (tmp_path / "with/metrics.jsonl").read_text().splitlines()]
    assert rows[-1].keys() == {"step", "planned_peak_gib", "measured_peak_gib"}
    # the process's own part, 0.75 GiB, is that of a run whose weights are not a megabyte
    assert 0 < rows[-1]["planned_peak_gib"] < rows[-1]["measured_peak_gib"] + 0.6
    one, other = (
        [json.loads(line) for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()]
        for n in ("with", "without")
    )
    assert [row["loss"] for row in one[:-1]] == [row["loss"] for row in other]


def test_a_run_that_cannot_fit_stops_before_weights_are_read(
    models: dict[str, Path], chats: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(plan_of_run, "_budget", lambda device: Budget(host=1000))
    recipe = next(path for path in TRAINING if path.stem.startswith("full"))
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):  # no weights
        (tmp_path / "model" / name).write_bytes((models["tied"] / name).read_bytes())
    words = [w for w in basics(tmp_path / "model", chats) if not w.startswith("plan=")]
    assert tune("run", recipe, *words, f"output_dir={tmp_path / 'out'}") == 1
    error = capsys.readouterr().err
    assert "does not fit cpu: host memory" in error
    assert "plan=False" in error
    assert not any((tmp_path / "out").iterdir())


def test_a_recipe_that_cannot_be_planned_runs_all_the_same(monkeypatch, capsys) -> None:
    def fails(*args, **kwargs):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(plan_of_run, "largest_work", fails)
    cfg = type("Config", (), {"plan": True})
    loader: object = None
    device = torch.device("cpu")
    assert plan_of_run.plan_run({}, cfg, device, loader, folder=Path()) is None  # type: ignore[arg-type]
    assert "data-dependent" in capsys.readouterr().out


def test_the_plan_of_a_run_says_what_a_key_would_save(
    models: dict[str, Path], chats: Path, tmp_path: Path, monkeypatch
) -> None:
    plans = []
    make = plan_of_run.plan_run
    recipe = next(path for path in TRAINING if path.stem.startswith("full"))

    def keep(names, cfg, *args, **kwargs):
        cfg.plan = True
        plans.append(make(names, cfg, *args, **kwargs))
        return plans[-1]

    monkeypatch.setattr("solotune.plan.plan_run", keep)
    assert tune("run", recipe, *basics(models["untied"], chats), f"output_dir={tmp_path}/o") == 0
    (plan,) = plans
    assert plan.peak_with({"optimizer_in_bwd": True}) < plan.peak_with({})
    assert plan.peak_with({"optimizer": "torch.optim.SGD"}) < plan.peak_with({})
    assert plan.peak_with({"resident_layers": 1}) is None  # without optimizer_in_bwd

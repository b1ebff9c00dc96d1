"""Early stopping, a save on demand, a part of the weights, loggers and the profiler."""

import csv
import json
from pathlib import Path

import pytest
import torch

from solotune.training import RunLog

from .conftest import ROOT, basics, change_distance, differing, metrics, tune, weights

RECIPE = ROOT / "recipes" / "full_finetune_single_device.py"
# One step an epoch, validated after each: enough of them to run out of patience.
VALIDATED = {"val_fraction": 0.3, "epochs": 12, "max_steps_per_epoch": 1}


def losses(folder: Path) -> list[float]:
    return [row["val_loss"] for row in metrics(folder) if "val_loss" in row]


def test_a_run_ends_after_so_many_validations_that_were_not_better(
    train, capsys: pytest.CaptureFixture[str]
) -> None:
    final = train(RECIPE, early_stopping_patience=2, **VALIDATED | {"optimizer.lr": 0.5})
    found = losses(final.parent)
    assert len(found) < 12
    assert min(found) not in found[-2:]
    assert min(found[:-2]) == found[-3]
    assert "stopped early" in capsys.readouterr().out
    last = max(row["step"] for row in metrics(final.parent))
    assert (final.parent / "latest").read_text().strip() == f"step_{last}"


def test_a_run_that_gets_better_is_not_stopped(train) -> None:
    final = train(RECIPE, early_stopping_patience=2, **VALIDATED)
    assert max(row["step"] for row in metrics(final.parent)) == 12


def test_resuming_a_run_that_was_stopped_early_changes_nothing_unless_patience_is_raised(
    train,
) -> None:
    keys = VALIDATED | {"optimizer.lr": 0.5}
    first = train(RECIPE, early_stopping_patience=2, **keys)
    before, steps = weights(first), len(metrics(first.parent))
    again = train(RECIPE, "run", "resume_from_checkpoint=True", early_stopping_patience=2, **keys)
    assert weights(again).keys() == before.keys()
    assert len(metrics(again.parent)) == steps
    raised = train(RECIPE, "run", "resume_from_checkpoint=True", early_stopping_patience=9, **keys)
    assert len(metrics(raised.parent)) > steps


def test_patience_without_validation_is_refused(
    models, chats, capsys: pytest.CaptureFixture[str]
) -> None:
    words = basics(models["tied"], chats, early_stopping_patience=2)
    assert tune("run", RECIPE, *words) == 1
    assert "early_stopping_patience needs val_fraction" in capsys.readouterr().err


def test_touching_save_now_saves_after_the_step(
    models, chats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, step = tmp_path / "run", RunLog.step

    def step_and_wish(self: RunLog, number: int, *args, **metrics) -> None:
        step(self, number, *args, **metrics)
        if number == 2:
            (output / "save_now").touch()

    monkeypatch.setattr(RunLog, "step", step_and_wish)
    words = basics(models["tied"], chats, max_steps_per_epoch=5)
    assert tune("run", RECIPE, *words, f"output_dir={output}") == 0
    assert sorted(path.name for path in output.glob("step_*")) == ["step_2", "step_5"]
    assert not (output / "save_now").exists()


@pytest.mark.parametrize("schedule", [
    {},
    {"enable_activation_checkpointing": True, "enable_activation_offloading": True},
    {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1},
    {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2},
    {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2, "clip_grad_norm": 1.0},
])  # fmt: skip
@pytest.mark.parametrize("trainable", ["layers.1", "norm|lm_head", "layers.0.mlp", "embed_tokens"])
def test_only_what_is_trainable_changes_and_alike_in_every_schedule(
    train, models, schedule, trainable
) -> None:
    keys = {"trainable": trainable, "optimizer": "torch.optim.AdamW", "batch_size": 1}
    plain = {"enable_activation_checkpointing": False} | {
        key: value for key, value in schedule.items() if key in ("gradient_accumulation_steps",)
    }
    if "clip_grad_norm" in schedule:
        plain["clip_grad_norm"] = schedule["clip_grad_norm"]
    reference = train(RECIPE, "plain", **keys, **plain)
    final = train(RECIPE, "other", **keys, **schedule)
    if "clip_grad_norm" not in schedule:
        assert differing(reference, final) == []
    changed = {name.removeprefix("model.") for name in differing(models["untied"], final)}
    assert changed
    parts = trainable.split("|")
    assert all(any(part in name for part in parts) for name in changed)
    if trainable == "layers.1":
        assert len(changed) == 9
    saved = weights(final)
    assert saved.keys() == weights(models["untied"]).keys()


def test_metrics_go_to_the_logger_and_the_profiler_leaves_a_trace(train) -> None:
    keys = {"metric_logger": "solotune.training.CSVLogger", "max_steps_per_epoch": 6}
    keys |= {"profiler": "solotune.training.StepProfiler", "profiler.wait_steps": 1}
    folder = train(RECIPE, **keys).parent
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in metrics(folder)]
    assert json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    assert "aten::mm" in (folder / "profile" / "table.txt").read_text()


def test_a_run_too_short_for_the_profiler_says_so(
    train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(RECIPE, profiler="solotune.training.StepProfiler", max_steps_per_epoch=2)
    assert "no trace, as it needs 5 steps" in capsys.readouterr().out


@pytest.mark.parametrize("keys", [
    {"enable_activation_checkpointing": False},
    {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2},
])  # fmt: skip
def test_autocast_trains_fp32_weights_by_bf16_products(train, models, keys) -> None:
    fp32 = train(RECIPE, "fp32", **keys)
    autocast = train(RECIPE, "autocast", autocast=True, **keys)
    bf16 = train(RECIPE, "bf16", dtype="bf16", optimizer="solotune.optim.AdamWKahan", **keys)
    first = [metrics(folder.parent)[0]["loss"] for folder in (fp32, autocast, bf16)]
    assert 0 < abs(first[1] - first[0]) < 0.01 * first[0]
    kinds = {tensor.dtype for tensor in weights(autocast).values()}
    assert kinds == {torch.float32}
    assert 0 < change_distance(models["untied"], fp32, autocast) < 0.2


def test_autocast_in_every_schedule_alike(train) -> None:
    keys = {"autocast": True, "gradient_accumulation_steps": 2}
    plain = train(RECIPE, "plain", enable_activation_checkpointing=False, **keys)
    for name, changes in {
        "checkpointed": {},
        "offloaded": {"enable_activation_offloading": True},
        "layer-major": {"optimizer_in_bwd": True},
    }.items():
        assert differing(plain, train(RECIPE, name, **keys, **changes)) == []


def test_autocast_of_bf16_weights_is_refused(
    models, chats, capsys: pytest.CaptureFixture[str]
) -> None:
    words = basics(models["tied"], chats, autocast=True, dtype="bf16")
    assert tune("run", RECIPE, *words) == 1
    assert "autocast=True has no effect on bf16 weights" in capsys.readouterr().err

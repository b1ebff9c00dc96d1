"""What the full fine-tuning recipe counts as a step, and what a step without a target does."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.data import loader
from solotune.data.batch import IGNORED, Batch
from tests.models.tiny import tiny

Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path, tiny_tokenizer_dir: Path) -> Run:
    """Return a function that trains on 16 samples, one a micro-batch; it returns the run folder."""
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_tokenizer_dir, model_dir)
    model = tiny(vocab_size=260)
    (model_dir / "config.json").write_text(json.dumps(model.config))
    weights = {model.to_hf_key(name): p.detach() for name, p in model.named_parameters()}
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    rows = [{"prompt": f"say {number}", "completion": "yes"} for number in range(16)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(**changes: Any) -> Path:
        keys = {
            "checkpoint_dir": model_dir,
            "dataset": data,
            "dataset.packed": False,
            "tokenizer.max_seq_len": 96,
            "output_dir": tmp_path / "run",
            "device": "cpu",
            "dtype": "fp32",
            "optimizer": "torch.optim.AdamW",
            "optimizer.lr": 1e-2,
            "val_fraction": 0,
            "plan": False,  # its line in metrics.jsonl is no step
            "epochs": 1,
            "batch_size": 1,
            **changes,
        }
        words = [f"{key}={value}" for key, value in keys.items()]
        assert main(["run", "full_finetune_single_device", *words]) == 0
        return tmp_path / "run"

    return run


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("accumulation", [4, 5])
def test_the_schedule_counts_optimizer_steps_and_not_micro_batches(
    run: Run, accumulation: int
) -> None:
    # 16 micro-batches by 4 are 4 steps; by 5 as well, the last with one micro-batch.
    rows = metrics(
        run(
            gradient_accumulation_steps=accumulation,
            lr_scheduler="solotune.training.linear",
            **{"lr_scheduler.final_lr_ratio": 0.1, "lr_scheduler.warmup_ratio": 0},
        )
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["lr"] for row in rows] == pytest.approx([1e-2, 0.7e-2, 0.4e-2, 0.1e-2])


def test_the_schedule_spans_all_epochs(run: Run) -> None:
    rows = metrics(
        run(
            epochs=2,
            gradient_accumulation_steps=8,
            lr_scheduler="solotune.training.linear",
            **{"lr_scheduler.final_lr_ratio": 0.1, "lr_scheduler.warmup_ratio": 0},
        )
    )
    assert [row["lr"] for row in rows] == pytest.approx([1e-2, 0.7e-2, 0.4e-2, 0.1e-2])


def test_steps_without_a_target_change_nothing_and_warn(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collate = loader.collate

    def without_targets(*args: Any, **sizes: Any) -> Batch:
        batch = collate(*args, **sizes)
        return replace(
            batch,
            labels_BS=torch.full_like(batch.labels_BS, IGNORED),
            target_rows_T=batch.target_rows_T[:0],
            num_targets=0,
        )

    monkeypatch.setattr(loader, "collate", without_targets)
    folder = run(max_steps_per_epoch=2)
    assert "warning: step 1 has no target and changed nothing" in capsys.readouterr().out
    before = load_file(folder.parent / "model/model.safetensors")
    after = load_file(folder / "final/model.safetensors")
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    assert [row["loss"] for row in metrics(folder)] == [0, 0]

"""Each way to make batches, in whole runs: stopped, resumed, and equal to the uninterrupted."""

import json
import signal
from pathlib import Path

import pytest

from .conftest import RECIPES, basics, differing, metrics, tune
from .test_contract import stop_after_step

RECIPE = next(path for path in RECIPES if path.stem == "full_finetune_single_device")

KINDS = {
    "split packs": {"dataset.split_across_pack": True, "tokenizer.max_seq_len": 48},
    "batches of tokens": {"dataset.packed": False, "dataset.max_tokens_per_batch": 192},
    "streamed": {
        "dataset.streaming": True,
        "dataset.rows_per_epoch": 6,
        "dataset.shuffle_buffer": 7,
    },
    "mixed": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_each_kind_of_batches_resumes_bit_equal(
    models, chats, tmp_path: Path, monkeypatch, kind
) -> None:
    monkeypatch.setattr("solotune.data.workers.CHUNK", 4)  # rows; a block of the stream is two
    keys = {"epochs": 2, "max_steps_per_epoch": None, "gradient_accumulation_steps": 2}
    keys |= {"val_fraction": 0.1, "lr_scheduler": None} | KINDS[kind]
    if kind == "mixed":
        more = tmp_path / "more.jsonl"
        rows = [{"prompt": f"ask {k}", "completion": "no " * (k % 4 + 1)} for k in range(30)]
        more.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys["dataset"] = (
            f"{{_component_: solotune.data.mixed, weights: [1, 2], datasets: [{chats}, {more}]}}"
        )
    words = ["run", RECIPE, *basics(models["untied"], chats, **keys)]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert tune(*words, f"output_dir={whole}") == 0
    steps = max(row["step"] for row in metrics(whole))
    assert steps >= 4
    for stop_at in (1, steps - 1):
        with monkeypatch.context() as patch:
            stop_after_step(patch, stop_at)
            resumed = (f"output_dir={stopped}", "resume_from_checkpoint=True")
            assert tune(*words, *resumed) == 128 + signal.SIGTERM
        assert (stopped / "latest").read_text().strip() == f"step_{stop_at}"
    assert tune(*words, f"output_dir={stopped}", "resume_from_checkpoint=True") == 0
    assert differing(whole / "final", stopped / "final") == []

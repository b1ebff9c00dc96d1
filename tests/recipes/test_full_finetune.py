"""What a run of full_finetune_single_device prints and leaves behind, by every optimizer."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from solotune.checkpoint import load_weights
from solotune.models import auto

from .conftest import ROOT, basics, differing, metrics, tune, weights

RECIPE = ROOT / "recipes" / "full_finetune_single_device.py"
TIMES = ("tokens_per_second", "seconds_per_step", "peak_memory_gib")


def run(model: Path, data: Path, output: Path, code: int = 0, **changes: object) -> Path:
    assert tune("run", RECIPE, *basics(model, data, output_dir=output, **changes)) == code
    return output


def untimed(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without what differs from run to run.

    And without what a resumed run knows from its second step on.
    """
    left_out = (*TIMES, "updates_lost")
    return [{k: v for k, v in row.items() if k not in left_out} for row in metrics(folder)]


def signal_at(patch: pytest.MonkeyPatch, step: int, *numbers: signal.Signals) -> None:
    """Send signals to this process when the run's step `step` is logged."""
    from solotune.training import RunLog

    logged = RunLog.step

    def log_and_send(self: RunLog, number: int, *args, **values) -> None:
        logged(self, number, *args, **values)
        if number == step:
            for number in numbers:
                os.kill(os.getpid(), number)

    patch.setattr(RunLog, "step", log_and_send)


# --- what is left behind ----------------------------------------------------------------------


def test_final_opens_in_transformers_without_a_warning_and_gives_the_same_logits(
    train, capsys
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = train(RECIPE)
    capsys.readouterr()
    loaded: Any = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    theirs, facts = loaded
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert not any(facts.values()), facts
    assert theirs.generation_config.eos_token_id == [257, 259]
    assert "[transformers]" not in capsys.readouterr().err, "the mark of its own warnings"

    chat = [{"role": "user", "content": "say 4"}]
    tokens_1S = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
    with torch.device("meta"):
        ours = auto(final)
    load_weights(ours, final, device="cpu")
    segments_11 = torch.tensor([[tokens_1S.size(1)]], dtype=torch.int32)
    with torch.no_grad():
        context = ours.context(torch.arange(tokens_1S.size(1)).unsqueeze(0), segments_11)
        hidden_1SD = ours.hidden_states(ours.embed(tokens_1S), context)
        assert (hidden_1SD @ ours.output_weight.T - theirs(tokens_1S).logits).abs().max() < 1e-4


def test_a_bf16_model_stays_bf16_in_every_file(bf16_model, chats, tmp_path) -> None:
    """Field cases 16 and 17."""
    final = run(bf16_model, chats, tmp_path / "run", dtype="bf16") / "final"
    with safe_open(final / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    before, after = ((f / "model.safetensors").stat().st_size for f in (bf16_model, final))
    assert after == pytest.approx(before, rel=0.01)
    before, after = (json.loads((f / "config.json").read_text()) for f in (bf16_model, final))
    assert after == before | {"eos_token_id": [257, 259]}
    assert differing(bf16_model, final) != []


@pytest.mark.parametrize("chosen", [False, True])
def test_tokenizer_and_template_survive(train, models, tmp_path, chosen: bool) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.role + ':' + m.content }}<|im_end|>{% endfor %}")
    final = train(RECIPE, **({"tokenizer.chat_template": own} if chosen else {}))
    source = models["untied"]
    name = "tokenizer.json"
    assert (final / name).read_bytes() == (source / name).read_bytes()
    before, after = (
        json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, final)
    )
    if chosen:
        assert (final / "chat_template.jinja").read_text() == own.read_text()
        del before["chat_template"]
    assert after == before


def test_metrics_hold_the_numbers_of_each_step(models, chats, tmp_path) -> None:
    keys = {
        "optimizer": "torch.optim.SGD",
        "optimizer.lr": 1.0,
        "lr_scheduler": "solotune.training.constant",
        "lr_scheduler.num_warmup_steps": 10,
        "clip_grad_norm": 1e9,
        "val_fraction": 0.2,
        "max_steps_per_epoch": 1,
    }
    output = run(models["untied"], chats, tmp_path / "run", **keys)
    before, step, after = metrics(output)
    assert (before.keys(), after.keys()) == ({"step", "val_loss"}, {"step", "val_loss"})
    assert (before["step"], step["step"], after["step"]) == (0, 1, 1)
    assert step.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "num_targets", *TIMES}
    assert step["lr"] == pytest.approx(0.1), "the first of ten warmup steps to 1"
    # Plain gradient descent: the length of the step is the rate that was used, times the norm.
    start, end = weights(models["untied"]), weights(output / "final")
    moved = sum((end[n].double() - start[n].double()).square().sum() for n in start) ** 0.5
    assert float(moved) == pytest.approx(step["lr"] * step["grad_norm"], rel=1e-4)


def test_facts_are_printed_before_the_first_step(models, tmp_path, capsys) -> None:
    data = tmp_path / "chats.jsonl"
    rows = [{"prompt": "say", "completion": "yes " * n} for n in (1, 5, 9, 13, 40)]
    rows.append({"prompt": "x" * 200, "completion": "never reached"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"dataset.packed": False, "gradient_accumulation_steps": 2, "max_steps_per_epoch": None}
    output = run(models["untied"], data, tmp_path / "run", dtype="bf16", epochs=2, **keys)
    lines = capsys.readouterr().out.splitlines()
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step 1/"))
    facts = "\n".join(lines[:first_step])
    targets = sum(row["num_targets"] for row in metrics(output)) // 6
    for wanted in (
        rf"output: {output}",
        r"device: cpu: \d+ threads",
        rf"weights: 95,040 parameters from {models['untied']} to cpu in \d",
        r"on disk: 95,040 float32; loaded as: 94,720 bfloat16, 320 float32",
        r" 94,720 parameters in 16 tensors, bfloat16 on cpu\n",
        r" 320 parameters in 5 tensors, float32 on cpu\n",
        rf"dataset: {data}, format prompt, 6 rows",
        r"dataset: 5 samples, \d+ tokens, \d+ targets",
        r"dataset: 2 rows cut at max_seq_len, 1 skipped without a target",
        r"dataset: assistant turns end with <\|im_end\|>",
        rf"a step: \d+ tokens, {targets} of them targets, in 2 micro-batches of 1",
        r"the run: 2 epochs of 3 steps",
    ):
        assert re.search(wanted, facts), wanted
    assert lines[-1] == str(output / "final")


def test_the_default_folder_is_new_even_in_the_same_second(
    models, chats, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20300101-000000")
    words = basics(models["untied"], chats, max_steps_per_epoch=1)
    found = []
    for _ in range(2):
        assert tune("run", RECIPE, *words) == 0
        found.append(capsys.readouterr().out.splitlines()[-1])
    assert found == ["runs/run-20300101-000000/final", "runs/run-20300101-000000-2/final"]
    assert all((tmp_path / path / "config.json").is_file() for path in found)


def test_the_last_steps_and_the_best_are_kept(models, chats, tmp_path) -> None:
    """Gradient ascent makes the first step the best."""
    keys = {
        "optimizer.maximize": True,
        "val_fraction": 0.2,
        "save_every_n_steps": 1,
        "max_steps_per_epoch": 5,
        "keep_last_n_checkpoints": 2,
    }
    output = run(models["untied"], chats, tmp_path / "run", **keys)
    assert (output / "best").read_text() == "step_1\n"
    assert (output / "latest").read_text() == "step_5\n"
    assert sorted(p.name for p in output.glob("step_*")) == ["step_1", "step_4", "step_5"]
    assert differing(output / "step_5", output / "final") == []


# --- steps, data, validation ------------------------------------------------------------------


def test_a_data_set_smaller_than_one_step_trains(models, tmp_path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    keys = {"batch_size": 4, "gradient_accumulation_steps": 8, "max_steps_per_epoch": None}
    output = run(models["untied"], data, tmp_path / "run", **keys)
    (row,) = metrics(output)
    assert row["num_targets"] == 2, "b and its terminator"
    assert differing(models["untied"], output / "final") != []


def test_the_last_partial_group_is_stepped_with_its_own_count(models, chats, tmp_path) -> None:
    """At a rate of 0 every micro-batch can be compared with a step of its own."""
    keys = {
        "optimizer.lr": 0.0,
        "clip_grad_norm": 1e9,
        "dataset.packed": False,
        "dataset.max_rows": 5,
        "max_steps_per_epoch": None,
    }
    single = metrics(run(models["untied"], chats, tmp_path / "single", **keys))
    keys["gradient_accumulation_steps"] = 2
    paired = metrics(run(models["untied"], chats, tmp_path / "paired", **keys))
    assert [len(single), len(paired)] == [5, 3]
    counts = [row["num_targets"] for row in single]
    assert counts[0] == max(counts) > min(counts), "the longest comes first"
    for row, pair in zip(paired, (single[:2], single[2:4], single[4:]), strict=True):
        targets = sum(part["num_targets"] for part in pair)
        loss = sum(part["loss"] * part["num_targets"] for part in pair) / targets
        assert row["num_targets"] == targets
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert paired[2]["grad_norm"] == pytest.approx(single[4]["grad_norm"], rel=1e-5)


def test_validation_leaves_the_run_as_it_is(models, chats, tmp_path) -> None:
    keys = {"gradient_accumulation_steps": 2, "epochs": 2, "clip_grad_norm": 1.0}
    without = run(models["tied"], chats, tmp_path / "without", **keys)
    keys |= {"dataset_val": chats, "run_val_every_n_steps": 1}
    validated = run(models["tied"], chats, tmp_path / "validated", **keys)
    assert differing(without / "final", validated / "final") == []
    ends = [folder / "step_6" / "training_state" for folder in (without, validated)]
    generators = [json.loads((end / "state.json").read_text())["generators"] for end in ends]
    assert generators[0] == generators[1]
    assert len({(end / "optimizer.safetensors").read_bytes() for end in ends}) == 1
    rows = untimed(validated)
    assert [row for row in rows if "loss" in row] == untimed(without)
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 1, 2, 3, 4, 5, 6]


def test_validation_is_one_mean_over_all_targets(models, chats, tmp_path) -> None:
    """At a rate of 0, the mean of the training losses by their targets."""
    keys = {"optimizer.lr": 0.0, "max_steps_per_epoch": None, "dataset_val": chats, "batch_size": 3}
    before, *steps = metrics(run(models["untied"], chats, tmp_path / "run", **keys))[:-1]
    targets = sum(row["num_targets"] for row in steps)
    mean = sum(row["loss"] * row["num_targets"] for row in steps) / targets
    assert before["val_loss"] == pytest.approx(mean, rel=1e-5)


# --- signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stopped_where_validation_is_due_goes_on_as_if_it_had_not(
    models, chats, tmp_path, capsys, monkeypatch, number: signal.Signals
) -> None:
    keys = {"val_fraction": 0.2, "run_val_every_n_steps": 2, "save_every_n_steps": 2}
    keys |= {"max_steps_per_epoch": 4, "optimizer.maximize": True}
    whole = run(models["untied"], chats, tmp_path / "whole", **keys)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        signal_at(patch, 2, number)
        stopped = run(models["untied"], chats, tmp_path / "stopped", 128 + number, **keys)
    last = capsys.readouterr().out.splitlines()[-1]
    told = f"stopped by {number.name}; go on with: tune "
    assert last.startswith(told)
    assert not (stopped / "final").exists()
    assert tune(*shlex.split(last.removeprefix(told))) == 0
    assert differing(whole / "final", stopped / "final") == []
    assert untimed(stopped) == untimed(whole)
    assert (stopped / "best").read_text() == (whole / "best").read_text() == "step_2\n"


def test_a_second_ctrl_c_ends_the_run_without_saving(
    models, chats, tmp_path, capsys, monkeypatch
) -> None:
    output = tmp_path / "run"
    keys = {"save_every_n_steps": 1, "val_fraction": 0.2}
    words = basics(models["untied"], chats, output_dir=output, **keys)
    with monkeypatch.context() as patch:
        signal_at(patch, 1, signal.SIGINT, signal.SIGINT)
        assert tune("run", RECIPE, *words) == 130
    assert "stopped" in capsys.readouterr().err
    assert not list(output.glob("*step_*"))
    # Nothing was saved, so the run begins again, with its first validation too.
    assert tune("run", RECIPE, *words, "resume_from_checkpoint=True") == 0
    assert "no step is saved yet, starting at the beginning" in capsys.readouterr().out
    assert [row["step"] for row in metrics(output)] == [0, 1, 1, 2, 2, 3, 3]

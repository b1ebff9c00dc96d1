"""What a run writes: its folder, metrics.jsonl, run.json."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from solotune.data import Batch
from solotune.errors import ConfigError
from solotune.training import RunLog, peak_bytes, pick_output_dir
from tests.models.tiny import make_batch


def pick(output_dir: Path | None, **changes: Any) -> Path:
    """Return what `pick_output_dir` does for a new run; `changes` win."""
    keys: dict[str, Any] = {"config": None, "resume": False, "overwrite": False, **changes}
    return pick_output_dir(None if output_dir is None else str(output_dir), **keys)


def test_the_default_folder_is_named_for_config_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (pick(None, config="smollm2/135M_full.yaml") for _ in range(2))
    assert re.fullmatch(r"runs/smollm2-135M_full-\d{8}-\d{6}", str(first))
    assert first != second
    assert first.is_dir()
    assert second.is_dir()
    assert re.fullmatch(r"runs/run-\d{8}-\d{6}", str(pick(None)))


def test_a_folder_that_holds_something_is_refused_unless_overwritten_or_resumed(
    tmp_path: Path,
) -> None:
    assert pick(tmp_path / "new/deep").is_dir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty.*resume_from.*overwrite=True"):
        pick(tmp_path)
    for allowed in ("resume", "overwrite"):
        assert pick(tmp_path, **{allowed: True}) == tmp_path
        assert (tmp_path / "notes.txt").read_text() == "mine"


def test_resuming_goes_on_in_the_run_folder_that_was_named(tmp_path: Path) -> None:
    step = tmp_path / "step_20"
    step.mkdir()
    for named in (step, tmp_path):
        assert pick(None, resume=str(named)) == tmp_path
    other = tmp_path / "other"
    assert pick(other, resume=str(step)) == other
    with pytest.raises(ConfigError, match="resume_from_checkpoint=True needs output_dir"):
        pick(None, resume=True)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"output_dir={file}/run cannot be written"):
        pick(file / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_forbidden_folder_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match=r"cannot be written.*Permission denied"):
            pick(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def run_log(folder: Path, **keys: Any) -> RunLog:
    return RunLog(folder, device=torch.device("cpu"), **keys)


def batch(tokens: int = 100) -> Batch:
    """Return a micro-batch of one row, with a target at every position but the last."""
    return make_batch((tokens,))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(log: RunLog, first: int, last: int, *, total: int) -> None:
    with log.running(total, first_step=first - 1):
        for step in range(first, last + 1):
            log.step(step, [batch()], loss=1 / step, lr=1e-3, grad_norm=None)


def test_resuming_drops_the_lines_that_are_made_again_and_a_line_cut_by_a_kill(
    tmp_path: Path,
) -> None:
    steps(run_log(tmp_path, config_yaml="a: 1\n"), 1, 5, total=8)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')
    log = run_log(tmp_path, config_yaml="a: 2\n", first_step=3)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    steps(log, 4, 8, total=8)
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 9))
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    steps(run_log(tmp_path, config_yaml=""), 1, 3, total=3)
    run_log(tmp_path, config_yaml="")
    assert rows_of(tmp_path) == []


def test_every_n_steps_are_written_and_the_last_one_always(tmp_path: Path) -> None:
    steps(run_log(tmp_path, config_yaml="", every=4), 1, 10, total=10)
    assert [row["step"] for row in rows_of(tmp_path)] == [4, 8, 10]


def test_a_step_that_is_not_finite_is_always_written(tmp_path: Path) -> None:
    log = run_log(tmp_path, config_yaml="", every=4)
    with log.running(8, first_step=0):
        for step, loss in enumerate([1.0, math.inf, 1.0, 1.0], start=1):
            log.step(step, [batch()], loss=loss, lr=1e-3)
    assert [(row["step"], row["loss"]) for row in rows_of(tmp_path)] == [(2, None), (4, 1.0)]


def test_a_row_holds_what_was_measured_and_no_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solotune.training.run_log.peak_bytes", lambda device: 3 * 2**29)
    log = run_log(tmp_path, config_yaml="")
    with log.running(2, first_step=0):
        log.step(1, [batch(), batch()], loss=0.5, lr=1e-3, grad_norm=2.0)
        log.write({"step": 1, "val_loss": 0.25})
        log.step(2, [batch()], loss=float("nan"), lr=1e-3, grad_norm=None)
    first, validation, second = rows_of(tmp_path)
    assert (first["loss"], first["grad_norm"], first["peak_memory_gib"]) == (0.5, 2.0, 1.5)
    assert first["num_targets"] == 198
    assert first["tokens_per_second"] > 0
    assert validation == {"step": 1, "val_loss": 0.25}
    assert second["loss"] is None
    assert "grad_norm" not in second
    assert "step 1/2  loss 0.5000" in capsys.readouterr().out


def test_validation_and_saves_do_not_count_in_tokens_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 90.0, 100.0, 100.0])
    monkeypatch.setattr("solotune.training.run_log.time.perf_counter", lambda: next(clock))
    log = run_log(tmp_path, config_yaml="")
    with log.running(1, first_step=0):  # begins at 0
        with log.uncounted():  # from 10 to 90
            pass
        log.step(1, [batch()], loss=1.0, lr=1e-3)  # at 100
    (row,) = rows_of(tmp_path)
    assert row["seconds_per_step"] == pytest.approx(20)
    assert row["tokens_per_second"] == pytest.approx(5)


def test_a_step_without_a_target_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_log(tmp_path, config_yaml="")
    with log.running(1, first_step=0):
        log.step(1, [batch(tokens=1)], loss=0.0, lr=1e-3)
    assert "step 1 has no target and changed nothing" in capsys.readouterr().out


def test_the_file_save_now_is_a_wish_that_is_heard_once(tmp_path: Path) -> None:
    log = run_log(tmp_path, config_yaml="")
    assert not log.save_is_wanted()
    (tmp_path / "save_now").touch()
    assert log.save_is_wanted()
    assert not log.save_is_wanted()


def test_run_json_names_versions_device_and_data(tmp_path: Path) -> None:
    run_log(tmp_path, config_yaml="").write_run(data="abc")
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["versions"]["torch"] == torch.__version__
    assert run["device"] == "cpu"
    assert run["data"] == "abc"


def test_the_peak_is_that_of_the_whole_run() -> None:
    before = peak_bytes(torch.device("cpu"))
    ballast = torch.ones(2**25)
    assert peak_bytes(torch.device("cpu")) >= before
    assert peak_bytes(torch.device("cpu")) > ballast.nbytes

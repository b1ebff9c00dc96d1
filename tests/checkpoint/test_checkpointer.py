"""Step folders: which ones are kept, and that a kill or a full disk never costs the newest one."""

import errno
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from solotune.checkpoint import Checkpointer, load_weights, model_folder
from solotune.checkpoint import checkpointer as checkpointer_module
from solotune.errors import CheckpointError
from solotune.tokenizers import Tokenizer
from solotune.tokenizers import auto as auto_tokenizer

from .conftest import build

Make = Callable[..., Path]


class Run:
    """A model whose every weight tells at which step it was saved."""

    def __init__(self, folder: Path, output_dir: Path, *, keep_last: int = 2) -> None:
        self.checkpointer = Checkpointer(folder, output_dir, keep_last=keep_last)
        self.model = build(folder)
        self.checkpointer.load_weights(self.model, device="cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.tokenizer: Tokenizer = auto_tokenizer(folder)

    def save(self, step: int, *, best: bool = False, mark: float | None = None) -> Path:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step if mark is None else mark)
                self.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        return self.checkpointer.save(
            step,
            model=self.model,
            optimizer=self.optimizer,
            progress={"step": step},
            dtype=torch.bfloat16,
            tokenizer=self.tokenizer,
            best=best,
        )


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def mark_of(folder: Path) -> float:
    """Read the whole folder as a user would; return the value that all its weights have."""
    model = build(folder)
    load_weights(model, folder, device="cpu")
    auto_tokenizer(folder)
    values = {bound.item() for p in model.parameters() for bound in p.detach().aminmax()}
    (value,) = values
    return value


def listing(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def test_newest_folders_are_kept_and_the_best_besides(make_folder: Make, output_dir: Path) -> None:
    run = Run(make_folder(), output_dir, keep_last=2)
    for step in (2, 4, 6, 8, 10):
        run.save(step, best=step == 4)
    assert listing(output_dir) == ["best", "latest", "step_10", "step_4", "step_8"]
    assert (output_dir / "latest").read_text() == "step_10\n"
    assert (output_dir / "best").read_text() == "step_4\n"
    assert mark_of(output_dir / "step_4") == 4


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_keep_last_counts_step_folders(
    make_folder: Make, output_dir: Path, keep_last: int, kept: list[int]
) -> None:
    run = Run(make_folder(), output_dir, keep_last=keep_last)
    for step in range(1, 6):
        run.save(step)
    assert listing(output_dir) == ["latest", *(f"step_{step}" for step in kept)]


def test_a_best_folder_that_was_moved_away_does_not_stop_the_run(
    make_folder: Make, output_dir: Path, tmp_path: Path
) -> None:
    run = Run(make_folder(), output_dir)
    run.save(1, best=True).rename(tmp_path / "treasure")
    run.save(2)
    assert mark_of(model_folder(output_dir)) == 2


def test_training_state_is_in_the_newest_folder_only(make_folder: Make, output_dir: Path) -> None:
    run = Run(make_folder(), output_dir, keep_last=3)
    for step in (1, 2, 3):
        run.save(step, best=step == 1)
    assert [path.parent.name for path in output_dir.glob("step_*/training_state")] == ["step_3"]
    with pytest.raises(CheckpointError, match=r"step_2 has no training_state: only the newest"):
        run.checkpointer.find_resume(output_dir / "step_2")


def test_a_run_folder_stands_for_its_latest_step(make_folder: Make, output_dir: Path) -> None:
    run = Run(make_folder(), output_dir)
    run.save(1)
    run.save(2)
    assert model_folder(output_dir) == output_dir / "step_2"
    assert Checkpointer(output_dir, output_dir / "next").checkpoint_dir == output_dir / "step_2"
    assert run.checkpointer.find_resume(str(output_dir)) == output_dir / "step_2"
    (output_dir / "latest").write_text("../model")
    with pytest.raises(
        CheckpointError, match=r"latest names '\.\./model', which is no step folder"
    ):
        model_folder(output_dir)


def test_resume_finds_nothing_where_nothing_was_saved(make_folder: Make, output_dir: Path) -> None:
    checkpointer = Checkpointer(make_folder(), output_dir)
    assert checkpointer.find_resume(True) is None
    assert checkpointer.find_resume(False) is None
    assert checkpointer.find_resume(None) is None
    with pytest.raises(CheckpointError, match=r"step_7 does not exist"):
        checkpointer.find_resume(output_dir / "step_7")


def test_the_same_step_can_be_saved_again(make_folder: Make, output_dir: Path) -> None:
    run = Run(make_folder(), output_dir)
    run.save(3)
    run.save(3, mark=5)
    assert mark_of(model_folder(output_dir)) == 5
    assert listing(output_dir) == ["latest", "step_3"]


def test_going_back_leaves_later_steps_until_they_are_written_again(
    make_folder: Make, output_dir: Path
) -> None:
    run = Run(make_folder(), output_dir, keep_last=1)
    run.save(9)
    run.save(4, mark=40)
    assert listing(output_dir) == ["latest", "step_4", "step_9"]
    assert mark_of(model_folder(output_dir)) == 40
    run.save(9, mark=90)
    assert listing(output_dir) == ["latest", "step_9"]
    assert mark_of(model_folder(output_dir)) == 90


def test_final_is_a_real_folder_with_the_last_weights(make_folder: Make, output_dir: Path) -> None:
    run = Run(make_folder(), output_dir)
    run.save(1)
    run.save(2)
    final = run.checkpointer.finish()
    assert final == output_dir / "final"
    assert mark_of(final) == 2
    assert not (final / "training_state").exists()
    step = output_dir / "step_2"
    assert (final / "model.safetensors").samefile(step / "model.safetensors")
    assert not (final / "config.json").samefile(step / "config.json")
    run.save(3)
    assert mark_of(run.checkpointer.finish()) == 3


def test_final_is_a_copy_where_there_are_no_hard_links(
    make_folder: Make, output_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    run = Run(make_folder(), output_dir)
    run.save(1)
    monkeypatch.setattr(os, "link", refuse)
    assert mark_of(run.checkpointer.finish()) == 1


def test_too_little_space_is_said_before_anything_is_written(
    make_folder: Make, output_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make_folder(), output_dir)
    run.save(1)
    usage = shutil.disk_usage(output_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(CheckpointError, match=r"saving step 2 needs 0\.03 GiB and .* 0\.00 GiB"):
        run.save(2)
    assert listing(output_dir) == ["latest", "step_1"]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", ["weights", "optimizer state"])
def test_a_write_that_fails_leaves_the_last_checkpoint(
    make_folder: Make, output_dir: Path, where: str
) -> None:
    run = Run(make_folder(), output_dir)
    weights_bytes = (run.save(1) / "model.safetensors").stat().st_size
    limit = weights_bytes + (-8 if where == "weights" else 8)
    with (
        file_size_limit(limit),
        pytest.raises(CheckpointError, match=r"cannot write .*step_2: File too large"),
    ):
        run.save(2)
    assert listing(output_dir) == ["latest", "step_1"]
    assert mark_of(model_folder(output_dir)) == 1
    run.save(2)
    assert mark_of(model_folder(output_dir)) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_any_system_error_is_one_sentence(
    make_folder: Make, output_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    run = Run(make_folder(), output_dir)
    run.save(1)
    monkeypatch.setattr(checkpointer_module, "write_json", fail)
    with pytest.raises(CheckpointError, match=f"cannot write .*: {os.strerror(number)}"):
        run.save(2)
    assert listing(output_dir) == ["latest", "step_1"]


FILE_EVENTS = (
    *("open", "os.rename", "os.remove", "os.rmdir"),
    *("os.mkdir", "os.link", "os.truncate", "shutil.rmtree"),
)


def survives_a_kill_at_every_moment(
    run: Run, output_dir: Path, act: Callable[[], object], check: Callable[[], None]
) -> int:
    """Run `act` in a child that dies at its n-th file operation, for every n; return how many.

    `output_dir` is set back before each, and `check` looks at what is left.
    """
    before = output_dir.with_name("before")
    shutil.copytree(output_dir, before)
    for moment in range(1, 10_000):
        shutil.rmtree(output_dir)
        shutil.copytree(before, output_dir)
        child = os.fork()
        if child == 0:
            moments = iter([None] * (moment - 1))

            def die(event: str, _: object, moments: Iterator[None] = moments) -> None:
                if event in FILE_EVENTS and next(moments, "now") == "now":
                    os._exit(9)

            sys.addaudithook(die)
            act()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check()
        if os.waitstatus_to_exitcode(status) == 0:
            return moment
    raise AssertionError("the child never finished")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("step", [3, 2], ids=["next step", "same step again"])
def test_newest_checkpoint_is_whole_whenever_a_save_is_killed(
    make_folder: Make, output_dir: Path, step: int
) -> None:
    torch.set_num_threads(1)  # a forked child has no other threads
    folder = make_folder(num_hidden_layers=1)
    run = Run(folder, output_dir, keep_last=1)
    run.save(1, best=True)
    run.save(2)
    seen = set()

    def check() -> None:
        for pointer in ("latest", "best"):
            name = (output_dir / pointer).read_text().strip()
            assert name in ("step_1", "step_2", "step_3")
        # Before anything is repaired, as `generate` would find it ...
        mark = mark_of(model_folder(output_dir))
        # ... and as the resumed run does.
        checkpointer = Checkpointer(folder, output_dir)
        resume = checkpointer.find_resume(True)
        assert resume is not None
        assert resume.parent == output_dir
        assert mark_of(resume) == mark
        checkpointer.load_training_state(resume, run.model, run.optimizer)
        assert mark_of(output_dir / (output_dir / "best").read_text().strip()) in (1, 70)
        assert not [name for name in listing(output_dir) if name.startswith(".")]
        for whole in output_dir.glob("step_*"):
            mark_of(whole)
        seen.add(mark)

    moments = survives_a_kill_at_every_moment(
        run, output_dir, lambda: run.save(step, mark=70, best=step == 3), check
    )
    assert moments > 30
    assert seen == {2, 70}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_final_is_whole_or_absent_whenever_finish_is_killed(
    make_folder: Make, output_dir: Path
) -> None:
    torch.set_num_threads(1)
    folder = make_folder(num_hidden_layers=1)
    run = Run(folder, output_dir)
    run.save(1)
    run.checkpointer.finish()
    run.save(2)

    def check() -> None:
        Checkpointer(folder, output_dir)
        assert mark_of(output_dir / "final") in (1, 2)

    assert survives_a_kill_at_every_moment(run, output_dir, run.checkpointer.finish, check) > 10


def test_leftovers_of_a_killed_run_are_removed(make_folder: Make, output_dir: Path) -> None:
    folder = make_folder()
    Run(folder, output_dir).save(1)
    (output_dir / ".writing-step_2" / "training_state").mkdir(parents=True)
    (output_dir / ".writing-latest").write_text("step_")
    (output_dir / ".removing-training_state").mkdir()
    (output_dir / ".mine-keep").write_text("a user's own file")
    Checkpointer(folder, output_dir)
    assert listing(output_dir) == [".mine-keep", "latest", "step_1"]


def test_resume_survives_that_the_run_folder_was_moved(
    make_folder: Make, output_dir: Path, tmp_path: Path
) -> None:
    folder = make_folder()
    Run(folder, output_dir).save(1)
    moved = output_dir.rename(tmp_path / "elsewhere")
    assert Checkpointer(folder, moved).find_resume(True) == moved / "step_1"
    assert json.loads((moved / "step_1" / "config.json").read_text())["x_note"] == 1

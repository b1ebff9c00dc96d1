"""Runs that are killed, and runs that cannot write, lose nothing."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from solotune.checkpoint import model_folder

from .conftest import TRAINING, basics, differing, metrics, names, tune, weights

KEYS = {
    "dtype": "bf16",
    "optimizer": "solotune.optim.AdamWKahan",
    "epochs": 3,
    "max_steps_per_epoch": None,
    "gradient_accumulation_steps": 2,
    "save_every_n_steps": 1,
    "val_fraction": 0.2,
    "clip_grad_norm": 1.0,
}
MODES = {
    "plain": {},
    "state on disk": {
        "optimizer_state": "disk",
        "optimizer_in_bwd": True,
        "clip_grad_norm": None,
        "save_every_n_steps": 3,
    },
}
# Kills inside the optimizer phase, before it, and at every kind of step of a save.
PLANNED = [
    ("optimizer", 5),
    ("optimizer", 30),
    ("read", 4),
    ("tensor", 3),
    ("tensor", 40),
    ("rename", 1),
    ("rename", 2),
    ("replace", 1),
    ("replace", 2),
    ("fsync", 2),
    ("fsync", 7),
    ("folder", 1),
]


class Launcher:
    """`tune run` in forked children of a process that has torch imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("launcher.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, words: list[str], log: Path, die: tuple[str, float] | None = None) -> None:
        job = {"words": words, "log": str(log), "die": die}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Return the exit code of the child, negative for a signal."""
        assert self._process.stdout
        return os.waitstatus_to_exitcode(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))
def test_killed_at_planned_and_random_moments_and_resumed_is_bit_equal(
    launcher: Launcher, models, chats, recipe, mode, tmp_path
) -> None:
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    words = [
        "run",
        str(recipe),
        *basics(models["tied"], chats, recipe=recipe, **KEYS | MODES[mode]),
    ]
    started = time.monotonic()
    launcher.start([*words, f"output_dir={whole}"], log)
    assert launcher.wait() == 0, log.read_text()
    seconds = time.monotonic() - started
    assert max(row["step"] for row in metrics(whole)) >= 9

    words += [f"output_dir={killed}", "resume_from_checkpoint=True"]
    draw = random.Random(0)
    moments = draw.sample(PLANNED, len(PLANNED))
    kills = 0
    while moments or kills < 20:
        moment = moments.pop() if moments else ("seconds", draw.uniform(0.05, 0.9) * seconds)
        launcher.start(words, log, die=moment)
        code = launcher.wait()
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), log.read_text()
        if (killed / "latest").exists():
            assert weights(model_folder(killed)), "the newest checkpoint is readable"
        if code == 0:  # done before the kill came: begin again
            assert differing(whole / "final", killed / "final") == []
            shutil.rmtree(killed)
    launcher.start(words, log)
    assert launcher.wait() == 0, log.read_text()
    assert differing(whole / "final", killed / "final") == []


@pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))
def test_a_full_disk_keeps_the_last_checkpoint_and_says_so_in_a_sentence(
    launcher: Launcher, models, chats, recipe, tmp_path, capsys
) -> None:
    """A limit on the file size stands for the full disk: the save after the first one fails."""
    output = tmp_path / "run"
    words = [
        "run",
        str(recipe),
        *basics(models["tied"], chats, recipe=recipe, **KEYS),
        f"output_dir={output}",
    ]
    assert tune(*words, "epochs=1", "max_steps_per_epoch=1") == 0
    before = weights(output / "step_1")
    largest = max(path.stat().st_size for path in (output / "step_1").rglob("*.safetensors"))
    capsys.readouterr()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, limits[1]))
    try:
        code = tune(*words, "resume_from_checkpoint=True")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    error = capsys.readouterr().err
    assert code == 1
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert (output / "latest").read_text().strip() == "step_1"
    assert weights(output / "step_1").keys() == before.keys()
    assert sorted(path.name for path in output.glob("*step*")) == ["step_1"]
    assert tune(*words, "resume_from_checkpoint=True") == 0

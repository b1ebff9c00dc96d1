"""Training recipes in sweeps: by `tune sweep`, and in a loop of the shell."""

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from solotune.config import read_schema

from .conftest import TRAINING, basics, differing, names, tune, weights

each_training = pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))


def words_of(recipe: Path, model: Path, chats: Path, **changes: Any) -> list[str]:
    """Return the overrides of a short run, without the keys that are swept."""
    swept = [axis.partition("=")[0] for axis in axes_of(recipe)]
    words = basics(model, chats, recipe=recipe, **changes)
    return [word for word in words if word.partition("=")[0] not in swept]


def axes_of(recipe: Path) -> list[str]:
    """Return two values of the rate, and of an adapter's rank."""
    ranks = ["adapter.rank=2,4"] if "adapter" in read_schema(recipe) else []
    return ["optimizer.lr=1e-3,1e-2", *ranks]


@each_training
def test_a_recipe_is_swept(models, chats, tmp_path: Path, recipe: Path, capsys) -> None:
    words = words_of(recipe, models["tied"], chats, val_fraction=0.3)
    words.append(f"output_dir={tmp_path / 'sweep'}")
    axes = axes_of(recipe)
    assert tune("sweep", recipe, *words, *axes) == 0
    with (tmp_path / "sweep/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 2 ** len(axes)
    assert all(row["steps"] == "3" and float(row["peak_memory_gib"]) > 0 for row in rows)
    assert len({row["val_loss"] for row in rows}) == len(rows)
    for row in rows:
        assert weights(tmp_path / "sweep" / row["folder"] / "final")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "sweep")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_in_its_sweep_as_if_it_had_not(
    models, chats, tmp_path: Path
) -> None:
    recipe, output = TRAINING[0], tmp_path / "sweep"
    changes = {"epochs": 4, "max_steps_per_epoch": None, "save_every_n_steps": 1}
    words = words_of(recipe, models["tied"], chats, **changes)
    sweep = ["sweep", str(recipe), *words, axes_of(recipe)[0], f"output_dir={output}"]
    command = [sys.executable, "-m", "solotune", *sweep]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    killed, saved = output / "lr=1e-3", output / "lr=1e-3" / "latest"
    while not saved.exists():
        time.sleep(0.02)
        assert process.poll() is None
    os.kill(int((output / ".lock").read_text()), signal.SIGKILL)
    assert process.wait() == 1
    assert not (killed / "final").exists()
    assert tune(*sweep, "resume_from_checkpoint=True") == 0
    whole = tmp_path / "whole"
    assert tune("run", recipe, *words, "optimizer.lr=1e-3", f"output_dir={whole}") == 0
    assert differing(whole / "final", killed / "final") == []


@pytest.mark.slow
@each_training
def test_a_loop_of_the_shell_has_folders_codes_and_last_lines(
    models, chats, tmp_path: Path, recipe: Path
) -> None:
    """Two runs at once, which start in the same second, then one that fails and ends the loop."""
    words = words_of(recipe, models["tied"], chats)
    words += ["adapter.rank=2"] if "adapter" in read_schema(recipe) else []
    run = shlex.join([sys.executable, "-m", "solotune", "run", str(recipe), *words])
    script = f"""
        {run} optimizer.lr=1e-3 > 1.log & first=$!
        {run} optimizer.lr=1e-2 > 2.log & second=$!
        wait $first || exit 7
        wait $second || exit 8
        for rate in -1 1e-3; do
            {run} optimizer.lr=$rate > 3.log || exit $?
        done
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    code = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment).returncode
    assert code == 1
    last = [(tmp_path / f"{n}.log").read_text().splitlines()[-1] for n in (1, 2)]
    assert last[0] != last[1]
    for path in last:
        assert weights(tmp_path / path)
    assert (tmp_path / "3.log").read_text() == ""
    assert len(list((tmp_path / "runs").iterdir())) == 2

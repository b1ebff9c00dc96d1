"""Training recipes in sweeps: by `tune sweep`, and in a loop of the shell."""

import csv
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from solotune.config import read_schema

from .conftest import TRAINING, basics, names, tune, weights

each_training = pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))


def words_of(recipe: Path, model: Path, chats: Path, **changes: object) -> list[str]:
    """Return the overrides of a short run, without the rate."""
    if "adapter" in read_schema(recipe):
        changes["adapter.rank"] = 4
    words = basics(model, chats, **changes)
    return [word for word in words if not word.startswith("optimizer.lr=")]


@each_training
def test_a_recipe_is_swept(models, chats, tmp_path: Path, recipe: Path, capsys) -> None:
    words = words_of(recipe, models["tied"], chats, val_fraction=0.3)
    words.append(f"output_dir={tmp_path / 'sweep'}")
    assert tune("sweep", recipe, *words, "optimizer.lr=1e-3,1e-2") == 0
    with (tmp_path / "sweep/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done", "done"]
    assert all(row["steps"] == "3" and float(row["peak_memory_gib"]) > 0 for row in rows)
    assert rows[0]["val_loss"] != rows[1]["val_loss"]
    for row in rows:
        assert weights(tmp_path / "sweep" / row["folder"] / "final")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "sweep")


@pytest.mark.slow
@each_training
def test_a_loop_of_the_shell_has_folders_codes_and_last_lines(
    models, chats, tmp_path: Path, recipe: Path
) -> None:
    """Two runs at once, which start in the same second, then one that fails and ends the loop."""
    words = words_of(recipe, models["tied"], chats)
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

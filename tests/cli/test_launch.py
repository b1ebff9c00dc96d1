"""Flags of torchrun: to torch's launcher for a recipe made for it, refused for any other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]

RECIPE = '''"""Prints its rank."""

import os
from dataclasses import dataclass

from solotune.config import run_recipe
from solotune.errors import UserError

DISTRIBUTED = {distributed}


@dataclass(kw_only=True)
class Config:
    word: str
    fail: bool = False


def main(cfg):
    words = (cfg.word, os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
    os.write(1, (" ".join(words) + "\\n").encode())  # at once: two processes share the pipe
    if cfg.fail:
        raise UserError("fail=True: change it")


if __name__ == "__main__":
    run_recipe(main, Config)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "many.py").write_text(RECIPE.format(distributed=True))
    (tmp_path / "one.py").write_text(RECIPE.format(distributed=False))
    (tmp_path / "mine.yaml").write_text("word: here\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "solotune", "run", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )


@pytest.mark.slow
def test_a_distributed_recipe_runs_once_a_process(folder: Path):
    done = tune("--nproc_per_node", "2", "--standalone", "many.py", "--config", "mine.yaml")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["here 0 of 2", "here 1 of 2"],
    ), done.stderr


@pytest.mark.slow
def test_the_failure_of_a_process_is_a_sentence(folder: Path):
    done = tune("--nproc-per-node=1", "many.py", "--config", "mine.yaml", "fail=True")
    assert done.returncode == 1
    assert "error: fail=True: change it" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the process of rank 0 ended with exit")


FLAGS = ("--nproc_per_node", "--nnodes", "--rdzv-endpoint", "--tee", "--log_dir")


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("recipe", ["one.py", "full_finetune_single_device"])
def test_a_flag_before_or_after_a_recipe_of_one_device_is_refused_by_name(
    folder: Path, flag: str, recipe: str, capsys: pytest.CaptureFixture
):
    for words in ([flag, "2", recipe], [f"{flag}=2", recipe], [recipe, flag, "2"], [flag, "2"]):
        assert main(["run", *words, "--config", "mine.yaml"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {flag} is a flag of torchrun: this recipe uses one device")


def test_mistakes_are_found_before_anything_is_launched(
    folder: Path, capsys: pytest.CaptureFixture
):
    run = ["run", "--nnodes", "1", "many.py", "--config", "mine.yaml"]
    assert main([*run, "--nproc_per_node=2"]) == 2
    assert "--nproc_per_node: flags of torchrun stand before" in capsys.readouterr().err
    assert main([*run, "wort=x"]) == 1
    assert capsys.readouterr().err == "error: wort: unknown key; did you mean word?\n"
    (folder / "none.py").write_text("DISTRIBUTED = True\n")
    assert main(["run", "--nnodes", "1", "none.py"]) == 1
    assert "a dataclass named Config" in capsys.readouterr().err

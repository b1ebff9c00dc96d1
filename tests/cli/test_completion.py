"""What the Tab key offers: asked of the command, and of real shells where they are installed."""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from solotune.cli.completion import FLAGS, candidates  # pyright: ignore[reportMissingImports]
from solotune.cli.main import VERBS, main  # pyright: ignore[reportMissingImports]
from solotune.config import configs, recipes

RUN = "tune run full_finetune_single_device"
SWEEP = "tune sweep full_finetune_single_device"
CONFIG = "smollm2/135M_full_single_device"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tune ", sorted(VERBS)),
        ("tune val", ["validate"]),
        ("/usr/bin/tune val", ["validate"]),
        ("tune run ", sorted(recipes())),
        ("tune run full_finetune_s", ["full_finetune_single_device"]),
        (f"{RUN} --config sm", [name for name in sorted(configs()) if name.startswith("sm")]),
        (f"{RUN} --config {CONFIG} max_st", ["max_steps_per_epoch="]),
        (f"{RUN} --config {CONFIG} optimizer.w", ["optimizer.weight_decay="]),
        (f"{RUN} compile=", ["compile=False", "compile=True"]),
        (f"{RUN} dtype=b", ["dtype=bf16"]),
        (f"{RUN} ac_option=", ["ac_option=op"]),
        (f"{RUN} seed=", []),
        (f"{RUN} --con", ["--config"]),
        (f"tune validate {CONFIG} dtype=f", ["dtype=fp32"]),
        ("tune sweep full_f", ["full_finetune_single_device"]),
        (f"{SWEEP} --config {CONFIG} optimizer.lr=1e-4,1e-5 max_st", ["max_steps_per_epoch="]),
        (f"{SWEEP} --ra", ["--random"]),
        ("tune cat full_finetune_s", ["full_finetune_single_device"]),
        ("tune cp mine", []),
        ("tune diff ", []),
        (f"tune diff mine.yaml {CONFIG[:14]}", [CONFIG]),
        ("tune completion ", ["bash", "fish", "zsh"]),
        ("tune run gone.py --config gone.yaml x", []),
        ("tune inspect ", ["data", "model"]),
        ("tune inspect data full_", ["full_finetune_single_device"]),
        (f"tune inspect data {CONFIG} dtype=f", ["dtype=fp32"]),
        ("tune inspect data --sam", ["--samples"]),
        ("tune nothing ", []),
    ],
)
def test_the_last_word_of_a_line_becomes(line: str, expected: list[str]):
    assert candidates(line) == expected


def test_a_copied_recipe_completes_its_own_keys(tmp_path: Path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("class Config:\n    my_key: int = 1\n")
    assert candidates(f"tune run {recipe} my") == ["my_key="]
    recipe.write_text("class Config:\n    my_key: int = (")  # not written to its end
    assert candidates(f"tune run {recipe} my") == []


def test_each_flag_that_is_offered_exists(capsys: pytest.CaptureFixture):
    for verb, flags in FLAGS.items():
        with suppress(SystemExit):  # argparse ends the process
            main([*verb.split(), "--help"])
        out = capsys.readouterr().out
        assert [flag for flag in flags if flag not in out] == []


def test_completing_imports_no_torch():
    code = (
        "import sys; from solotune.cli.main import main;"
        f"main(['completion', '--line', '{RUN} --config {CONFIG} opt']);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert "optimizer.lr=" in done.stdout


def test_a_shell_has_to_be_named(capsys: pytest.CaptureFixture):
    assert main(["completion"]) == 2
    assert "name a shell: bash, zsh, fish" in capsys.readouterr().err
    assert main(["completion", "csh"]) == 2


BASH = """
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(tune)
_tune 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
SHELLS = {"bash": BASH, "fish": "complete -C '{line}'"}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"), [("tune va", "validate"), (f"{RUN} dtype=b", "dtype=bf16")]
)
def test_the_script_works_in_its_shell(
    shell: str, line: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    tune = tmp_path / "tune"
    tune.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m solotune "$@"\n')
    tune.chmod(0o755)
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out + SHELLS[shell].format(line=line)
    done = subprocess.run(
        [shell, "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    if shell == "bash":  # it has split the word at `=`
        expected = expected.rpartition("=")[2]
    assert done.stdout.split() == [expected], done.stderr

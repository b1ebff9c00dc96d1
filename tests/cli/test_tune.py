"""The `tune` command as a person calls it: in its own process."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from solotune.config import configs, recipes

RECIPE = '''"""Prints what it was given."""

from dataclasses import dataclass

from solotune.config import Component, run_recipe
from solotune.errors import UserError


@dataclass(kw_only=True)
class Config:
    optimizer: Component
    output_dir: str
    fail: str | None = None  # how


def validate(cfg):
    if cfg.fail == "validate":
        raise UserError("fail=validate: change it")


def main(cfg):
    validate(cfg)
    if cfg.fail == "interrupt":
        raise KeyboardInterrupt
    if cfg.fail == "memory":
        raise MemoryError
    if cfg.fail == "device":
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory.")
    if cfg.fail == "missing":
        open(cfg.output_dir)
    if cfg.fail == "space":
        raise OSError(28, "No space left on device", cfg.output_dir)
    if cfg.fail == "windows":
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried ...")
    if cfg.fail == "noise":
        import logging
        logging.getLogger("torchao").warning("Failed to load x.so")
    if cfg.fail == "bug":
        raise AssertionError("a bug")
    if cfg.fail == "arrow":
        print("\u2192")
    print("ran", cfg.output_dir, cfg._origin.recipe, cfg._origin.config)


if __name__ == "__main__":
    run_recipe(main, Config)
'''
YAML = "recipe: mine.py\noptimizer: torch.optim.SGD\noutput_dir: out\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "mine.yaml").write_text(YAML)
    return tmp_path


def tune(*words: str | Path, cwd: Path, command=("-m", "solotune"), **environment: str):
    done = subprocess.run(
        [sys.executable, *command, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_recipe_runs_by_relative_and_absolute_path(folder: Path, tmp_path_factory):
    code, out, _ = tune("run", "mine.py", "--config", "mine.yaml", "output_dir=x", cwd=folder)
    assert (code, out) == (0, f"ran x {folder / 'mine.py'} mine.yaml\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    words = ("run", folder / "mine.py", "--config", folder / "mine.yaml")
    assert tune(*words, cwd=elsewhere)[:2] == (
        0,
        f"ran out {folder / 'mine.py'} {folder / 'mine.yaml'}\n",
    )


def test_options_may_stand_anywhere(folder: Path):
    words = ("run", "output_dir=x", "--config", "mine.yaml")
    assert tune(*words, cwd=folder)[0] == 2, "the recipe comes first"
    words = ("run", "mine.py", "output_dir=x", "--config", "mine.yaml", "~fail")
    code, _, err = tune(*words, cwd=folder)
    assert (code, "no fail" in err) == (1, True)


def test_a_recipe_file_runs_directly(folder: Path):
    direct = {"cwd": folder, "command": (str(folder / "mine.py"),)}
    code, out, _ = tune("--config", "mine.yaml", "output_dir=x", **direct)
    assert (code, out.split()[:2]) == (0, ["ran", "x"])
    code, _, err = tune("--config", "mine.yaml", "outputdir=x", **direct)
    assert (code, err) == (1, "error: outputdir: unknown key; did you mean output_dir?\n")
    assert tune("--lr", "3", **direct)[0] == 2


SCRIPT_RUNS = """
import runpy, sys
for words in {runs!r}:
    sys.argv = ["mine.py", "--config", "mine.yaml", *words]
    try:
        runpy.run_path("mine.py", run_name="__main__")
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_a_recipe_file_that_runs_directly_ends_as_the_command_does(folder: Path):
    ends = {
        "validate": ("error: fail=validate: change it", 1),
        "memory": ("error: the host memory is used up", 1),
        "windows": ("error: the host memory is used up", 1),
        "device": ("error: the device memory is used up", 1),
        "missing": ("error: out: no such file or folder", 1),
        "space": ("error: out: no space left on the disk", 1),
        "interrupt": ("stopped", 130),
    }
    runs = [[f"fail={how}"] for how in ends]
    _, _, err = tune(cwd=folder, command=("-c", SCRIPT_RUNS.format(runs=runs)))
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 2 * len(ends), err
    for (message, code), line, end in zip(ends.values(), lines[::2], lines[1::2], strict=True):
        assert line.startswith(message)
        assert end == str(code)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["fail=validate"], 1, "error: fail=validate: change it"),
        (["fail=interrupt"], 130, "stopped"),
        (["fail=memory"], 1, "error: the host memory is used up"),
        (["fail=windows"], 1, "error: the host memory is used up"),
        (["fail=device"], 1, "error: the device memory is used up"),
        (["fail=missing", "output_dir=gone"], 1, "error: gone: no such file or folder"),
        (["fail=space", "output_dir=full"], 1, "error: full: no space left on the disk"),
        (["outputdir=x"], 1, "error: outputdir: unknown key; did you mean output_dir?"),
        (["optimizer.lrr=1"], 1, "did you mean optimizer.lr?"),
        (["--lr", "1e-5"], 2, "error: unrecognized arguments: --lr"),
        (["lr", "1e-5"], 2, "error: lr: an override is key=value"),
        (["=5"], 2, "error: =5:"),
        (["a..b=1"], 2, "error: a..b=1:"),
        (["--nproc_per_node", "2"], 2, "error: --nproc_per_node is a flag of torchrun"),
        (["--nnodes=2"], 2, "error: --nnodes is a flag of torchrun"),
        (["--master-port", "1"], 2, "error: --master-port is a flag of torchrun"),
        (["--con", "x"], 2, "error: unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(folder: Path, words, code, message):
    found, _, err = tune("run", "mine.py", "--config", "mine.yaml", *words, cwd=folder)
    assert found == code
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(folder: Path):
    words = ("run", "mine.py", "--config", "mine.yaml", "outputdir=x", "--debug")
    code, _, err = tune(*words, cwd=folder)
    assert code == 1
    assert "Traceback" in err


def test_a_fault_that_the_recipe_finds_is_located_where_the_file_sets_the_key(folder: Path):
    (folder / "mine.yaml").write_text(YAML + "fail: validate\n")
    run = ("run", "mine.py", "--config", "mine.yaml")
    at_line = "error: fail=validate: change it (mine.yaml:4)\n"
    assert tune(*run, cwd=folder)[2] == at_line
    assert tune("validate", "mine.yaml", cwd=folder)[2] == at_line
    assert tune("--config", "mine.yaml", cwd=folder, command=("mine.py",))[2] == at_line
    by_override = "error: fail=validate: change it\n"
    assert tune(*run, "fail=validate", cwd=folder)[2] == by_override


def test_a_character_outside_the_terminals_encoding_ends_no_run(folder: Path):
    run = ("run", "mine.py", "--config", "mine.yaml")
    code, out, err = tune(*run, "fail=arrow", cwd=folder, PYTHONIOENCODING="ascii")
    assert (code, out.splitlines()[0], err) == (0, "\\u2192", "")


def test_what_torchao_says_at_import_is_shown_on_demand(folder: Path):
    run = ("run", "mine.py", "--config", "mine.yaml", "fail=noise")
    assert tune(*run, cwd=folder)[2] == ""
    assert "Failed to load x.so" in tune(*run, "--debug", cwd=folder)[2]


def test_a_bug_is_not_hidden(folder: Path):
    code, _, err = tune("run", "mine.py", "--config", "mine.yaml", "fail=bug", cwd=folder)
    assert code == 1
    assert "AssertionError: a bug" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "name a recipe"),
        (["run", "mine.py", "--config", "gone.yaml"], "gone.yaml: there is no such file"),
        (["run", "gone.py", "--config", "mine.yaml"], "gone.py: there is no such file"),
        (["validate"], "name a config"),
        (["validate", "batch_size=2"], "name a config"),
        (["validate", "mine.py", "--recipe", "mine.py"], "name one recipe"),
        (["validatee"], "did you mean validate?"),
        (["cat", "qqqq"], "`tune ls` lists them"),
        (["cp", "mine.py"], "required: target"),
    ],
)
def test_what_is_missing_is_named(folder: Path, words, message):
    code, _, err = tune(*words, cwd=folder)
    assert code in (1, 2)
    assert message in err


def test_validate_reports_static_faults_without_torch_then_arguments(folder: Path):
    script = (
        "import sys; from solotune.cli.main import main; code = main(sys.argv[1:]);"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    python = {"cwd": folder, "command": ("-c", script)}
    code, out, err = tune("validate", "mine.yaml", "outputdir=x", "outputt=1", **python)
    assert (code, out) == (1, "False\n")
    assert err.count("unknown key") == 2
    code, out, err = tune("validate", "mine.yaml", "optimizer.lrr=1", **python)
    assert (code, out) == (1, "True\n")
    assert "did you mean optimizer.lr?" in err
    assert tune("validate", "mine.yaml", "fail=validate", cwd=folder)[0] == 1
    code, out, _ = tune("validate", "mine.yaml", "fail=missing", cwd=folder)
    assert (code, out) == (0, "mine.yaml is valid for mine.py\n")


def test_validate_understands_the_words_of_run(folder: Path):
    valid = "mine.yaml is valid for mine.py\n"
    for words in (
        ("mine.py", "--config", "mine.yaml", "output_dir=x"),
        ("mine.py", "output_dir=x", "--config", "mine.yaml"),
        ("--config", "mine.yaml", "output_dir=x"),
        ("output_dir=x", "--config", "mine.yaml", "--recipe", "mine.py"),
    ):
        assert tune("validate", *words, cwd=folder)[:2] == (0, valid), words
    words = ("mine.py", "optimizer=torch.optim.SGD", "output_dir=x")
    assert tune("validate", *words, cwd=folder)[1] == "the command line is valid for mine.py\n"
    code, _, err = tune("validate", "mine.py", "--config", "mine.yaml", "outputdir=x", cwd=folder)
    assert (code, err) == (1, "error: outputdir: unknown key; did you mean output_dir?\n")


def test_a_recipe_named_by_its_path_is_found_from_the_folder_of_the_config(folder: Path):
    deep = folder / "deep er"
    deep.mkdir()
    (deep / "my own.py").write_text(RECIPE)
    for name in ("my own.py", "'my own.py'  # mine", str(deep / "my own.py")):
        (deep / "mine.yaml").write_text(YAML.replace("mine.py", name))
        code, out, err = tune("validate", "deep er/mine.yaml", cwd=folder)
        assert (code, err) == (0, "")
        assert "deep er/my own.py" in out
        words = ("run", "deep er/my own.py", "--config", "deep er/mine.yaml")
        assert tune(*words, cwd=folder)[0] == 0


def test_a_command_with_torchtunes_keys_is_valid_and_runs_up_to_the_missing_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    from solotune.cli.main import main  # pyright: ignore[reportMissingImports]

    monkeypatch.chdir(tmp_path)
    words = (
        "full_finetune_single_device --config llama3/8B_full_single_device compile=True "
        "batch_size=2 dataset.packed=True tokenizer.max_seq_len=2048 "
        "enable_activation_offloading=True"
    ).split()
    assert main(["validate", *words]) == 0
    valid = "llama3/8B_full_single_device is valid for full_finetune_single_device\n"
    assert capsys.readouterr().out == valid
    assert main(["run", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: checkpoint_dir=models/Meta-Llama-3-8B-Instruct")
    assert "8B_full_single_device.yaml:" in error


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.lr=-1", "optimizer.lr=-1: use 0 or more"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1: use 0 or more"),
        ("optimizer.betas=[0.9]", "optimizer.betas: a list of 2 (each: a number) is needed"),
        ("loss.chunk_tokens=0", "loss.chunk_tokens=0: use at least 1, or null"),
        ("lr_scheduler.warmup_ratio=5", "lr_scheduler.warmup_ratio=5.0: use a value from 0 to 1"),
        ("tokenizer.max_seq_len=1", "tokenizer.max_seq_len: 2 or more is needed, not 1"),
        ("dataset.max_rows=0", "dataset.max_rows: 1 or more is needed, not 0"),
        ("dataset.train_on=first", "dataset.train_on: all or last is needed, not first"),
    ],
)
def test_a_value_that_cannot_be_is_refused_without_a_model_folder(
    word: str, message: str, capsys: pytest.CaptureFixture
):
    from solotune.cli.main import main  # pyright: ignore[reportMissingImports]

    for verb in (["validate"], ["run", "full_finetune_single_device", "--config"]):
        assert main([*verb, "llama3/8B_full_single_device", word]) == 1
        out, err = capsys.readouterr()
        assert (out, err.startswith(f"error: {message}")) == ("", True), err


def test_the_help_of_a_recipe_lists_its_keys(folder: Path):
    code, out, _ = tune("run", "mine.py", "--help", cwd=folder)
    assert code == 0
    assert "  fail: str | None = None  # how" in out
    for verb in ("run", "ls", "cat", "cp", "validate"):
        code, out, _ = tune(verb, "--help", cwd=folder)
        assert (code, f"tune {verb}" in out) == (0, True)
    for words in ((), ("--help",), ("--version",)):
        code, out, _ = tune(*words, cwd=folder)
        assert (code, "tune" in out) == (0, True)


def test_copies_are_stamped_run_and_are_never_overwritten(folder: Path):
    code, out, _ = tune("cp", "mine.py", "deep/er/copy", cwd=folder)
    assert (code, out) == (0, f"{Path('deep/er/copy.py')}\n")
    copy = folder / "deep/er/copy.py"
    stamp, _, rest = copy.read_text().partition("\n")
    assert rest == RECIPE
    assert stamp.startswith("# solotune ")
    assert " mine.py sha256:" in stamp
    assert tune("cp", "mine.yaml", "deep", cwd=folder)[0] == 0
    assert (folder / "deep/mine.yaml").read_text().endswith(YAML)

    code, _, err = tune("cp", "mine.py", copy, cwd=folder)
    assert (code, "--force overwrites it" in err) == (1, True)
    copy.write_text("changed")
    assert tune("cp", "mine.py", copy, "--force", cwd=folder)[0] == 0
    assert copy.read_text().endswith(RECIPE)
    assert tune("cp", copy, "again.py", cwd=folder)[0] == 0
    assert (folder / "again.py").read_text() == copy.read_text(), "the stamp of the original stays"
    code, _, err = tune("cp", "mine.py", "x.yaml", cwd=folder)
    assert (code, "end the target so" in err) == (1, True)

    words = ("--config", folder / "deep/mine.yaml", "output_dir=x")
    code, out, _ = tune("run", "er/copy.py", *words, cwd=folder / "deep")
    assert (code, out.split()[1]) == (0, "x")
    code, out, _ = tune("run", copy, *words, cwd=Path("/"))
    assert (code, out.split()[1]) == (0, "x")


def test_every_shipped_file_is_printed_and_copied_as_it_is(tmp_path: Path):
    from solotune.cli.main import main  # pyright: ignore[reportMissingImports]

    for name, path in {**recipes(), **configs()}.items():
        assert main(["cp", name, str(tmp_path / "copies") + "/" + name + path.suffix]) == 0
        copy = tmp_path / "copies" / (name + path.suffix)
        text = copy.read_text(encoding="utf-8").partition("\n")[2]
        assert text == path.read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "copies", ignore_errors=True)


def test_cat_prints_the_file(folder: Path, capfd):
    code, out, _ = tune("cat", "mine.py", cwd=folder)
    assert (code, out) == (0, RECIPE)


def test_ls_is_the_listing_of_the_folders(folder: Path):
    rows = json.loads(tune("ls", "--json", cwd=folder)[1])
    assert [row["recipe"] for row in rows] == list(recipes())
    listed = {config for row in rows for config in row["configs"]}
    assert listed == set(configs()), "every config names a recipe that is there"
    plain = tune("ls", cwd=folder)[1]
    assert all(name in plain for name in [*recipes(), *configs()])
    assert "nothing_like_this" in tune("ls", "nothing_like_this", cwd=folder)[1]


def test_a_closed_pipe_is_no_error(folder: Path):
    (folder / "long.py").write_text("# line\n" * 100_000)
    command = f"{sys.executable} -m solotune cat long.py | head -n 1"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("# line\n", "")


def test_listing_and_a_fault_cost_less_than_half_of_importing_torch(folder: Path):
    def fastest_of_three(*words, command=("-m", "solotune")):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            tune(*words, cwd=folder, command=command)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    half = fastest_of_three(command=("-c", "import torch")) / 2
    assert fastest_of_three("ls") < half
    assert fastest_of_three("validate", "mine.yaml", "outputdir=x") < half

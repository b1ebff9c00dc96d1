"""Bad data stops `tune run` before weights are read: one sentence, and nothing is left over."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from .conftest import RECIPES, TRAINING, basics, tune

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}
GOOD = json.dumps({"messages": [USER, ANSWER]}) + "\n"
ROWS = "".join(json.dumps({"prompt": f"q{k}", "completion": f"a{k}"}) + "\n" for k in range(500))


def rows(*given: object) -> bytes:
    return "".join(
        (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given
    ).encode()


def table(folder: Path, **columns: list) -> bytes:
    parquet.write_table(pyarrow.table(columns), folder / "table")
    content = (folder / "table").read_bytes()
    (folder / "table").unlink()
    return content


CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]}
Files = dict[str, bytes] | Callable[[Path], dict[str, bytes]]

# name of the source, files that are there, overrides, what is said
FAULTS: dict[str, tuple[str, Files, list[str], str]] = {
    "no file": ("chat.jsonl", {"chats.jsonl": rows(GOOD)}, [], r"did you mean .*chats\.jsonl\?"),
    "empty": ("a.jsonl", {"a.jsonl": b""}, [], r"a\.jsonl leaves nothing to train on: 0 rows"),
    "blank rows": (
        "a.csv",
        {"a.csv": b"prompt,completion\n,\n,\n"},
        [],
        "nothing to train on: 2 rows, 0 unreadable, 2 without a target",
    ),
    "other columns": (
        "a.jsonl",
        {"a.jsonl": rows({"body": "x"}, {"body": "y"})},
        [],
        r"a\.jsonl, line 1: no known format has the columns \['body'\]",
    ),
    "no header": (
        "a.csv",
        {"a.csv": b"What is 2+2?,4\nWhat is 3+3?,6\n"},
        [],
        r"a\.csv, line 2: no known format has the columns \['4', 'What is 2\+2\?'\]",
    ),
    "null late": (
        "a.jsonl",
        {"a.jsonl": ROWS.encode() + rows({"prompt": "q", "completion": None})},
        [],
        r"a\.jsonl, line 501: column completion holds null .*on_bad_row=skip",
    ),
    "null late in a table": (
        "a.parquet",
        lambda folder: {
            "a.parquet": table(folder, prompt=["q"] * 3000, completion=["a"] * 2999 + [None])
        },
        [],
        r"a\.parquet, row 3000: column completion holds null",
    ),
    "numbers in a table": (
        "a.parquet",
        lambda folder: {"a.parquet": table(folder, prompt=["q"], completion=[1.5])},
        [],
        r"a\.parquet, row 1: column completion holds the number 1\.5, wanted text",
    ),
    "mixed types": (
        "a.jsonl",
        {"a.jsonl": rows({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": ["a"]})},
        [],
        r"a\.jsonl, line 2: the conversation is not a list of messages",
    ),
    "mixed formats": (
        "a.jsonl",
        {"a.jsonl": rows({"prompt": "q", "completion": "a"}, GOOD.strip())},
        [],
        r"a\.jsonl, line 2: format prompt wants the column prompt, found \['messages'\]",
    ),
    "broken line": ("a.jsonl", {"a.jsonl": rows(GOOD, "{oops")}, [], r"line 3: not JSON: "),
    "cut list": ("a.json", {"a.json": b'[{"text": "a"}, {"text": "b'}, [], "it is cut off"),
    "not UTF-8": (
        "a.csv",
        {"a.csv": b"prompt,completion\nq,th\xe9\n"},
        [],
        r"a\.csv, line 2: not UTF-8 at byte 22 of the file; save it as UTF-8",
    ),
    "UTF-16": ("a.csv", {"a.csv": "prompt,completion\nq,a\n".encode("utf-16")}, [], "is UTF-16"),
    "open quote": ("a.csv", {"a.csv": b'prompt,completion\nq,"a\nq,a\n'}, [], "repair the quoting"),
    "cut gzip": (
        "a.jsonl.gz",
        {"a.jsonl.gz": gzip.compress(ROWS.encode())[:-30]},
        [],
        r"a\.jsonl\.gz is cut off or damaged",
    ),
    "cut table": (
        "a.parquet",
        lambda folder: {"a.parquet": table(folder, text=["a"])[:-9]},
        [],
        r"a\.parquet, after row 0: .*write the file again",
    ),
    "LFS pointer": (
        "a.parquet",
        {"a.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
        [],
        "is a Git LFS pointer, not the data: run git lfs pull",
    ),
    "Excel": ("a.xlsx", {"a.xlsx": b"PK\x03\x04"}, [], r"a\.xlsx is not a jsonl, .* convert it"),
    "splits": (
        "data",
        {"data/train.jsonl": rows(GOOD), "data/test.jsonl": rows(GOOD)},
        [],
        r"several splits \(test, train\): set dataset\.split",
    ),
    "no such split": (
        "data",
        {"data/train.jsonl": rows(GOOD)},
        ["dataset.split=dev"],
        r"dataset\.split=dev: no file of .*\(train\.jsonl\)",
    ),
    "useless key": (
        "a.jsonl",
        {"a.jsonl": rows(GOOD)},
        ["dataset.revision=main"],
        r"dataset\.revision=main chooses a part of a Hub data set, .*: remove the key",
    ),
    "preferences": (
        "a.jsonl",
        {"a.jsonl": rows({"prompt": "q", "chosen": "a", "rejected": "b"})},
        [],
        r"set dataset\.column_map\.completion=chosen",
    ),
    "role": (
        "a.jsonl",
        {"a.jsonl": rows({"messages": [USER, ANSWER | {"role": "robot"}]})},
        [],
        r"line 1: message 1 has the role 'robot', of the roles \['user', 'robot'\]",
    ),
    "tool call": (
        "a.jsonl",
        {"a.jsonl": rows({"messages": [USER, CALL]})},
        [],
        "line 1: message 1 calls f with arguments that are no JSON object",
    ),
    "image": (
        "a.jsonl",
        {"a.jsonl": rows({"messages": [USER | {"content": [{"type": "image"}]}, ANSWER]})},
        [],
        "line 1: message 0 has parts of the types .*: only text can be trained",
    ),
}


@pytest.fixture
def said(tmp_path: Path, models: dict[str, Path], capsys) -> Callable[..., str]:
    """Return a function that runs a recipe on a bad source and returns the one sentence it said."""

    def run(recipe: Path, *words: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert tune("run", recipe, *words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        left = set(tmp_path.rglob("*")) - set(before)
        assert left <= {tmp_path / "run"}, left
        return line

    return run


def write(folder: Path, files: Files) -> None:
    for name, content in (files(folder) if callable(files) else files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("recipe", TRAINING, ids=lambda recipe: recipe.stem)
def test_a_recipe_names_file_row_and_repair(
    recipe: Path, name: str, said, models: dict[str, Path], tmp_path: Path
) -> None:
    source, files, words, wanted = FAULTS[name]
    write(tmp_path, files)
    keys = basics(models["untied"], tmp_path / source, recipe=recipe, output_dir=tmp_path / "run")
    sentence = said(recipe, *keys, *words)
    assert re.search(wanted, sentence), sentence


@pytest.mark.parametrize("recipe", TRAINING, ids=lambda recipe: recipe.stem)
@pytest.mark.parametrize("words", [[], ["output_dir=out/a/b"]])
def test_a_run_that_cannot_start_leaves_no_folder(
    recipe: Path, words: list[str], models: dict[str, Path], tmp_path: Path
) -> None:
    keys = [*basics(models["untied"], tmp_path / "none.jsonl", recipe=recipe), *words]
    command = [sys.executable, "-m", "solotune", "run", str(recipe), *keys]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "no such file" in done.stderr
    assert list(tmp_path.iterdir()) == []


GENERATE = next(recipe for recipe in RECIPES if recipe.stem == "generate")
ONLY_TRAINING = (
    "null late",
    "numbers",
    "mixed types",
    "preferences",
    "role",
    "tool call",
    "no head",
)


@pytest.mark.parametrize(
    "name", [name for name in FAULTS if not (FAULTS[name][2] or name.startswith(ONLY_TRAINING))]
)
def test_generate_names_file_and_row_of_its_prompts(
    name: str, said, models: dict[str, Path], tmp_path: Path
) -> None:
    source, files, _, _ = FAULTS[name]
    write(tmp_path, files)
    keys = {"checkpoint_dir": models["untied"], "prompts_file": tmp_path / source, "device": "cpu"}
    said(GENERATE, *(f"{key}={value}" for key, value in keys.items()))

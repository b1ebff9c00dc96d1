"""Folders, globs and Hub names: which files are read, and what is refused instead of guessed."""

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from solotune import data
from solotune.data import read_rows
from solotune.data.sources import data_files, source_name
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import CHATML, Tokenizer

Write = Callable[[str, bytes], str]
ROW = b'{"text": "a"}\n'


def texts(source: str | Path, **options: Any) -> list[str]:
    return [row.columns["text"] for row in read_rows(source, **options)]


def test_a_glob_reads_its_files_in_the_order_of_their_names(write: Write, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz", "sub/d.jsonl", ".hidden.jsonl", "e.csv"):
        content = f'{{"text": "{name}"}}'.encode()
        write(name, gzip.compress(content) if name.endswith("gz") else content)
    assert texts(f"{tmp_path}/*.jsonl*") == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a.jsonl", "b.jsonl", "sub/d.jsonl"]
    place = [row.place for row in read_rows(f"{tmp_path}/?.jsonl")][1]
    assert place == f"{tmp_path}/b.jsonl, line 1"


def test_a_file_whose_name_looks_like_a_glob_is_that_file(write: Write) -> None:
    write("a1.jsonl", ROW * 2)
    assert texts(write("a[1].jsonl", ROW)) == ["a"]


def test_a_folder_reads_its_data_files_alone(write: Write, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.ndjson", "README.md", "LICENSE", "dataset_infos.json"):
        write(f"data/{name}", f'{{"text": "{name}"}}'.encode())
    assert texts(tmp_path / "data") == ["a.ndjson", "b.jsonl"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a.jsonl", "b.csv"], r"files of several kinds \(\.csv, \.jsonl\): name .*/\*\.csv"),
        (["x-train.jsonl", "x-test.jsonl"], r"several splits \(test, train\): set dataset\.split"),
        (["a.jsonl", "a.jsonl.gz"], "a.jsonl and a.jsonl.gz are the same rows twice: keep one"),
        (
            ["sub/a.jsonl"],
            "holds no data file itself, but .*sub/a.jsonl: name that folder, or a gl",
        ),
        ([], r"holds no jsonl, .* or parquet file \(it holds nothing\)"),
        (["README.md"], r"holds no jsonl, .* or parquet file \(it holds README\.md\)"),
        (
            ["data-00000-of-00001.arrow"],
            "a folder of datasets' save_to_disk: write it with to_parq",
        ),
    ],
)
def test_a_folder_that_leaves_a_doubt_is_refused(
    write: Write, tmp_path: Path, names: list[str], wanted: str
) -> None:
    (tmp_path / "data").mkdir()
    for name in names:
        write(f"data/{name}", ROW)
    with pytest.raises(DataError, match=rf"^dataset\.source=.*data:? .*{wanted}"):
        texts(tmp_path / "data")


@pytest.mark.parametrize("split", ["train", "test", "validation"])
def test_split_chooses_the_files_of_a_folder_by_their_names(
    write: Write, tmp_path: Path, split: str
) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test", "dev"):
        write(f"data/{name}.jsonl", f'{{"text": "{name}"}}'.encode())
    wanted = {
        "train": ["train-00000-of-00002", "train-00001-of-00002"],
        "test": ["test"],
        "validation": ["dev"],
    }
    assert texts(tmp_path / "data", split=split) == wanted[split]


def test_a_split_without_files_lists_them(write: Write, tmp_path: Path) -> None:
    write("data/chats.jsonl", ROW)
    with pytest.raises(
        DataError, match=r"dataset\.split=test: no file of .*data .*\(chats\.jsonl\)"
    ):
        texts(tmp_path / "data", split="test")


def test_one_file_under_two_names_is_not_read_twice(write: Write, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").symlink_to(write("a.jsonl", ROW))
    with pytest.raises(
        DataError, match=r"\*\.jsonl: a\.jsonl and b\.jsonl are the same rows twice"
    ):
        texts(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize("key", ["config", "revision", "split"])
def test_a_key_without_effect_on_a_file_is_refused(
    write: Write, make_tokenizer: Callable[..., Tokenizer], key: str
) -> None:
    arguments: dict[str, Any] = {"source": write("a.jsonl", ROW), key: "x"}
    with pytest.raises(ConfigError, match=rf"^dataset\.{key}=x chooses .* remove the key"):
        data.dataset(make_tokenizer(CHATML), **arguments)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("chat.jsonl", r"no such file; did you mean .*chats\.jsonl\?; give the path of a jsonl"),
        (
            "none/at/all.jsonl",
            "no such file; give the path of a jsonl, json, csv, tsv, txt or parq",
        ),
        ("*.csv", "no file has such a name"),
        ("a.xlsx", "a.xlsx is not a jsonl, json, csv, tsv, txt or parquet file .*: convert it"),
        ("a.jsonl.bz2", "a.jsonl.bz2 is not a jsonl, .* file .perhaps .gz or .zst.: convert it"),
    ],
)
def test_a_source_that_is_no_data_file_says_what_would_be(
    write: Write, tmp_path: Path, source: str, wanted: str
) -> None:
    for name in ("chats.jsonl", "a.xlsx", "a.jsonl.bz2"):
        write(name, ROW)
    with pytest.raises(
        DataError, match=rf"^dataset\.source={re.escape(str(tmp_path))}.*: {wanted}"
    ):
        texts(f"{tmp_path}/{source}")


def test_the_home_folder_may_be_spelled_with_a_tilde(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write("a.jsonl", ROW)
    assert texts("~/a.jsonl") == texts("~/*.jsonl") == ["a"]


def test_the_report_names_what_was_read(
    write: Write, tmp_path: Path, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    write("data/a.jsonl", ROW)
    write("data/b.jsonl", ROW)
    samples = data.dataset(make_tokenizer(CHATML), source=f"{tmp_path}/data")
    assert samples.lines()[0] == f"dataset: {tmp_path}/data (2 files), format text, 2 rows"
    name = source_name("org/chats", config="en", revision="v1")
    assert name == "org/chats (config en, split train, revision v1)"


# the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The Hub holds `org/chats`, a folder of ours; what the library is asked for is kept."""
    folder, calls = tmp_path / "repo", []
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: en\n  data_files:\n"
        "  - {split: train, path: en/train.parquet}\n"
        "  - {split: test, path: en/test.parquet}\n"
        "- config_name: de\n  data_files: en/train.parquet\n---\n"
    )
    arguments = [{"time": "2030-01-01"}, {"place": "00501"}]
    for split, words in (("train", ["a", "b"]), ("test", ["c"])):
        rows = [
            {"text": word, "calls": [{"arguments": arguments[k % 2]}]}
            for k, word in enumerate(words)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "en" / f"{split}.parquet")
    real = datasets.load_dataset

    def load(name: str, config: str | None = None, **options: Any) -> Any:
        calls.append({"name": name, "config": config, **options})
        options.pop("revision")
        return real(str(folder), config, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    datasets.disable_progress_bars()
    return calls


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_name_is_read_with_config_split_and_revision(
    hub: list[dict[str, Any]], streaming: bool
) -> None:
    rows = list(
        read_rows("org/chats", config="en", split="train", revision="v1", streaming=streaming)
    )
    assert hub == [
        {
            "name": "org/chats",
            "config": "en",
            "split": "train",
            "revision": "v1",
            "streaming": streaming,
        }
    ]
    assert [row.place for row in rows] == [f"org/chats, split train, row {k}" for k in (1, 2)]
    assert rows[1].columns == {"text": "b", "calls": [{"arguments": {"place": "00501"}}]}


def test_the_split_is_train_unless_set(hub: list[dict[str, Any]]) -> None:
    assert texts("org/chats", config="en") == ["a", "b"]
    assert texts("org/chats", config="en", split="test") == ["c"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, r"Config name is missing.*'de'.* \(choose with dataset\.config\)"),
        ({"config": "fr"}, r"'fr' not found. Available: .*\(choose with dataset\.config\)"),
        (
            {"config": "en", "split": "dev"},
            r"Unknown split \"dev\".*\(choose with dataset\.split\)",
        ),
    ],
)
def test_a_part_that_the_hub_lacks_names_those_that_are_there(
    hub: list[dict[str, Any]], options: dict[str, str], wanted: str
) -> None:
    with pytest.raises(DataError, match=rf"^dataset\.source=org/chats: .*{wanted}$"):
        texts("org/chats", **options)


def test_a_local_path_always_wins(
    write: Write, tmp_path: Path, hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("org/chats/a.jsonl", ROW)
    monkeypatch.chdir(tmp_path)
    assert texts("org/chats") == ["a"]
    with pytest.raises(DataError, match=r"no such file; did you mean org/chats/a\.jsonl"):
        data_files("org/chats/b.jsonl")
    assert not hub


def test_a_path_without_its_suffix_is_not_looked_for_on_the_hub(
    write: Write, tmp_path: Path, hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("data/chats.jsonl", ROW)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"=data/chats: no such file; did you mean data/chats\.js"):
        texts("data/chats")
    assert not hub


def test_without_a_network_the_sentence_says_both_that_it_could_be() -> None:
    code = "from solotune.data import read_rows; list(read_rows('no-one/nothing', streaming=True))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1] == (
        "solotune.errors.DataError: dataset.source=no-one/nothing: no such file or folder, and the "
        "Hub cannot be reached (Couldn't reach 'no-one/nothing' on the Hub (OfflineModeIsEnabled)):"
        " go online once to download it, or give a local file"
    )

"""The cache of tokens: when an entry is used, and that nothing changed ever meets an old one."""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from solotune import data, tokenizers
from solotune.data import SampleSet, cache, cache_key
from solotune.errors import DataError
from solotune.tokenizers import CHATML, Tokenizer

Load = Callable[..., SampleSet]


@pytest.fixture
def chatml() -> str:
    return CHATML


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solotune.data.cache.WORTH_TOKENS", 50)
    monkeypatch.setattr("solotune.data.workers.CHUNK", 4)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"Question {k}?", "completion": f"Answer {k}."} for k in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def load(chats: Path, tmp_path: Path) -> Load:
    def load_chats(tokenizer: Tokenizer, **arguments) -> SampleSet:
        arguments = {"source": str(chats), "cache_dir": str(tmp_path / "cache"), **arguments}
        return data.dataset(tokenizer, **arguments)

    return load_chats


def origin(samples: SampleSet) -> str:
    """Whether samples were read from or written to the cache, or neither."""
    found = [fact.split()[1] for fact in samples.facts if " the cache " in fact]
    return found[0] if found else ""


def test_the_second_start_reads_what_the_first_one_wrote_and_prints_the_same(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load
) -> None:
    tokenizer = make_tokenizer(chatml)
    first, second = load(tokenizer), load(tokenizer)
    assert (origin(first), origin(second)) == ("written", "read")
    assert second.lines()[:-1] == first.lines()[:-1]
    assert "tokens read from the cache" in second.lines()[-1]
    plain = load(tokenizer, cache_dir=None)
    for samples in (first, second):
        assert samples.fingerprint() == plain.fingerprint()
        assert samples.rows_N.tolist() == plain.rows_N.tolist()
        assert samples.targets_N.tolist() == plain.targets_N.tolist()
        for k in range(len(plain)):
            for mine, theirs in zip(samples.sample(k), plain.sample(k), strict=True):
                assert mine.tolist() == theirs.tolist()
    assert load(tokenizer, packed=False).batching.packed is False  # not of the entry


def test_a_small_set_is_not_written(
    make_tokenizer: Callable[..., Tokenizer],
    chatml: str,
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("solotune.data.cache.WORTH_TOKENS", 10**6)
    assert origin(load(make_tokenizer(chatml))) == ""
    assert not (tmp_path / "cache").exists()


def test_changed_data_never_meets_an_old_entry(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load, chats: Path
) -> None:
    tokenizer = make_tokenizer(chatml)
    load(tokenizer)
    before = chats.stat()
    chats.write_text(chats.read_text().replace("Answer 3", "Answer 8"))
    os.utime(chats, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert chats.stat().st_size == before.st_size
    assert origin(load(tokenizer)) == "written"


def test_a_changed_template_or_tokenizer_never_meets_an_old_entry(
    write_tokenizer: Callable[..., Path], chatml: str, load: Load, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "model", template=chatml)
    other = tmp_path / "other.jinja"
    other.write_text(chatml)
    load(tokenizers.auto(folder))
    assert origin(load(tokenizers.auto(folder))) == "read"
    changes: list[dict[str, Any]] = [
        {"max_seq_len": 60},
        {"chat_template": str(other)},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ]
    for change in changes:
        assert origin(load(tokenizers.auto(folder, **change))) == "written"
        assert origin(load(tokenizers.auto(folder, **change))) == "read"
    other.write_text(chatml.replace("\\n", " \\n", 1))
    assert origin(load(tokenizers.auto(folder, chat_template=str(other)))) == "written"
    write_tokenizer(folder, template=chatml.replace("\\n", " \\n", 1))
    assert origin(load(tokenizers.auto(folder))) == "written"
    write_tokenizer(folder, template=chatml, merges=(("A", "n"),))
    assert origin(load(tokenizers.auto(folder))) == "written"


def test_every_argument_that_decides_tokens_makes_an_entry_of_its_own(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load
) -> None:
    tokenizer = make_tokenizer(chatml)
    load(tokenizer)
    for change in (
        {"format": "prompt"},
        {"column_map": {"completion": "prompt", "prompt": "completion"}},
        {"train_on_input": True},
        {"train_on": "last"},
        {"history": "as_rendered"},
        {"on_bad_row": "skip"},
        {"max_rows": 19},
        {"split_across_pack": True},
    ):
        assert origin(load(tokenizer, **change)) == "written", change


def test_a_template_that_writes_the_date_is_rendered_anew_each_day(
    make_tokenizer: Callable[..., Tokenizer],
    chatml: str,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer("{{ strftime_now('%d %b %Y') }}" + chatml)
    load(tokenizer)
    assert origin(load(tokenizer)) == "read"

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date(2031, 1, 2)

    monkeypatch.setattr(cache_key, "date", Tomorrow)
    assert origin(load(tokenizer)) == "written"


@pytest.mark.parametrize("name", ["tokens.int32", "trained.uint8", "rows.uint64", "header.json"])
@pytest.mark.parametrize("fault", ["a byte", "cut", "gone"])
def test_a_damaged_entry_is_named_and_made_again(
    make_tokenizer: Callable[..., Tokenizer],
    chatml: str,
    load: Load,
    tmp_path: Path,
    name: str,
    fault: str,
) -> None:
    tokenizer = make_tokenizer(chatml)
    good = load(tokenizer)
    (entry,) = (tmp_path / "cache").iterdir()
    content = bytearray((entry / name).read_bytes())
    del good
    content[len(content) // 2] ^= 1
    if fault == "gone":
        (entry / name).unlink()
    else:
        (entry / name).write_bytes(content if fault == "a byte" else content[:-3])
    again = load(tokenizer)
    assert origin(again) == "written"
    assert "is damaged" in "".join(again.lines())
    assert again.fingerprint() == load(tokenizer, cache_dir=None).fingerprint()
    assert origin(load(tokenizer)) == "read"


def test_a_run_that_fails_leaves_nothing_behind(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load, chats: Path, tmp_path: Path
) -> None:
    with chats.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError):
        load(make_tokenizer(chatml))
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_runs_at_once_end_with_one_entry_and_the_same_samples(
    make_tokenizer: Callable[..., Tokenizer],
    chatml: str,
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second run starts and ends while the first one is at its last step."""
    tokenizer = make_tokenizer(chatml)
    publish, inner = cache.CacheWriter._publish, []

    def slow(writer: cache.CacheWriter, *args) -> SampleSet:
        monkeypatch.setattr(cache.CacheWriter, "_publish", publish)
        inner.append(load(tokenizer))
        return publish(writer, *args)

    monkeypatch.setattr(cache.CacheWriter, "_publish", slow)
    outer = load(tokenizer)
    assert outer.fingerprint() == inner[0].fingerprint()
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_full_disk_is_named_and_the_run_goes_on_in_memory(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load, tmp_path: Path
) -> None:
    import resource

    tokenizer = make_tokenizer(chatml)
    plain = load(tokenizer, cache_dir=None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (100, plain.num_tokens * 2, plain.num_tokens * 4 - 1):  # at once, midway, late
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            samples = load(tokenizer)
            assert samples.fingerprint() == plain.fingerprint()
            assert samples.lengths_N.tolist() == plain.lengths_N.tolist()
            assert "tokens are not cached" in samples.facts[-1]
            assert "dataset.cache_dir" in samples.facts[-1]
            assert list((tmp_path / "cache").iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_cache_folder_that_cannot_be_made_is_named(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    samples = load(make_tokenizer(chatml), cache_dir=str(tmp_path / "a file"))
    assert len(samples) == 20
    assert "tokens are not cached" in samples.facts[-1]


def test_entries_not_read_for_a_month_go_when_a_new_one_is_written(
    make_tokenizer: Callable[..., Tokenizer], chatml: str, load: Load, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(chatml)
    load(tokenizer)
    (old,) = (tmp_path / "cache").iterdir()
    left = tmp_path / "cache" / f".{'0' * 32}-killed"
    left.mkdir()
    mine = tmp_path / "cache" / "my own folder"
    mine.mkdir()
    for path in (old / "header.json", left, mine):
        os.utime(path, (0, 0))
    load(tokenizer, max_rows=10)
    assert not old.exists()
    assert not left.exists()
    assert mine.exists()


def test_the_default_folder_follows_the_desktop_convention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "solotune" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_cache_dir() == Path.home() / ".cache" / "solotune" / "tokens"

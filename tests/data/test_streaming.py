"""Streamed data: each row in its place whatever was read before, and memory of a block."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from solotune.data import Batch, Loader, SampleSet, dataset, make_loader, mixed, split_validation
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import CHATML, Tokenizer

ROWS = 600


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solotune.data.workers.CHUNK", 16)
    monkeypatch.setattr("solotune.data.workers.ROWS_ALONE", 32)


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML, max_seq_len=256)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        {"prompt": f"What is {k}? " * (k % 5 + 1), "completion": f"It is <{k}>."}
        for k in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def stream(tokenizer: Tokenizer, chats: Path) -> Callable[..., SampleSet]:
    def make(**arguments) -> SampleSet:
        given = {"source": str(chats), "rows_per_epoch": 100, "shuffle_buffer": 100, **arguments}
        return dataset(tokenizer, streaming=True, **given)

    return make


def loader_of(samples: SampleSet, *, batch_size: int = 2, **options) -> Loader:
    return make_loader(samples, batch_size=batch_size, max_seq_len=256, seed=3, **options)


def numbers(tokenizer: Tokenizer, batches: list[Batch]) -> list[int]:
    """The numbers of the chats in the batches, in their order."""
    found = []
    for batch in batches:
        for tokens, used in zip(batch.tokens_BS, batch.segments_BM.sum(1).tolist(), strict=True):
            text = tokenizer.decode(tokens[:used].tolist())
            found += [int(part.split(">")[0]) for part in text.split("It is <")[1:]]
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_every_row_comes_once_a_pass_with_its_own_labels(
    stream: Callable[..., SampleSet], tokenizer: Tokenizer, packed: bool
) -> None:
    loader = loader_of(stream(packed=packed))
    batches = list(chain(*(loader.epoch(number) for number in range(3 if packed else 8))))
    assert all(len(batch.tokens_BS) == 2 for batch in batches)
    found = numbers(tokenizer, batches)
    assert len(found) > ROWS
    assert sorted(found[:ROWS]) == list(range(ROWS))
    assert found[:ROWS] != sorted(found[:ROWS])
    for batch in batches:
        for tokens, labels in zip(batch.tokens_BS, batch.labels_BS, strict=True):
            trained = labels[labels >= 0].tolist()
            answers = tokenizer.decode(trained).split("<|im_end|>")[:-1]
            text = tokenizer.decode(tokens.tolist())
            assert answers == [
                f"It is <{part.split('>')[0]}>." for part in text.split("It is <")[1:]
            ]


def test_the_order_is_that_of_the_whole_stream_wherever_it_starts(
    stream: Callable[..., SampleSet],
) -> None:
    def tokens(batches) -> list[list[int]]:
        return [batch.tokens_BS.flatten().tolist() for batch in batches]

    loader = loader_of(stream())
    whole = [tokens(loader.epoch(number)) for number in range(3)]
    assert [len(epoch) for epoch in whole] == [len(loader)] * 3 == [50] * 3
    assert len({json.dumps(epoch) for epoch in whole}) == 3
    for number, start in ((0, 0), (0, 7), (2, 49), (1, 20)):
        assert tokens(loader_of(stream()).epoch(number, start)) == whole[number][start:]
        assert tokens(loader.epoch(number, start)) == whole[number][start:]  # back and forth
    partly = loader_of(stream())
    assert (
        tokens(batch for batch, _ in zip(partly.epoch(0), range(3), strict=False)) == whole[0][:3]
    )
    assert tokens(partly.epoch(1)) == whole[1]  # an epoch that max_steps_per_epoch cut short
    workers = loader_of(stream(num_workers=2))
    assert tokens(workers.epoch(0)) == whole[0]
    other = make_loader(stream(), batch_size=2, max_seq_len=256, seed=4)
    assert tokens(other.epoch(0)) != whole[0]


def test_validation_rows_are_never_trained_and_are_the_same_at_each_start(
    stream: Callable[..., SampleSet], tokenizer: Tokenizer
) -> None:
    train, val = split_validation(stream(), fraction=0.1, max_rows=20)
    held_out = numbers(tokenizer, list(loader_of(val).epoch(0)))
    assert len(set(held_out)) == len(val) == 20
    loader = loader_of(train)
    found = numbers(tokenizer, list(chain(*(loader.epoch(number) for number in range(3)))))
    assert sorted(set(found) | set(held_out)) == list(range(ROWS))
    assert not set(found) & set(held_out)
    _, again = split_validation(stream(), fraction=0.1, max_rows=20)
    assert again.rows_N.tolist() == val.rows_N.tolist()


def test_what_is_printed_says_that_it_is_of_the_first_block(
    stream: Callable[..., SampleSet], capsys: pytest.CaptureFixture
) -> None:
    samples = stream()
    lines = samples.lines()
    assert any("first block: 112 samples" in line for line in lines)
    assert any("assistant turns end with <|im_end|>" in line for line in lines)
    assert lines[-1].endswith("an epoch is 100 rows of a batch")
    loader = loader_of(samples)
    assert abs(loader.num_tokens / (100 * 256) - 0.9) < 0.1
    for number in range(3):
        list(loader.epoch(number))
    assert f"dataset: end of pass 1: {ROWS} rows, 0 cut" in capsys.readouterr().out


def test_a_bad_row_stops_the_run_when_it_is_reached(
    stream: Callable[..., SampleSet], chats: Path
) -> None:
    with chats.open("a") as file:
        file.write("{broken\n")
    loader = loader_of(stream())
    with pytest.raises(DataError, match=r"chats\.jsonl, line 601: not JSON"):
        list(chain(*(loader.epoch(number) for number in range(9))))


def test_streaming_keys_that_do_not_fit_are_refused(
    stream: Callable[..., SampleSet], tokenizer: Tokenizer, chats: Path
) -> None:
    with pytest.raises(ConfigError, match=r"set dataset.rows_per_epoch"):
        stream(rows_per_epoch=None)
    with pytest.raises(ConfigError, match=r"dataset.shuffle_buffer=5 is of streaming"):
        dataset(tokenizer, source=str(chats), shuffle_buffer=5)
    with pytest.raises(ConfigError, match=r"max_tokens_per_batch needs the lengths of all rows"):
        stream(packed=False, max_tokens_per_batch=512)
    with pytest.raises(ConfigError, match=r"dataset.datasets.1 is streamed"):
        mixed(tokenizer, datasets=[dataset(tokenizer, source=str(chats)), stream()])


def test_the_fingerprint_follows_files_and_rules(
    stream: Callable[..., SampleSet], chats: Path
) -> None:
    first = loader_of(stream()).fingerprint()
    assert loader_of(stream()).fingerprint() == first
    assert loader_of(stream(shuffle_buffer=99)).fingerprint() != first
    assert loader_of(stream(train_on_input=True)).fingerprint() != first
    with chats.open("a") as file:
        file.write("\n")
    assert loader_of(stream()).fingerprint() != first

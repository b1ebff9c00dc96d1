"""Packing, batches and their order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solotune.data import (
    IGNORED,
    Batch,
    Batching,
    Report,
    SampleSet,
    accumulation_groups,
    best_fit,
    collate,
    make_loader,
    split_validation,
)
from solotune.errors import ConfigError

lengths_lists = st.lists(st.integers(1, 32), min_size=1, max_size=60)


def make_samples(
    lengths: list[int],
    *,
    packed: bool = True,
    seed: int = 0,
    batching: Batching | None = None,
) -> SampleSet:
    """Samples whose tokens are all different, so that each can be found again."""
    total = sum(lengths)
    random = np.random.default_rng(seed)
    return SampleSet(
        tokens_T=np.arange(1, total + 1, dtype=np.int32),
        trained_T=random.integers(0, 2, total).astype(np.uint8),
        lengths_N=np.array(lengths, np.int64),
        rows_N=random.integers(0, 2**64, len(lengths), dtype=np.uint64),
        report=Report("test", "text"),
        batching=batching or Batching(packed=packed),
    )


def segments_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, labels, positions) of each segment of a batch."""
    segments = []
    for b in range(len(batch.tokens_BS)):
        start = 0
        for length in batch.segments_BM[b].tolist():
            span = slice(start, start + length)
            parts = (batch.tokens_BS, batch.labels_BS, batch.positions_BS)
            if length:
                segments.append(tuple(part[b, span].tolist() for part in parts))
            start += length
    return segments


@settings(deadline=None)
@given(lengths_lists, st.integers(1, 4), st.booleans(), st.booleans())
def test_an_epoch_holds_every_sample_once_whole_and_with_its_own_labels(
    lengths: list[int], batch_size: int, packed: bool, shuffle: bool
) -> None:
    samples = make_samples(lengths)
    loader = make_loader(
        samples, batch_size=batch_size, max_seq_len=32, seed=1, shuffle=shuffle, packed=packed
    )
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader)
    assert sum(batch.num_tokens for batch in batches) == loader.num_tokens == sum(lengths)
    assert sum(batch.num_targets for batch in batches) == loader.num_targets
    found = {}
    for batch in batches:
        assert batch.segments_BM.shape == (len(batch.tokens_BS), loader.max_segments)
        assert batch.segments_BM.dtype == torch.int32
        found |= {
            tokens[0]: (tokens, labels, where) for tokens, labels, where in segments_of(batch)
        }
        flat = batch.labels_BS.flatten()
        assert torch.equal(batch.target_rows_T, torch.nonzero(flat != IGNORED).flatten())
        assert batch.num_targets == len(batch.target_rows_T)
        for b, used in enumerate(batch.segments_BM.sum(1).tolist()):
            assert not batch.positions_BS[b, used:].any()
            assert (batch.labels_BS[b, used:] == IGNORED).all()
    assert len(found) == len(lengths)
    for index in range(len(samples)):
        tokens, trained = samples.sample(index)
        seen_tokens, seen_labels, seen_positions = found[int(tokens[0])]
        assert seen_tokens == tokens.tolist()
        assert seen_positions == list(range(len(tokens)))
        following = zip(tokens[1:].tolist(), trained[1:].tolist(), strict=True)
        assert seen_labels == [token if flag else IGNORED for token, flag in following] + [IGNORED]


@given(lengths_lists)
def test_packs_never_overflow_and_are_best_fit(lengths: list[int]) -> None:
    ordered = sorted(lengths, reverse=True)
    packs = best_fit(np.array(ordered), capacity=32).tolist()
    rooms: list[int] = []
    for length, pack in zip(ordered, packs, strict=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:  # the plain O(N^2) rule: the least room that still holds it
            assert rooms[pack] == min(fitting)
        else:
            assert pack == len(rooms)
            rooms.append(32)
        rooms[pack] -= length
    assert min(rooms) >= 0


def test_a_hundred_thousand_samples_fill_their_packs() -> None:
    lengths = -np.sort(-np.random.default_rng(0).integers(5, 1500, 100_000))
    packs = best_fit(lengths, capacity=2048)
    assert lengths.sum() / ((packs.max() + 1) * 2048) > 0.98


@pytest.mark.parametrize("packed", [True, False])
def test_the_order_is_a_function_of_seed_and_epoch(packed: bool) -> None:
    samples = make_samples([*range(3, 30)] * 3)

    def order(seed: int, epoch: int, start: int = 0) -> list[list[int]]:
        loader = make_loader(samples, batch_size=2, max_seq_len=64, seed=seed, packed=packed)
        list(loader.epoch(3))  # what was read before does not matter
        return [batch.tokens_BS.flatten().tolist() for batch in loader.epoch(epoch, start)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    for start in (1, 5, len(order(1, 1))):
        assert order(1, 1, start) == order(1, 1)[start:]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_longest_batch_is_first(packed: bool, shuffle: bool) -> None:
    samples = make_samples([5, 6, 7, 40, 8, 9, 10, 11])
    loader = make_loader(
        samples, batch_size=2, max_seq_len=64, seed=1, shuffle=shuffle, packed=packed
    )
    for epoch in range(5):
        batches = list(loader.epoch(epoch))
        assert max(batches[0].segments_BM.flatten().tolist()) == 40
        assert batches[0].tokens_BS.numel() == max(batch.tokens_BS.numel() for batch in batches)


def test_unpacked_batches_hold_rows_of_like_length() -> None:
    samples = make_samples([2, 30, 3, 31, 4, 29], packed=False)
    loader = make_loader(samples, batch_size=3, max_seq_len=64, seed=1)
    sizes = [batch.segments_BM.flatten().tolist() for batch in loader.epoch(0)]
    assert [sorted(size) for size in sizes] == [[29, 30, 31], [2, 3, 4]]
    assert [batch.tokens_BS.shape for batch in loader.epoch(0)] == [(3, 31), (3, 4)]


def test_short_samples_and_remainders_are_kept() -> None:
    """Field cases 11 and 12 without splitting: no tail is thrown away, filler is no segment."""
    loader = make_loader(make_samples([3]), batch_size=4, max_seq_len=64, seed=1)
    (batch,) = loader.epoch(0)
    assert batch.tokens_BS.shape == (1, 64)
    assert batch.segments_BM.tolist() == [[3]]
    assert batch.num_tokens == 3


def test_eos_equal_to_the_filler_token_keeps_its_label() -> None:
    """Field case 8: filler is known by length, not by id."""
    eos = 257
    rows = [[(np.array([*range(length - 1), eos]), np.ones(length, np.uint8))] for length in (3, 9)]
    batch = collate(rows, row_length=9, max_segments=1, filler_token=eos)
    assert (batch.labels_BS == eos).sum(1).tolist() == [1, 1]
    assert batch.labels_BS[0].tolist() == [1, eos] + [IGNORED] * 7


def test_a_sample_longer_than_the_pack_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len=8 is below the 9 tokens"):
        make_loader(make_samples([9]), batch_size=1, max_seq_len=8, seed=1)


def test_the_last_group_of_an_epoch_is_kept() -> None:
    batches = list(make_loader(make_samples([4] * 5), batch_size=1, max_seq_len=4, seed=1).epoch(0))
    assert [len(group) for group in accumulation_groups(batches, 2)] == [2, 2, 1]
    assert [len(group) for group in accumulation_groups(batches, 9)] == [5]


def test_validation_rows_stay_together_and_where_they_are() -> None:
    samples = make_samples([4] * 400)
    samples.rows_N[200:] = samples.rows_N[:200]  # every row twice
    train, val = split_validation(samples, fraction=0.2)
    assert len(train) + len(val) == 400
    assert 40 < len(val) < 130
    assert not set(train.rows_N.tolist()) & set(val.rows_N.tolist())
    some = samples.subset(range(150), name="some")
    _, val_of_some = split_validation(some, fraction=0.2)
    assert set(val_of_some.rows_N.tolist()) == set(some.rows_N.tolist()) & set(val.rows_N.tolist())
    _, few = split_validation(samples, fraction=0.2, max_rows=5)
    assert len(set(few.rows_N.tolist())) == 5


def test_a_subset_holds_the_samples_asked_for() -> None:
    samples = make_samples([3, 5, 2, 7])
    subset = samples.subset([2, 0], name="part")
    assert [subset.sample(k)[0].tolist() for k in (0, 1)] == [
        samples.sample(k)[0].tolist() for k in (2, 0)
    ]
    assert subset.num_targets == samples.targets_N[[2, 0]].sum()


def test_a_host_that_cannot_pin_is_named_once_and_the_batches_still_arrive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """WSL2 refuses at some amount of memory; the card of this test is the CPU."""
    to = torch.Tensor.to
    attempts = []

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        attempts.append(tensor)
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr("solotune.data.batch._may_pin", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: to(tensor, "cpu", copy=True))
    batches = list(make_loader(make_samples([5, 9]), batch_size=1, max_seq_len=9, seed=0).epoch(0))
    for batch in batches:
        moved = batch.to("cuda")
        assert moved.tokens_BS.equal(batch.tokens_BS)
        assert moved.tokens_BS is not batch.tokens_BS
    printed = capsys.readouterr().out
    assert printed.count("cannot be pinned in host memory (CUDA error: out of memory)") == 1
    assert (len(batches), len(attempts), printed.count("\n")) == (2, 1, 1)


@pytest.mark.gpu
def test_a_batch_reaches_the_card_through_pinned_memory_without_a_sync() -> None:
    (batch,) = make_loader(make_samples([9, 4]), batch_size=1, max_seq_len=16, seed=1).epoch(0)
    batch.to("cuda")  # the first pinned blocks are allocated here
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.tokens_BS.is_cuda
    assert not moved.host_segments_BM.is_cuda
    assert torch.equal(moved.tokens_BS.cpu(), batch.tokens_BS)


def parts_of(batches: list[Batch]) -> list[list[int]]:
    """The lengths of the segments of each row."""
    return [
        [length for length in row if length]
        for batch in batches
        for row in batch.segments_BM.tolist()
    ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sample_over_twice_the_pack_is_split_in_three(shuffle: bool) -> None:
    """Field case 10."""
    samples = make_samples([121], batching=Batching(split_across_pack=True))
    loader = make_loader(samples, batch_size=1, max_seq_len=60, seed=1, shuffle=shuffle)
    batches = list(loader.epoch(0))
    assert sorted(parts_of(batches)) == [[1], [60], [60]]
    assert sum(batch.num_tokens for batch in batches) == 121
    assert max(int(batch.positions_BS.max()) for batch in batches) == 59
    tokens = [token for batch in batches for found, _, _ in segments_of(batch) for token in found]
    assert sorted(tokens) == list(range(1, 122))


def test_split_packs_keep_the_tail() -> None:
    """Field case 11."""
    samples = make_samples([6, 3], batching=Batching(split_across_pack=True))
    loader = make_loader(samples, batch_size=1, max_seq_len=4, seed=1, shuffle=False)
    assert [sum(row) for row in parts_of(list(loader.epoch(0)))] == [4, 4, 1]


@settings(deadline=None)
@given(lengths_lists, st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_split_packs_hold_each_token_and_each_target_once(
    lengths: list[int], batch_size: int, capacity: int, shuffle: bool
) -> None:
    samples = make_samples(lengths, batching=Batching(split_across_pack=True))
    loader = make_loader(
        samples, batch_size=batch_size, max_seq_len=capacity, seed=1, shuffle=shuffle
    )
    following = {}
    for index in range(len(samples)):
        tokens, trained = samples.sample(index)
        wanted = np.where(trained[1:], tokens[1:], IGNORED).tolist()
        following |= dict(zip(tokens.tolist(), [*wanted, IGNORED], strict=True))
    for epoch in range(2):
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader)
        assert sum(batch.num_targets for batch in batches) == loader.num_targets
        parts = [part for batch in batches for part in segments_of(batch)]
        found = {
            t: label for tokens, labels, _ in parts for t, label in zip(tokens, labels, strict=True)
        }
        assert found == following
        assert sum(len(tokens) for tokens, _, _ in parts) == len(following)
        for tokens, _, positions in parts:
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
            assert positions == list(range(len(tokens)))
        full = [sum(row) for row in parts_of(batches)]
        assert sorted(full)[1:] == [capacity] * (len(full) - 1)
        assert max(parts_of(batches)[0]) == max(map(max, parts_of(batches)))


@settings(deadline=None)
@given(lengths_lists, st.integers(32, 200), st.booleans())
def test_batches_by_tokens_stay_within_them_and_hold_every_row_once(
    lengths: list[int], budget: int, shuffle: bool
) -> None:
    samples = make_samples(lengths, batching=Batching(packed=False, max_tokens_per_batch=budget))
    loader = make_loader(samples, batch_size=1, max_seq_len=32, seed=1, shuffle=shuffle)
    batches = list(loader.epoch(1))
    sizes = [batch.tokens_BS.numel() for batch in batches]
    assert max(sizes) <= budget
    assert sizes[0] == max(sizes)
    assert sum(sizes) == loader.num_slots
    assert sorted(row[0] for row in parts_of(batches)) == sorted(lengths)
    longest = [batch.tokens_BS.size(1) for batch in batches]
    for batch, row_length in zip(batches, longest, strict=True):  # no room for one row more
        shorter = [length for length in longest if length < row_length]
        assert (len(batch.tokens_BS) + 1) * row_length > budget or not shorter


def test_wishes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="split_across_pack=True cuts packs"):
        Batching(packed=False, split_across_pack=True)
    with pytest.raises(ConfigError, match="max_tokens_per_batch=64 is for unpacked rows"):
        Batching(max_tokens_per_batch=64)
    samples = make_samples([40], batching=Batching(packed=False, max_tokens_per_batch=39))
    with pytest.raises(ConfigError, match="max_tokens_per_batch=39 is below the 40 tokens"):
        make_loader(samples, batch_size=1, max_seq_len=64, seed=1)


def test_a_batch_size_without_effect_is_printed() -> None:
    samples = make_samples([4], batching=Batching(packed=False, max_tokens_per_batch=64))
    loader = make_loader(samples, batch_size=2, max_seq_len=64, seed=1)
    assert loader.warnings({}) == [
        "batches of at most 64 tokens with filler (dataset.max_tokens_per_batch): batch_size=2 has "
        "no effect"
    ]

"""Mixtures of data sets: counts, order, and that an epoch can be made from any place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solotune.data import Batching, Report, SampleSet, make_loader, mixed, split_validation
from solotune.data.mixing import MixedSamples
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import Tokenizer

NO_TOKENIZER: Tokenizer = None  # type: ignore[assignment]  # the sets are made
sizes_lists = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def make_set(size: int, *, first: int, batching: Batching | None = None) -> SampleSet:
    """`size` samples of 2 to 20 tokens; the first token of each is its name."""
    random = np.random.default_rng(first)
    lengths_N = random.integers(2, 21, size)
    starts_N = np.cumsum(lengths_N) - lengths_N
    tokens_T = np.zeros(lengths_N.sum(), np.int32)
    tokens_T[starts_N] = first + np.arange(size)
    return SampleSet(
        tokens_T=tokens_T,
        trained_T=np.ones(len(tokens_T), np.uint8),
        lengths_N=lengths_N,
        rows_N=random.integers(0, 2**64, size, dtype=np.uint64),
        report=Report(f"set at {first}", "text", rows=size),
        batching=batching,
    )


def make_mixture(sizes: list[int], weights: list[float] | None, **options) -> MixedSamples:
    batching = options.pop("batching", None)
    sets = [make_set(size, first=1000 * (k + 1), batching=batching) for k, size in enumerate(sizes)]
    samples = mixed(NO_TOKENIZER, datasets=sets, weights=weights, **options)
    assert isinstance(samples, MixedSamples)
    return samples


def names_of(samples: SampleSet, *, seed: int = 1, epoch: int = 0, start: int = 0) -> list[int]:
    """The samples of an epoch by name, in the order of the batches."""
    loader = make_loader(samples, batch_size=2, max_seq_len=32, seed=seed)
    names = []
    for batch in loader.epoch(epoch, start):
        names += [token for token in batch.tokens_BS.flatten().tolist() if token]
    return names


@settings(deadline=None, max_examples=40)
@given(sizes_lists, st.data(), st.sampled_from(["first_exhausted", "all_exhausted"]))
def test_counts_follow_the_weights_to_within_one_in_every_epoch(
    sizes: list[int], data: st.DataObject, strategy
) -> None:
    numbers = st.floats(0.1, 10)
    weights = data.draw(st.lists(numbers, min_size=len(sizes), max_size=len(sizes)))
    samples = make_mixture(sizes, weights, stopping_strategy=strategy)
    longest = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    scale = min(longest) if strategy == "first_exhausted" else max(longest)
    batches = len(make_loader(samples, batch_size=2, max_seq_len=32, seed=1))
    for epoch in range(3):
        loader = make_loader(samples, batch_size=2, max_seq_len=32, seed=1)
        assert len(list(loader.epoch(epoch))) == batches
        names = names_of(samples, epoch=epoch)
        counts = [sum(name // 1000 == k + 1 for name in names) for k in range(len(sizes))]
        assert counts == samples.counts
        for k, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            assert abs(counts[k] - scale * weight) < 1
            own = [name for name in names if name // 1000 == k + 1]
            repeats = np.unique(own, return_counts=True)[1]
            assert repeats.max() - (repeats.min() if len(repeats) == size else 0) <= 1
            assert (repeats.max() == 1) or strategy == "all_exhausted"


def test_without_weights_every_sample_comes_once() -> None:
    samples = make_mixture([7, 3, 12], None)
    wanted = [*range(1000, 1007), *range(2000, 2003), *range(3000, 3012)]
    for epoch in range(2):
        assert sorted(names_of(samples, epoch=epoch)) == wanted


def test_all_samples_of_a_large_set_have_their_turn_before_one_comes_again() -> None:
    samples = make_mixture([60, 10], [1, 1])
    assert samples.counts == [10, 10]
    seen = [set(names_of(samples, epoch=epoch)) for epoch in range(6)]
    of_first = [{name for name in names if name < 2000} for names in seen]
    assert sorted(name for names in of_first for name in names) == list(range(1000, 1060))


@pytest.mark.parametrize("packed", [True, False])
def test_the_order_is_a_function_of_seed_and_epoch_and_can_start_anywhere(packed: bool) -> None:
    def names(**options) -> list[int]:
        return names_of(make_mixture([40, 15], [3, 1], packed=packed), **options)

    assert names(epoch=1) == names(epoch=1)
    assert names(epoch=1) != names(epoch=2)
    assert names(seed=1) != names(seed=2)
    whole, later = names(epoch=2), names(epoch=2, start=3)
    assert later == whole[-len(later) :]
    assert 0 < len(later) < len(whole)


@pytest.mark.parametrize("packed", [True, False])
def test_the_longest_row_is_first_and_no_row_of_a_later_epoch_is_longer(packed: bool) -> None:
    samples = make_mixture([50, 9], [1, 1], packed=packed)
    loader = make_loader(samples, batch_size=1, max_seq_len=32, seed=4)
    first = next(loader.epoch(0))
    for epoch in range(8):
        for batch in loader.epoch(epoch):
            assert batch.tokens_BS.numel() <= first.tokens_BS.numel()
            assert batch.segments_BM.max() <= first.segments_BM.max()


def test_what_an_epoch_holds_is_printed_for_each_set() -> None:
    lines = make_mixture([60, 10], [9, 1]).lines()
    assert "dataset 0: set at 1000, format text, 60 rows" in lines
    assert "dataset 1: set at 2000, format text, 10 rows" in lines
    assert lines[-1] == (
        "dataset: an epoch is 67 samples: 60 of dataset 0 (89.6 %), 7 of dataset 1 (10.4 %)"
    )


def test_validation_rows_come_from_all_sets_once_and_leave_the_weights_to_training() -> None:
    samples = make_mixture([200, 100], [1, 1])
    train, val = split_validation(samples, fraction=0.2)
    assert isinstance(train, MixedSamples)
    assert train.counts == [len(train.parts[1])] * 2
    held_out = names_of(val)
    assert len(held_out) == len(val) == len(set(held_out))
    assert {name // 1000 for name in held_out} == {1, 2}
    seen = {name for epoch in range(4) for name in names_of(train, epoch=epoch)}
    assert not seen & set(held_out)


def test_mixtures_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 1 numbers for 2 sets"):
        make_mixture([3, 3], [1])
    with pytest.raises(ConfigError, match="use numbers above 0"):
        make_mixture([3, 3], [1, 0])
    with pytest.raises(ConfigError, match="is empty"):
        mixed(NO_TOKENIZER, datasets=[])
    sets = [make_set(3, first=1), make_set(3, first=9, batching=Batching(packed=False))]
    with pytest.raises(ConfigError, match="differ in packed"):
        mixed(NO_TOKENIZER, datasets=sets)
    with pytest.raises(ConfigError, match="split_across_pack=True needs epochs of one length"):
        make_mixture([3, 3], [1, 2], batching=Batching(split_across_pack=True))
    lonely = make_mixture([30, 1], [1, 1])
    with pytest.raises(DataError, match=r"dataset 1 .*no row left"):
        lonely.subset(range(30), name=lonely.name)


def test_the_fingerprint_tells_mixtures_apart() -> None:
    alike = make_mixture([9, 9], [1, 2]).fingerprint()
    assert alike == make_mixture([9, 9], [1, 2]).fingerprint()
    others = [
        make_mixture([9, 9], [2, 1]),
        make_mixture([9, 9], None),
        make_mixture([9, 8], [1, 2]),
    ]
    assert alike not in {other.fingerprint() for other in others}

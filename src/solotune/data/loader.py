"""Batches of one epoch in an order that depends on (seed, epoch) alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from solotune.data.batch import IGNORED, Batch, Segment, batch_key, collate
from solotune.data.rows import EpochRows, Packs, Planner, RowPlan, Single, SplitPacks
from solotune.data.samples import Batching, SampleSet
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import check_vocabulary


class Loader:
    """Makes the batches of any epoch from any position; made by `make_loader`.

    `num_tokens` and `num_targets` are those of one epoch, `num_slots` its tokens with filler;
    `max_segments` is M of all its batches.
    """

    def __init__(
        self,
        samples: SampleSet,
        *,
        batch_size: int,
        max_seq_len: int,
        seed: int,
        shuffle: bool,
        batching: Batching,
    ) -> None:
        self.samples, self.batch_size, self.max_seq_len = samples, batch_size, max_seq_len
        self.seed, self.shuffle, self.batching = seed, shuffle, batching
        planned_N = samples.planned_lengths(seed)
        self._planner = _planner(planned_N, batching, batch_size=batch_size, capacity=max_seq_len)
        self.num_rows, self.max_segments = self._planner.num_rows, self._planner.max_segments
        first_N = samples.drawn(seed, 0)
        self.num_tokens = int(samples.lengths_N[first_N].sum())
        self.num_targets = int(samples.targets_N[first_N].sum())
        self.num_slots = self._planner.num_slots

    def __len__(self) -> int:
        return self._planner.num_batches

    def fingerprint(self) -> str:
        """Text that is equal for loaders which give the same batches in the same order."""
        kind, size = "packed", f"{self.batch_size} x {self.max_seq_len}"
        if self.batching.split_across_pack:
            kind = "packed and split"
        elif not self.batching.packed:
            kind = "unpacked"
        if self.batching.max_tokens_per_batch:
            size = f"{self.batching.max_tokens_per_batch} tokens"
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        return f"{self.samples.fingerprint()} {size} {kind} {order}"

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 0) from batch `start` on, on the host."""
        for index, rows in enumerate(self.plan(number).batches(start), start):
            row_length = self.max_seq_len if self.batching.packed else max(r.size for r in rows)
            yield collate(
                [self.segments(row) for row in rows],
                row_length=row_length,
                max_segments=self.max_segments,
                key=batch_key(self.seed, number, index),
            )

    def plan(self, number: int) -> EpochRows:
        """The rows and batches of epoch `number`; the batch that needs the most memory is first."""
        return self._planner.plan(
            self.samples.drawn(self.seed, number),
            self.samples.lengths_N,
            self.samples.targets_N,
            np.random.default_rng([self.seed, number]) if self.shuffle else None,
        )

    def segments(self, row: RowPlan) -> list[Segment]:
        """The tokens and flags of a row, sample by sample."""
        segments, skip, room = [], row.skip, row.size
        for index in row.samples.tolist():
            tokens, trained = self.samples.sample(index)
            stop = min(len(tokens), skip + room)
            goes_on = stop < len(tokens) and trained[stop]
            following = int(tokens[stop]) if goes_on else IGNORED
            segments.append(Segment(tokens[skip:stop], trained[skip:stop], following))
            skip, room = 0, room - (stop - skip)
        return segments

    def warnings(self, config: Mapping[str, Any]) -> list[str]:
        """What to print: keys without effect, rows longer than the model of a config.json knows."""
        lines = []
        if self.batching.max_tokens_per_batch is not None:
            lines.append(
                f"batches of at most {self.batching.max_tokens_per_batch} tokens with filler "
                f"(dataset.max_tokens_per_batch): batch_size={self.batch_size} has no effect"
            )
        longest = int(self.samples.lengths_N.max())
        if self.batching.split_across_pack:
            longest = min(longest, self.max_seq_len)
        known = config.get("max_position_embeddings")
        if known is not None and longest > known:
            lines.append(
                f"warning: {longest} tokens in a row, {known} positions known to the model"
            )
        return lines


def _planner(
    planned_N: np.ndarray, batching: Batching, *, batch_size: int, capacity: int
) -> Planner:
    if batching.split_across_pack:
        return SplitPacks(planned_N, capacity=capacity, batch_size=batch_size)
    if batching.packed:
        return Packs(planned_N, capacity=capacity, batch_size=batch_size)
    return Single(planned_N, batch_size=batch_size, max_tokens=batching.max_tokens_per_batch)


def make_loader(
    samples: SampleSet,
    *,
    batch_size: int,
    max_seq_len: int,
    seed: int,
    shuffle: bool = True,
    packed: bool | None = None,
    vocab_size: int | None = None,
) -> Loader:
    """A Loader of batches of `batch_size` rows, or of the tokens that the data set wishes.

    Packed rows hold `max_seq_len` tokens of several samples; unpacked rows hold one sample, grouped
    by length and filled to the longest of their batch. `packed` None takes the wish of the data
    set. `vocab_size` is the model's. Raises ConfigError for sizes that cannot be and for tokens
    outside the vocabulary, DataError for a data set without samples.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: use 1 or more")
    if not len(samples):
        raise DataError(f"{samples.name} has no samples")
    if vocab_size is not None:
        check_vocabulary(samples.largest_token, vocab_size)
    batching = samples.batching if packed is None else replace(samples.batching, packed=packed)
    longest = int(samples.lengths_N.max())
    if longest > max_seq_len and not batching.split_across_pack:
        raise ConfigError(
            f"max_seq_len={max_seq_len} is below the {longest} tokens of the longest sample of "
            f"{samples.name}"
        )
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "max_seq_len": max_seq_len,
        "seed": seed,
        "shuffle": shuffle,
        "batching": batching,
    }
    from solotune.data.streaming import StreamedSamples, StreamLoader  # which builds on Loader

    if isinstance(samples, StreamedSamples):
        return StreamLoader(samples, **options, vocab_size=vocab_size)
    return Loader(samples, **options)

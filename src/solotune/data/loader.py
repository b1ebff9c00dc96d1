"""Batches of one epoch in an order that depends on (seed, epoch) alone.

The lengths decide which shapes an epoch has, once; each epoch then draws which sample of a length
takes which place and the order of the batches. So all epochs have the same number of batches,
tokens and targets.

N samples, P rows (packs) of an epoch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from solotune.data.batch import Batch, collate
from solotune.data.packing import best_fit
from solotune.data.samples import SampleSet
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import check_vocabulary


class Loader:
    """Makes the batches of any epoch from any position; made by `make_loader`.

    `num_tokens` and `num_targets` are those of one epoch; `max_segments` is M of all its batches.
    """

    def __init__(
        self,
        samples: SampleSet,
        *,
        batch_size: int,
        max_seq_len: int,
        seed: int,
        shuffle: bool,
        packed: bool,
    ) -> None:
        self.samples, self.batch_size, self.max_seq_len = samples, batch_size, max_seq_len
        self.seed, self.shuffle, self.packed = seed, shuffle, packed
        self.num_tokens, self.num_targets = samples.num_tokens, samples.num_targets
        self._lengths_N, self._targets_N = samples.lengths_N, samples.targets_N
        # ranks: samples by descending length; the pack of each rank is the same in all epochs
        ranked = -np.sort(-self._lengths_N)
        self._packs_N = best_fit(ranked, capacity=max_seq_len) if packed else np.arange(len(ranked))
        self.num_rows = int(self._packs_N.max()) + 1
        self._by_pack = np.argsort(self._packs_N, kind="stable")
        self._pack_starts = np.searchsorted(
            self._packs_N[self._by_pack], np.arange(self.num_rows + 1)
        )
        self.max_segments = int(np.diff(self._pack_starts).max())

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def fingerprint(self) -> str:
        """Text that is equal for loaders which give the same batches in the same order."""
        rows = "packed" if self.packed else "unpacked"
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        size = f"{self.batch_size} x {self.max_seq_len}"
        return f"{self.samples.fingerprint()} {size} {rows} {order}"

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 0) from batch `start` on, on the host."""
        for rows in self.plan(number)[start:]:
            segments = [[self.samples.sample(i) for i in row] for row in rows]
            longest = max(sum(len(tokens) for tokens, _ in row) for row in segments)
            row_length = self.max_seq_len if self.packed else longest
            yield collate(segments, row_length=row_length, max_segments=self.max_segments)

    def warnings(self, config: Mapping[str, Any]) -> list[str]:
        """Return what to print where rows and the model of a config.json do not go together."""
        longest, known = int(self._lengths_N.max()), config.get("max_position_embeddings")
        if known is None or longest <= known:
            return []
        return [f"warning: {longest} tokens in a row, {known} positions known to the model"]

    def plan(self, number: int) -> list[list[np.ndarray]]:
        """The samples of each row of each batch; the batch that needs the most memory is first."""
        random = np.random.default_rng([self.seed, number])
        indexes = (
            random.permutation(len(self.samples)) if self.shuffle else np.arange(len(self.samples))
        )
        ranks = indexes[np.argsort(-self._lengths_N[indexes], kind="stable")]
        members = ranks[self._by_pack]
        rows = [
            members[a:b] for a, b in zip(self._pack_starts[:-1], self._pack_starts[1:], strict=True)
        ]
        if self.packed:
            if self.shuffle:
                rows = [rows[i] for i in random.permutation(len(rows))]
            # The costliest row first, before batches are cut: the same rows make a step however
            # batch_size and accumulation share them.
            rows = _first([self._cost([row]) for row in rows], rows)
        batches = [rows[k : k + self.batch_size] for k in range(0, len(rows), self.batch_size)]
        if not self.packed and self.shuffle:  # rows of like length stay together
            last = batches[-1:] if len(batches[-1]) < self.batch_size else []
            full = batches[: len(batches) - len(last)]
            batches = [full[i] for i in random.permutation(len(full))] + last
        if self.packed:
            return batches
        return _first([self._cost(batch) for batch in batches], batches)

    def _cost(self, batch: list[np.ndarray]) -> tuple[int, int, int]:
        """What a batch costs in memory: its size with filler, longest segment, targets."""
        longest_row = max(int(self._lengths_N[row].sum()) for row in batch)
        segment = max(int(self._lengths_N[row].max()) for row in batch)
        targets = sum(int(self._targets_N[row].sum()) for row in batch)
        return len(batch) * (self.max_seq_len if self.packed else longest_row), segment, targets


def _first(costs: list, items: list) -> list:
    """The items with the costliest in front."""
    first = costs.index(max(costs))
    return [items[first], *items[:first], *items[first + 1 :]]


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
    """A Loader of batches of `batch_size` rows.

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
        check_vocabulary(int(samples.tokens_T.max()), vocab_size)
    longest = int(samples.lengths_N.max())
    if longest > max_seq_len:
        raise ConfigError(
            f"max_seq_len={max_seq_len} is below the {longest} tokens of the longest sample of "
            f"{samples.name}"
        )
    return Loader(
        samples,
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        seed=seed,
        shuffle=shuffle,
        packed=samples.packed if packed is None else packed,
    )

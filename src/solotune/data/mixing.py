"""Several data sets as one: end to end, or in each epoch so many samples of each.

N samples of a set.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from solotune.data.report import Report
from solotune.data.samples import Batching, SampleSet
from solotune.data.streaming import StreamedSamples
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import Tokenizer

Stopping = Literal["first_exhausted", "all_exhausted"]


def mixed(
    tokenizer: Tokenizer,
    *,
    datasets: list[SampleSet],
    weights: list[float] | None = None,
    stopping_strategy: Stopping = "first_exhausted",
    packed: bool | None = None,
) -> SampleSet:
    """Several data sets as one.

    Without `weights` an epoch is every sample of every set once. `weights` are the shares of the
    samples of an epoch, in any scale: `first_exhausted` makes the epoch as long as the set that is
    used up first lasts, so that none repeats within it; `all_exhausted` as long as the last one
    lasts, and the others repeat. `packed` None is what the sets agree on. Raises ConfigError.
    """
    del tokenizer  # it has made the sets
    if not datasets:
        raise ConfigError("dataset.datasets is empty: name one set or more")
    streamed = [k for k, samples in enumerate(datasets) if isinstance(samples, StreamedSamples)]
    if streamed:
        raise ConfigError(
            f"dataset.datasets.{streamed[0]} is streamed, and a mixture needs the lengths of all "
            "rows: set its streaming to False"
        )
    batchings = {samples.batching for samples in datasets}
    if packed is not None:
        batchings = {replace(batching, packed=packed) for batching in batchings}
    if len(batchings) > 1:
        raise ConfigError(
            "the sets of dataset.datasets differ in packed, split_across_pack or "
            "max_tokens_per_batch: give all the same, as they share batches"
        )
    for k, samples in enumerate(datasets):
        samples.name = f"dataset {k}"
    return MixedSamples(
        datasets, weights=weights, stopping_strategy=stopping_strategy, batching=batchings.pop()
    )


class MixedSamples(SampleSet):
    """The samples of several sets, set after set, of which an epoch draws so many of each.

    `counts` are the samples of each set in an epoch. The choice is stratified: a set is ordered by
    length and cut into as many groups as samples are wanted, and each epoch takes the next one of
    each group. So all samples of a group come before one comes again, and the lengths of an epoch
    have bounds that hold for every epoch.
    """

    def __init__(
        self,
        parts: Sequence[SampleSet],
        *,
        weights: Sequence[float] | None = None,
        stopping_strategy: Stopping = "first_exhausted",
        batching: Batching | None = None,
        name: str = "dataset",
    ) -> None:
        self.parts = list(parts)
        self.weights = None if weights is None else list(weights)
        self.stopping_strategy: Stopping = stopping_strategy
        self.batching = batching or Batching()
        self.name, self.facts = name, []
        self.counts = _counts([len(part) for part in parts], self.weights, stopping_strategy)
        if self.weights is not None and self.batching.split_across_pack:
            raise ConfigError(
                "dataset.split_across_pack=True needs epochs of one length, and weights draw other "
                "samples in each: leave out one of the two"
            )
        self._firsts = np.cumsum([0, *(len(part) for part in self.parts)])
        self.lengths_N = np.concatenate([part.lengths_N for part in self.parts])
        self.targets_N = np.concatenate([part.targets_N for part in self.parts])
        self.rows_N = np.concatenate([part.rows_N for part in self.parts])
        sources = ", ".join(part.report.source for part in self.parts)
        self.report = Report(source=sources, format=None)
        for part in self.parts:
            self.report.add(part.report)
        self._groups: dict[int, list[_Groups]] = {}  # by seed

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (int32) and trained flags (uint8) of one sample, as views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self.parts[part].sample(index - int(self._firsts[part]))

    @property
    def largest_token(self) -> int:
        """The highest token id."""
        return max(part.largest_token for part in self.parts)

    def planned_lengths(self, seed: int) -> np.ndarray:
        """Lengths that hold for all epochs: sorted, no epoch's samples are longer, one by one."""
        return np.concatenate([groups.longest() for groups in self._grouped(seed)])

    def drawn(self, seed: int, epoch: int) -> np.ndarray:
        """The samples of an epoch, set after set."""
        pairs = zip(self._firsts[:-1], self._grouped(seed), strict=True)
        return np.concatenate([first + groups.drawn(epoch) for first, groups in pairs])

    def _grouped(self, seed: int) -> list["_Groups"]:
        if seed not in self._groups:
            self._groups[seed] = [
                _Groups(part.lengths_N, count, np.random.default_rng([seed, k]))
                for k, (part, count) in enumerate(zip(self.parts, self.counts, strict=True))
            ]
        return self._groups[seed]

    def subset(self, indexes: Sequence[int] | np.ndarray, *, name: str) -> "MixedSamples":
        """The samples at `indexes`, which ascend, as a mixture with the same weights.

        Raises DataError where nothing of a set with a weight is left.
        """
        indexes = np.asarray(indexes, np.int64)
        cuts = np.searchsorted(indexes, self._firsts)
        parts, weights = [], []
        for k, part in enumerate(self.parts):
            inside = indexes[cuts[k] : cuts[k + 1]] - self._firsts[k]
            if len(inside):
                parts.append(part.subset(inside, name=part.name))
                weights.append(self.weights[k] if self.weights else 1.0)
            elif self.weights is not None and name == self.name:
                raise DataError(
                    f"{part.name} ({part.report.source}) has no row left beside the validation "
                    "rows: set val_fraction=0, or dataset_val"
                )
        return MixedSamples(
            parts,
            weights=weights if self.weights is not None else None,
            stopping_strategy=self.stopping_strategy,
            batching=self.batching,
            name=name,
        )

    def each_once(self) -> SampleSet:
        """The same samples without weights."""
        return MixedSamples(self.parts, batching=self.batching, name=self.name)

    def fingerprint(self) -> str:
        """A hash of the sets, their order and what is drawn of each: 16 hexadecimal digits."""
        parts = [part.fingerprint() for part in self.parts]
        text = repr((parts, self.counts, self.weights is not None))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def lines(self) -> list[str]:
        """The facts to print before training: those of each set, and the shares of an epoch."""
        lines = [line for part in self.parts for line in part.lines()]
        total = sum(self.counts)
        shares = ", ".join(
            f"{count:,} of {part.name} ({100 * count / total:.1f} %)"
            for part, count in zip(self.parts, self.counts, strict=True)
        )
        return [*lines, f"{self.name}: an epoch is {total:,} samples: {shares}"]


class _Groups:
    """`count` groups of like length, ready to give one sample each for any epoch.

    Where more samples are wanted than the set has, all of them come once or more, and the groups
    give the rest.
    """

    def __init__(self, lengths_N: np.ndarray, count: int, random: np.random.Generator) -> None:
        self._lengths_N = lengths_N
        self._copies, self._rest = divmod(count, len(lengths_N))
        shuffled = random.permutation(len(lengths_N))
        self._ranked = shuffled[np.argsort(-lengths_N[shuffled], kind="stable")]
        self._bounds = np.arange(self._rest + 1) * len(lengths_N) // max(self._rest, 1)
        # where each group begins; the longest sample of all is in the first epoch
        self._phases = random.integers(0, 2**31, self._rest)
        self._phases[:1] = 0

    def longest(self) -> np.ndarray:
        """The length of the longest sample of each group, and of what comes in every epoch."""
        rest = self._lengths_N[self._ranked[self._bounds[:-1]]] if self._rest else []
        return np.concatenate([np.tile(self._lengths_N, self._copies), rest]).astype(np.int64)

    def drawn(self, epoch: int) -> np.ndarray:
        """The samples of an epoch."""
        every = np.tile(np.arange(len(self._lengths_N)), self._copies)
        if not self._rest:
            return every
        places = self._bounds[:-1] + (self._phases + epoch) % np.diff(self._bounds)
        return np.concatenate([every, self._ranked[places]])


def _counts(sizes: list[int], weights: list[float] | None, strategy: Stopping) -> list[int]:
    """The samples of each set in an epoch, within one of its share."""
    if weights is None:
        return sizes
    if len(weights) != len(sizes):
        raise ConfigError(
            f"dataset.weights has {len(weights)} numbers for {len(sizes)} sets: give one each"
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"dataset.weights={weights}: use numbers above 0, or leave a set out")
    epochs = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    scale = min(epochs) if strategy == "first_exhausted" else max(epochs)
    counts = [max(1, round(scale * weight)) for weight in weights]
    last = epochs.index(scale)
    return [
        size if k == last else count
        for k, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]

"""Which samples share a row in one epoch, and which rows a batch: on arrays, without tokens.

The lengths decide which shapes an epoch has, once; each epoch then draws which sample takes which
place and the order of the batches. So all epochs have the same number of rows and batches.

N samples of an epoch, P rows of an epoch, C batches of an epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from solotune.data.packing import best_fit
from solotune.errors import ConfigError


class RowPlan(NamedTuple):
    """`size` tokens of the `samples` one after the other, from token `skip` of the first one on."""

    samples: np.ndarray
    skip: int
    size: int


@dataclass(frozen=True)
class EpochRows:
    """The rows of an epoch in order: row p holds `members_N[first_P[p] : stop_P[p]]`.

    Batch c is the rows `bounds[c]` to `bounds[c + 1]`.
    """

    members_N: np.ndarray
    first_P: np.ndarray
    stop_P: np.ndarray
    skip_P: np.ndarray
    size_P: np.ndarray  # tokens
    bounds: np.ndarray

    def batches(self, start: int = 0) -> Iterator[list[RowPlan]]:
        """The rows of each batch from batch `start` on."""
        for c in range(start, len(self.bounds) - 1):
            yield [self._row(p) for p in range(self.bounds[c], self.bounds[c + 1])]

    def _row(self, p: int) -> RowPlan:
        samples = self.members_N[self.first_P[p] : self.stop_P[p]]
        return RowPlan(samples, int(self.skip_P[p]), int(self.size_P[p]))


class Planner(Protocol):
    """Lays the samples of an epoch into rows and batches; the costliest batch comes first."""

    num_rows: int
    num_batches: int
    num_slots: int  # tokens and filler of all batches
    max_segments: int  # of a row

    def plan(
        self,
        indexes_N: np.ndarray,
        lengths_N: np.ndarray,
        targets_N: np.ndarray,
        random: np.random.Generator | None,
    ) -> EpochRows:
        """The rows of `indexes_N`, in the order of `random` (None: in their own).

        `lengths_N` and `targets_N` are those of all samples of the set.
        """
        ...


class Packs:
    """Best-fit packs, made once for the lengths of an epoch in descending order."""

    def __init__(self, planned_N: np.ndarray, *, capacity: int, batch_size: int) -> None:
        self._batch_size = batch_size
        packs_N = best_fit(-np.sort(-planned_N), capacity=capacity)
        self.num_rows = int(packs_N.max()) + 1
        self.num_batches = -(-self.num_rows // batch_size)
        self.num_slots = self.num_rows * capacity
        self._by_pack = np.argsort(packs_N, kind="stable")
        self._starts = np.searchsorted(packs_N[self._by_pack], np.arange(self.num_rows + 1))
        self.max_segments = int(np.diff(self._starts).max())

    def plan(
        self,
        indexes_N: np.ndarray,
        lengths_N: np.ndarray,
        targets_N: np.ndarray,
        random: np.random.Generator | None,
    ) -> EpochRows:
        """The rank of a sample by its length decides its pack."""
        members_N = _ranked(indexes_N, lengths_N, random)[self._by_pack]
        first_P, stop_P = self._starts[:-1], self._starts[1:]
        size_P = np.add.reduceat(lengths_N[members_N], first_P)
        longest_P = np.maximum.reduceat(lengths_N[members_N], first_P)
        targets_P = np.add.reduceat(targets_N[members_N], first_P)
        order = np.arange(self.num_rows) if random is None else random.permutation(self.num_rows)
        # the costliest row first, before batches are cut: the same rows make a step however
        # batch_size and accumulation share them
        order = _costliest_first(order, longest_P, targets_P)
        return EpochRows(
            members_N=members_N,
            first_P=first_P[order],
            stop_P=stop_P[order],
            skip_P=np.zeros(self.num_rows, np.int64),
            size_P=size_P[order],
            bounds=_bounds_by_rows(self.num_rows, self._batch_size),
        )


class SplitPacks:
    """Full packs: samples end to end, cut where a pack is full."""

    def __init__(self, planned_N: np.ndarray, *, capacity: int, batch_size: int) -> None:
        self._batch_size, self._capacity = batch_size, capacity
        self.num_rows = -(-int(planned_N.sum()) // capacity)
        self.num_batches = -(-self.num_rows // batch_size)
        self.num_slots = self.num_rows * capacity
        shortest = np.cumsum(np.sort(planned_N))  # as many as a row can hold, and parts of two more
        whole = int(np.searchsorted(shortest, capacity, side="right"))
        self.max_segments = min(whole + 2, capacity, len(planned_N))

    def plan(
        self,
        indexes_N: np.ndarray,
        lengths_N: np.ndarray,
        targets_N: np.ndarray,
        random: np.random.Generator | None,
    ) -> EpochRows:
        """Targets are not counted by row: what a row costs goes by its longest segment alone."""
        members_N = indexes_N if random is None else random.permutation(indexes_N)
        ends_N = np.cumsum(lengths_N[members_N])
        starts_P = np.arange(self.num_rows) * self._capacity
        ends_P = np.minimum(starts_P + self._capacity, ends_N[-1])
        first_P = np.searchsorted(ends_N, starts_P, side="right")
        cuts = np.union1d(starts_P, ends_N)  # where segments end; the first one is 0
        segments_P = np.searchsorted(cuts, starts_P)
        longest_P = np.maximum.reduceat(np.diff(cuts), segments_P)
        order = np.arange(self.num_rows) if random is None else random.permutation(self.num_rows)
        order = _costliest_first(order, longest_P)
        return EpochRows(
            members_N=members_N,
            first_P=first_P[order],
            stop_P=np.searchsorted(ends_N, ends_P, side="left")[order] + 1,
            skip_P=(starts_P - (ends_N - lengths_N[members_N])[first_P])[order],
            size_P=(ends_P - starts_P)[order],
            bounds=_bounds_by_rows(self.num_rows, self._batch_size),
        )


class Single:
    """One sample a row; a batch holds rows of like length, so many rows or so many tokens."""

    def __init__(self, planned_N: np.ndarray, *, batch_size: int, max_tokens: int | None) -> None:
        ranked = -np.sort(-planned_N)
        self.num_rows, self.max_segments = len(ranked), 1
        if max_tokens is None:
            self._bounds = _bounds_by_rows(self.num_rows, batch_size)
        else:
            self._bounds = _bounds_by_tokens(ranked, max_tokens)
        self._last_stays = max_tokens is None and self.num_rows % batch_size > 0
        self.num_batches = len(self._bounds) - 1
        self.num_slots = int((np.diff(self._bounds) * ranked[self._bounds[:-1]]).sum())

    def plan(
        self,
        indexes_N: np.ndarray,
        lengths_N: np.ndarray,
        targets_N: np.ndarray,
        random: np.random.Generator | None,
    ) -> EpochRows:
        """A batch that is not full stays the last one."""
        members_N = _ranked(indexes_N, lengths_N, random)
        rows_C = np.diff(self._bounds)
        longest_C = lengths_N[members_N[self._bounds[:-1]]]
        targets_C = np.add.reduceat(targets_N[members_N], self._bounds[:-1])
        order = np.arange(self.num_batches)
        if random is not None:
            moved = self.num_batches - self._last_stays
            order[:moved] = random.permutation(moved)
        order = _costliest_first(order, rows_C * longest_C, longest_C, targets_C)
        bounds = self._bounds.tolist()
        rows = [np.arange(bounds[c], bounds[c + 1]) for c in order.tolist()]
        members_N = members_N[np.concatenate(rows)]
        return EpochRows(
            members_N=members_N,
            first_P=np.arange(self.num_rows),
            stop_P=np.arange(1, self.num_rows + 1),
            skip_P=np.zeros(self.num_rows, np.int64),
            size_P=lengths_N[members_N],
            bounds=np.concatenate([[0], np.cumsum(rows_C[order])]),
        )


def _ranked(
    indexes_N: np.ndarray, lengths_N: np.ndarray, random: np.random.Generator | None
) -> np.ndarray:
    """The samples by descending length, those of one length in the order of `random`."""
    indexes_N = indexes_N if random is None else random.permutation(indexes_N)
    return indexes_N[np.argsort(-lengths_N[indexes_N], kind="stable")]


def _costliest_first(order: np.ndarray, *costs: np.ndarray) -> np.ndarray:
    """`order` with the costliest in front; of `costs` the first decides, then the next one."""
    found = np.lexsort([cost[order] for cost in reversed(costs)])
    worst = [cost[order][found[-1]] for cost in costs]
    same = np.logical_and.reduce(
        [cost[order] == value for cost, value in zip(costs, worst, strict=True)]
    )
    first = int(np.argmax(same))
    return np.concatenate([order[first : first + 1], order[:first], order[first + 1 :]])


def _bounds_by_rows(num_rows: int, batch_size: int) -> np.ndarray:
    return np.append(np.arange(0, num_rows, batch_size), num_rows)


def _bounds_by_tokens(ranked_N: np.ndarray, max_tokens: int) -> np.ndarray:
    """Where batches begin of rows in descending length: rows times the longest fit `max_tokens`."""
    if ranked_N[0] > max_tokens:
        raise ConfigError(
            f"dataset.max_tokens_per_batch={max_tokens} is below the {ranked_N[0]} tokens of the "
            "longest row: raise it, or lower tokenizer.max_seq_len"
        )
    bounds = [0]
    while bounds[-1] < len(ranked_N):
        bounds.append(bounds[-1] + max_tokens // int(ranked_N[bounds[-1]]))
    bounds[-1] = len(ranked_N)
    return np.array(bounds)

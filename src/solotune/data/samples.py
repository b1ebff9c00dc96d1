"""Tokenized samples in flat arrays: 5 bytes a token, whatever the number of rows.

N samples, T tokens of all samples together.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from solotune.data.report import Report
from solotune.errors import ConfigError


@dataclass(frozen=True)
class Batching:
    """What a data set wishes of the loader; see docs/packing.md."""

    packed: bool = True
    split_across_pack: bool = False
    max_tokens_per_batch: int | None = None  # of a batch of unpacked rows, with filler

    def __post_init__(self) -> None:
        if self.split_across_pack and not self.packed:
            raise ConfigError(
                "dataset.split_across_pack=True cuts packs, and dataset.packed=False makes none: "
                "set one of the two"
            )
        if self.max_tokens_per_batch is not None and self.packed:
            raise ConfigError(
                f"dataset.max_tokens_per_batch={self.max_tokens_per_batch} is for unpacked rows: "
                "set dataset.packed=False, or batch_size instead"
            )


class SampleSet:
    """Samples with their trained tokens, read by index.

    `tokens_T` int32 and `trained_T` uint8 hold all samples, in memory or mapped from the cache;
    sample i has `lengths_N[i]` tokens from `starts_N[i]` on, `targets_N[i]` of them targets.
    `rows_N` uint64 is a hash of the row that a sample comes from.
    """

    def __init__(
        self,
        *,
        tokens_T: np.ndarray,
        trained_T: np.ndarray,
        lengths_N: np.ndarray,
        rows_N: np.ndarray,
        report: Report,
        starts_N: np.ndarray | None = None,
        targets_N: np.ndarray | None = None,
        batching: Batching | None = None,
        name: str = "dataset",
        facts: Sequence[str] = (),
        content: str | None = None,
    ) -> None:
        """`starts_N` None: the samples stand one after the other.

        `targets_N` and `content`, the hash of all tokens, are computed where they are None. `facts`
        are printed besides those of the report.
        """
        self.tokens_T, self.trained_T = tokens_T, trained_T
        self.lengths_N, self.rows_N = lengths_N, rows_N
        self.starts_N = np.cumsum(lengths_N) - lengths_N if starts_N is None else starts_N
        if targets_N is None:
            targets_N = count_targets(trained_T, self.starts_N)
        self.targets_N = targets_N
        self.report, self.batching, self.name = report, batching or Batching(), name
        self.facts = list(facts)
        self._content = content

    def __len__(self) -> int:
        return len(self.rows_N)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (int32) and trained flags (uint8) of one sample, as views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self.starts_N[index]
        span = slice(start, start + self.lengths_N[index])
        return self.tokens_T[span], self.trained_T[span]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths_N.sum())

    @property
    def num_targets(self) -> int:
        """Targets of all samples."""
        return int(self.targets_N.sum())

    @property
    def num_duplicates(self) -> int:
        """Samples whose row has come before, with the same content."""
        return len(self) - len(np.unique(self.rows_N))

    @property
    def largest_token(self) -> int:
        """The highest token id."""
        step = 1 << 24  # of a mapped file, so that no temporary is large
        return max(
            int(self.tokens_T[k : k + step].max()) for k in range(0, len(self.tokens_T), step)
        )

    def planned_lengths(self, seed: int) -> np.ndarray:
        """Lengths that hold for all epochs: sorted, no epoch's samples are longer, one by one."""
        return self.lengths_N

    def drawn(self, seed: int, epoch: int) -> np.ndarray:
        """The samples of an epoch: all of them, once."""
        return np.arange(len(self))

    def subset(self, indexes: Sequence[int] | np.ndarray, *, name: str) -> "SampleSet":
        """The samples at `indexes` in that order, as a view; the report stays that of the whole."""
        indexes = np.asarray(indexes, np.int64)
        return SampleSet(
            tokens_T=self.tokens_T,
            trained_T=self.trained_T,
            lengths_N=self.lengths_N[indexes],
            rows_N=self.rows_N[indexes],
            report=replace(self.report),
            starts_N=self.starts_N[indexes],
            targets_N=self.targets_N[indexes],
            batching=self.batching,
            name=name,
            facts=self.facts,
            content=self._content,
        )

    def held_out(self, *, fraction: float, max_rows: int) -> tuple["SampleSet", "SampleSet"]:
        """(training, validation), as `split_validation` says."""
        rows = np.unique(self.rows_N)
        if len(rows) < 2:
            raise ConfigError(
                f"val_fraction={fraction} needs two different rows, found {len(rows)}: set it to 0"
            )
        wanted = int(np.searchsorted(rows, np.uint64(int(fraction * 2**64))))
        chosen = rows[: min(max(wanted, 1), max_rows, len(rows) - 1)]
        is_validation = np.isin(self.rows_N, chosen)
        train = self.subset(np.flatnonzero(~is_validation), name=self.name)
        validation = self.subset(np.flatnonzero(is_validation), name="validation")
        return train, validation.each_once()

    def each_once(self) -> "SampleSet":
        """The samples of which an epoch holds each one once: these."""
        return self

    def fingerprint(self) -> str:
        """A hash of all tokens, their order and what is trained: 16 hexadecimal digits."""
        if self._content is None:
            self._content = content_hash(self.tokens_T, self.trained_T)
        order = (self.starts_N.astype(np.int64), self.lengths_N.astype(np.int64))
        return content_hash(np.frombuffer(self._content.encode(), np.uint8), *order)

    def lines(self) -> list[str]:
        """The facts to print before training."""
        report = self.report
        share = 100 * self.num_targets / max(self.num_tokens, 1)
        lines = [
            f"{self.name}: {report.source}, format {report.format}, {report.rows} rows",
            f"{self.name}: {len(self)} samples, {self.num_tokens} tokens, {self.num_targets} "
            f"targets ({share:.1f} %)",
            f"{self.name}: {report.rows_cut} rows cut at max_seq_len, {report.rows_skipped} "
            "skipped without a target",
        ]
        counted = {
            "rows skipped that could not be read": report.rows_unreadable,
            "turns whose reasoning the chat template leaves out": report.reasoning_lost,
            "trained turns to which the chat template writes no terminator": (
                report.turns_without_terminator
            ),
            "control tokens spelled inside texts, taken as plain text": report.plain_controls,
            "messages whose text the chat template does not show": report.messages_not_rendered,
        }
        lines += [f"{self.name}: {count} {what}" for what, count in counted.items() if count]
        if report.columns_not_used:
            lines.append(
                f"{self.name}: columns not used: {', '.join(sorted(report.columns_not_used))}"
            )
        return lines + [f"{self.name}: {note}" for note in (*report.notes, *self.facts)]


class SampleWriter:
    """Collects samples in memory, in the flat arrays of a SampleSet."""

    def __init__(self) -> None:
        self._tokens, self._trained = bytearray(), bytearray()
        self._lengths, self._targets, self._rows = array("q"), array("q"), array("Q")

    def __len__(self) -> int:
        return len(self._rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left behind."""

    def add(self, tokens: Sequence[int], trained: np.ndarray, row: int) -> None:
        """Append one sample; `row` is the 64-bit hash of its row."""
        ids, lengths, rows = np.array(tokens), np.array([len(tokens)]), np.array([row], np.uint64)
        self.extend(ids, trained, lengths, rows)

    def extend(
        self,
        tokens_T: np.ndarray,
        trained_T: np.ndarray,
        lengths_N: np.ndarray,
        rows_N: np.ndarray,
    ) -> None:
        """Append the samples that follow each other in `tokens_T`."""
        trained_T = trained_T.astype(np.uint8, copy=False)
        self._store(tokens_T.astype(np.int32, copy=False).tobytes(), trained_T.tobytes())
        self._lengths.extend(lengths_N.tolist())
        self._targets.extend(count_targets(trained_T, np.cumsum(lengths_N) - lengths_N).tolist())
        self._rows.extend(rows_N.tolist())

    def _store(self, tokens: bytes, trained: bytes) -> None:
        self._tokens += tokens
        self._trained += trained

    def finish(
        self, *, report: Report, batching: Batching | None = None, name: str = "dataset"
    ) -> SampleSet:
        """The SampleSet of all samples added."""
        index = self._index()
        return SampleSet(
            tokens_T=np.frombuffer(self._tokens, np.int32),
            trained_T=np.frombuffer(self._trained, np.uint8),
            lengths_N=index["lengths"],
            targets_N=index["targets"],
            rows_N=index["rows"],
            report=report,
            batching=batching,
            name=name,
        )

    def _index(self) -> dict[str, np.ndarray]:
        """One number a sample."""
        return {
            "lengths": np.array(self._lengths, np.int64),
            "targets": np.array(self._targets, np.int64),
            "rows": np.array(self._rows, np.uint64),
        }


def count_targets(trained_T: np.ndarray, starts_N: np.ndarray) -> np.ndarray:
    """The targets of samples one after the other: trained tokens, but the first of each."""
    if not len(starts_N):
        return np.zeros(0, np.int64)
    trained = np.cumsum(trained_T, dtype=np.int64)
    lasts_N = np.concatenate([starts_N[1:], [len(trained_T)]]) - 1
    return trained[lasts_N] - trained[starts_N]


def content_hash(*arrays: np.ndarray) -> str:
    """16 hexadecimal digits of the arrays, each by itself, so that they can be hashed in pieces."""
    return combine_hashes(*(hashlib.blake2b(np.ascontiguousarray(each).data) for each in arrays))


def combine_hashes(*hashes: hashlib.blake2b) -> str:
    """What `content_hash` gives for the arrays that were fed to `hashes` (blake2b)."""
    together = hashlib.blake2b(digest_size=8)
    for each in hashes:
        together.update(each.digest())
    return together.hexdigest()


def row_hash(*parts: str) -> int:
    """A 64-bit hash of a row's content, the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "little")


def split_validation(
    samples: SampleSet, *, fraction: float, max_rows: int = 256
) -> tuple[SampleSet, SampleSet]:
    """(training, validation): a row goes by the hash of its content, so equal rows stay together.

    About `fraction` of the rows, at least one and at most `max_rows`; a row keeps its side when
    others come or go, within these bounds. Samples of one row stay together.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"val_fraction={fraction}: use a number above 0 and below 1")
    return samples.held_out(fraction=fraction, max_rows=max_rows)

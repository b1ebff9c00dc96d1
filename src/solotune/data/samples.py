"""Tokenized samples in flat arrays: 5 bytes a token, whatever the number of rows.

N samples, T tokens of all samples together.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from solotune.data.formats import Format
from solotune.errors import ConfigError


@dataclass
class Report:
    """What became of the rows; every count that is not zero is printed before training."""

    source: str
    format: Format | None  # None until the first row tells
    rows: int = 0
    rows_unreadable: int = 0
    rows_cut: int = 0  # longer than max_seq_len
    rows_skipped: int = 0  # without a target
    reasoning_lost: int = 0  # turns
    turns_without_terminator: int = 0
    plain_controls: int = 0  # control tokens spelled inside texts
    messages_not_rendered: int = 0
    columns_not_used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class SampleSet:
    """Samples with their trained tokens, read by index; `packed` is a wish to the loader.

    `tokens_T` int32 and `trained_T` uint8 hold all samples one after the other, sample i from
    `starts_N1[i]` to `starts_N1[i + 1]`; `lengths_N` and `targets_N` count the tokens and targets
    of each; `rows_N` uint64 is a hash of the row that a sample comes from.
    """

    def __init__(
        self,
        *,
        tokens_T: np.ndarray,
        trained_T: np.ndarray,
        starts_N1: np.ndarray,
        rows_N: np.ndarray,
        report: Report,
        packed: bool = True,
        name: str = "dataset",
    ) -> None:
        self.tokens_T, self.trained_T, self.starts_N1, self.rows_N = (
            tokens_T,
            trained_T,
            starts_N1,
            rows_N,
        )
        self.report, self.packed, self.name = report, packed, name
        self.lengths_N = np.diff(starts_N1)
        # targets are the trained tokens, but not the first of a sample: nothing predicts it
        counts_T1 = np.concatenate([[0], np.cumsum(trained_T, dtype=np.int64)])
        self.targets_N = np.diff(counts_T1[starts_N1]) - trained_T[starts_N1[:-1]]

    def __len__(self) -> int:
        return len(self.rows_N)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (int32) and trained flags (uint8) of one sample, as views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        span = slice(self.starts_N1[index], self.starts_N1[index + 1])
        return self.tokens_T[span], self.trained_T[span]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return len(self.tokens_T)

    @property
    def num_targets(self) -> int:
        """Targets of all samples."""
        return int(self.targets_N.sum())

    def subset(self, indexes: Sequence[int] | np.ndarray, *, name: str) -> "SampleSet":
        """The samples at `indexes`, copied, in that order; the report stays that of the whole."""
        indexes = np.asarray(indexes, np.int64)
        lengths = self.lengths_N[indexes]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        where = np.repeat(self.starts_N1[indexes] - starts[:-1], lengths) + np.arange(starts[-1])
        return SampleSet(
            tokens_T=self.tokens_T[where],
            trained_T=self.trained_T[where],
            starts_N1=starts,
            rows_N=self.rows_N[indexes],
            report=replace(self.report),
            packed=self.packed,
            name=name,
        )

    def fingerprint(self) -> str:
        """A hash of all tokens, their order and what is trained: 16 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.tokens_T, self.trained_T, self.starts_N1.astype(np.int64)):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

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
        return lines + [f"{self.name}: {note}" for note in report.notes]


class SampleWriter:
    """Collects samples into the flat arrays of a SampleSet."""

    def __init__(self) -> None:
        self._tokens, self._trained = array("i"), bytearray()
        self._starts, self._rows = array("q", [0]), array("Q")

    def add(self, tokens: Sequence[int], trained: np.ndarray, row: int) -> None:
        """Append one sample; `row` is the 64-bit hash of its row."""
        self._tokens.extend(tokens)
        self._trained += trained.tobytes()
        self._starts.append(len(self._tokens))
        self._rows.append(row)

    def finish(self, *, report: Report, packed: bool, name: str = "dataset") -> SampleSet:
        """The SampleSet of all samples added."""
        return SampleSet(
            tokens_T=np.frombuffer(self._tokens, np.int32)
            if self._tokens
            else np.zeros(0, np.int32),
            trained_T=np.frombuffer(self._trained, np.uint8)
            if self._trained
            else np.zeros(0, np.uint8),
            starts_N1=np.frombuffer(self._starts, np.int64),
            rows_N=np.frombuffer(self._rows, np.uint64) if self._rows else np.zeros(0, np.uint64),
            report=report,
            packed=packed,
            name=name,
        )


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
    rows = np.unique(samples.rows_N)
    if len(rows) < 2:
        raise ConfigError(
            f"val_fraction={fraction} needs two different rows, found {len(rows)}: set it to 0"
        )
    wanted = int(np.searchsorted(rows, np.uint64(int(fraction * 2**64))))
    chosen = rows[: min(max(wanted, 1), max_rows, len(rows) - 1)]
    is_validation = np.isin(samples.rows_N, chosen)
    train = samples.subset(np.flatnonzero(~is_validation), name=samples.name)
    return train, samples.subset(np.flatnonzero(is_validation), name="validation")


def chunks(items: Iterator, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

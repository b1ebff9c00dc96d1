"""What a Loader feeds: its rows with unshifted labels, and counts that show faulty data.

B rows of a batch, S positions a row, M segments a row, N samples.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from solotune.data.batch import IGNORED
from solotune.data.loader import Loader

_BINS = 16  # of the histogram, at most
_CONTEXT = 8  # tokens that a token is decoded after: no tokenizer writes a character with more


@dataclass(frozen=True)
class FedRow:
    """One row of a batch.

    `labels[s]` is the token at position s if it is a target of the position before it, otherwise
    -100; `segments` are the lengths of the samples in it, and what follows them is filler.
    """

    tokens: list[int]
    labels: list[int]
    segments: list[int]

    @property
    def num_filler(self) -> int:
        """Positions that no sample takes."""
        return len(self.tokens) - sum(self.segments)

    def spans(self) -> Iterator[tuple[int, int]]:
        """First position and end of each segment."""
        start = 0
        for length in self.segments:
            yield start, start + length
            start += length


@dataclass
class Counts:
    """What an epoch holds and what is wrong with it; numbers are samples unless named otherwise."""

    source: str
    format: str | None
    rows_read: int
    rows_cut: int  # longer than max_seq_len
    rows_skipped: int  # without a target
    rows_unreadable: int
    samples: int
    batches: int
    num_tokens: int
    num_targets: int
    num_filler: int
    share_trained: float  # of the tokens
    share_cut: float  # of the rows
    packing_efficiency: float  # tokens of all positions that are computed
    duplicates: int  # with the tokens and targets of an earlier one
    terminator_not_trained: int  # that end no trained turn, or not all, with a stop token
    control_tokens_in_text: int  # occurrences, taken as plain text
    longest: int  # tokens
    median: int  # tokens
    histogram: list[dict[str, int]] = field(default_factory=list)  # from, to (tokens), samples
    examples: dict[str, list[int]] = field(default_factory=dict)  # sample numbers by count


class Decodes(Protocol):
    """What turns tokens into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...


def fed_rows(loader: Loader, *, epoch: int = 0) -> Iterator[FedRow]:
    """The rows of an epoch in the order in which they are trained on."""
    for batch in loader.epoch(epoch):
        rows = zip(batch.tokens_BS, batch.labels_BS, batch.host_segments_BM, strict=True)
        for tokens_S, labels_S, segments_M in rows:
            tokens, targets = tokens_S.tolist(), labels_S.tolist()
            segments = [length for length in segments_M.tolist() if length]
            row = FedRow(tokens, [IGNORED] * len(tokens), segments)
            for start, end in row.spans():  # the first of a segment is no target in this row
                row.labels[start + 1 : end] = targets[start : end - 1]
            yield row


def count_samples(loader: Loader, *, stop_ids: Sequence[int], shown: int = 3) -> Counts:
    """Count what all samples of a loader hold; `shown` examples of each fault.

    `stop_ids` are the tokens that may end a trained turn. Of a stream it is the first block that is
    counted, and numbers of tokens are those of an epoch of such blocks.
    """
    samples, report = loader.samples, loader.samples.report
    stops, seen = np.array(sorted(stop_ids)), set()
    found: dict[str, list[int]] = {"duplicates": [], "terminator_not_trained": []}
    for index in range(len(samples)):
        tokens, trained = samples.sample(index)
        digest = hashlib.blake2b(digest_size=16)
        digest.update(tokens.tobytes() + trained.tobytes())
        if digest.digest() in seen:
            found["duplicates"].append(index)
        seen.add(digest.digest())
        ends = np.flatnonzero(np.diff(trained, append=np.uint8(0)) == 255)  # 0 - 1 in uint8
        if not np.isin(tokens[ends], stops).all():
            found["terminator_not_trained"].append(index)
    num_slots = loader.num_slots
    lengths_N = samples.lengths_N
    return Counts(
        source=report.source,
        format=report.format,
        rows_read=report.rows,
        rows_cut=report.rows_cut,
        rows_skipped=report.rows_skipped,
        rows_unreadable=report.rows_unreadable,
        samples=len(samples),
        batches=len(loader),
        num_tokens=loader.num_tokens,
        num_targets=loader.num_targets,
        num_filler=num_slots - loader.num_tokens,
        share_trained=_share(loader.num_targets, loader.num_tokens),
        share_cut=_share(report.rows_cut, report.rows),
        packing_efficiency=_share(loader.num_tokens, num_slots),
        duplicates=len(found["duplicates"]),
        terminator_not_trained=len(found["terminator_not_trained"]),
        control_tokens_in_text=report.plain_controls,
        longest=int(lengths_N.max()),
        median=int(np.median(lengths_N)),
        histogram=histogram(lengths_N),
        examples={name: indexes[:shown] for name, indexes in found.items() if indexes},
    )


def histogram(lengths_N: np.ndarray) -> list[dict[str, int]]:
    """Samples by length in tokens, in equal steps of a round width from 1 to the longest."""
    longest = int(lengths_N.max())
    width = next(w for w in _round_widths() if -(-longest // w) <= _BINS)
    counts = np.bincount((lengths_N - 1) // width)
    return [
        {"from": k * width + 1, "to": (k + 1) * width, "samples": int(samples)}
        for k, samples in enumerate(counts)
    ]


def pieces(tokenizer: Decodes, tokens: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The text token by token, as (number of tokens, their text).

    A character that several tokens make comes with the last of them.
    """
    begin = read = 0
    for end in range(1, len(tokens) + 1):
        before = tokenizer.decode(tokens[begin:read])
        text = tokenizer.decode(tokens[begin:end])
        is_part = text.endswith("\ufffd") and end - read < _CONTEXT
        if is_part and end < len(tokens):
            continue
        yield end - read, text[len(before) :]
        begin, read = read, end


def _round_widths() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def as_json(row: FedRow) -> dict[str, Any]:
    """A row as `tune inspect data --json` prints it."""
    return {"tokens": row.tokens, "labels": row.labels, "segments": row.segments}

"""Rows that are read, tokenized and packed while training goes on: a block of samples at a time.

The samples of a block are shuffled and packed as those of a whole set are, and its rows follow the
rows of the block before it, pass after pass over the data. So the row at any place is a function of
the data and the seed alone; to go on from there, what lies before is read and tokenized again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from solotune.data.batch import Batch, batch_key, collate
from solotune.data.files import Row
from solotune.data.loader import Loader
from solotune.data.report import Report
from solotune.data.rows import RowPlan
from solotune.data.samples import Batching, SampleSet, SampleWriter
from solotune.data.tokenizing import Rules, Tokenized, closing_notes
from solotune.data.workers import tokenized
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import Tokenizer, check_vocabulary


class Stream(NamedTuple):
    """How to read the rows from the start, and what makes samples of them.

    `identity` names rows and rules; `block_size` is in samples; samples of the rows `left_out`
    (hashes) are not trained on.
    """

    tokenizer: Tokenizer
    read: Callable[[], Iterator[Row]]
    rules: Rules
    identity: str
    source: str
    block_size: int
    num_workers: int | None
    left_out: frozenset[int] = frozenset()

    def blocks(self) -> Iterator[SampleSet]:
        """The samples of one pass, `block_size` or a few more at a time. Raises DataError.

        All blocks have one report, of what has been read so far.
        """
        report = Report(source=self.source, format=self.rules.format)
        writer = SampleWriter()
        parts = tokenized(self.tokenizer, self.read(), self.rules, num_workers=self.num_workers)
        left_out = np.array(sorted(self.left_out), np.uint64)
        for part in parts:
            report.add(part.report)
            kept = ~np.isin(part.rows_N, left_out)
            in_kept = np.repeat(kept, part.lengths_N)
            writer.extend(
                part.tokens_T[in_kept],
                part.trained_T[in_kept],
                part.lengths_N[kept],
                part.rows_N[kept],
            )
            if len(writer) >= self.block_size:
                yield writer.finish(report=report)
                writer = SampleWriter()
        if len(writer):
            yield writer.finish(report=report)


class StreamedSamples(SampleSet):
    """A stream, with its first block as samples; `rows_per_epoch` are rows of batches."""

    def __init__(
        self,
        stream: Stream,
        *,
        rows_per_epoch: int,
        batching: Batching | None = None,
        name: str = "dataset",
    ) -> None:
        """Reads the first block. Raises DataError where it holds nothing to train on."""
        first = next(stream.blocks(), None)
        if first is None:
            raise DataError(f"{stream.source} leaves nothing to train on: no row has a target")
        super().__init__(
            tokens_T=first.tokens_T,
            trained_T=first.trained_T,
            lengths_N=first.lengths_N,
            rows_N=first.rows_N,
            report=first.report,
            batching=batching,
            name=name,
        )
        first_part = Tokenized(*first.sample(0), first.lengths_N[:1], first.rows_N[:1], self.report)
        self.report.notes += closing_notes(stream.tokenizer, first_part)
        if self.batching.max_tokens_per_batch is not None:
            raise ConfigError(
                "dataset.max_tokens_per_batch needs the lengths of all rows: leave it out, or set "
                "dataset.streaming=False"
            )
        self.stream, self.rows_per_epoch = stream, rows_per_epoch

    def fingerprint(self) -> str:
        """A name of the data and the rules; files by their path, size and date."""
        return f"{self.stream.identity} streamed by {self.stream.block_size}"

    def lines(self) -> list[str]:
        """The facts to print before training: what the first block tells."""
        count = len(self)
        return [
            *(line.replace(self.name, f"{self.name}, first block", 1) for line in super().lines()),
            f"{self.name}: streamed in blocks of {self.stream.block_size:,} samples or a few more, "
            f"the first has {count:,}; an epoch is {self.rows_per_epoch:,} rows of a batch",
        ]

    def held_out(self, *, fraction: float, max_rows: int) -> tuple["StreamedSamples", SampleSet]:
        """(training, validation): rows by the hash of their content, the first that come.

        Reads until there are `max_rows`, or enough rows that a `fraction` of them would be.
        """
        writer, rows, seen = SampleWriter(), set(), 0
        threshold = np.uint64(int(fraction * 2**64))
        for block in self.stream.blocks():
            chosen = block.rows_N < threshold
            seen += len(block)
            if not rows and not chosen.any():
                chosen = block.rows_N == block.rows_N.min()
            for index in np.flatnonzero(chosen).tolist():
                row = int(block.rows_N[index])
                if row in rows or len(rows) < max_rows:
                    rows.add(row)
                    tokens, trained = block.sample(index)
                    writer.add(tokens.tolist(), trained, row)
            if len(rows) >= max_rows or seen >= max_rows / fraction:
                break
        validation = writer.finish(
            report=replace(self.report), batching=self.batching, name="validation"
        )
        train = StreamedSamples(
            self.stream._replace(left_out=frozenset(rows)),
            rows_per_epoch=self.rows_per_epoch,
            batching=self.batching,
            name=self.name,
        )
        return train, validation


class StreamLoader(Loader):
    """The batches of a stream: an epoch is the next `rows_per_epoch` rows, in whole batches.

    `num_tokens`, `num_targets` and `num_slots` are what an epoch has if all its rows are like those
    of the first block. One epoch at a time may be iterated.
    """

    def __init__(
        self,
        samples: StreamedSamples,
        *,
        batch_size: int,
        max_seq_len: int,
        seed: int,
        shuffle: bool,
        batching: Batching,
        vocab_size: int | None,
    ) -> None:
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "max_seq_len": max_seq_len,
            "seed": seed,
            "shuffle": shuffle,
            "batching": batching,
        }
        super().__init__(samples, **self._options)
        self._stream, self._vocab_size = samples.stream, vocab_size
        self._length = -(-samples.rows_per_epoch // batch_size)
        share = self._length * batch_size / self.num_rows
        self.num_rows = self._length * batch_size
        self.num_tokens = round(self.num_tokens * share)
        self.num_targets = round(self.num_targets * share)
        self.num_slots = round(self.num_slots * share)
        self._rest: Iterator[tuple[Loader, RowPlan]] = iter(())
        self._place: int | None = None  # of the row that `_rest` gives next, over all epochs

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 0) from batch `start` on, on the host.

        What lies before is read and tokenized again, unless it has just been read.
        """
        place = (number * len(self) + start) * self.batch_size
        if self._place is None or place < self._place:
            self._rest, self._place = self._rows(), 0
        for _ in islice(self._rest, place - self._place):
            pass
        self._place = place
        for index in range(start, len(self)):
            batch = list(islice(self._rest, self.batch_size))
            self._place += self.batch_size
            self.max_segments = max(len(row.samples) for _, row in batch)
            longest = max(row.size for _, row in batch)
            yield collate(
                [block.segments(row) for block, row in batch],
                row_length=self.max_seq_len if self.batching.packed else longest,
                max_segments=self.max_segments,
                key=batch_key(self.seed, number, index),
            )

    def _rows(self) -> Iterator[tuple[Loader, RowPlan]]:
        """The rows of all blocks of all passes, without an end, each with the loader of its block.

        Raises DataError for a row that cannot be used, and where a pass has no samples.
        """
        blocks = count()
        for number in count(1):
            report = None
            for block in self._stream.blocks():
                if self._vocab_size is not None:
                    check_vocabulary(block.largest_token, self._vocab_size)
                loader, report = Loader(block, **self._options), block.report
                for rows in loader.plan(next(blocks)).batches():
                    yield from ((loader, row) for row in rows)
            if report is None:
                raise DataError(f"{self._stream.source} has no row left to train on")
            tqdm.write(
                f"{self.samples.name}: end of pass {number}: {report.rows} rows, "
                f"{report.rows_cut} cut at max_seq_len, {report.rows_skipped} without a target, "
                f"{report.rows_unreadable} that could not be read; the next pass begins"
            )

"""Rows of a file as samples: label masks, and a count of everything that was left out."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from solotune.config.fitting import Minimum
from solotune.data.cache import CacheEntry, CacheWriter, default_cache_dir
from solotune.data.cache_key import cache_key, file_identity
from solotune.data.chat import History, TrainOn
from solotune.data.files import Row
from solotune.data.formats import Format
from solotune.data.report import Report
from solotune.data.samples import Batching, SampleSet, SampleWriter
from solotune.data.sources import data_files, is_hub_name, read_rows, source_name
from solotune.data.streaming import Stream, StreamedSamples
from solotune.data.tokenizing import OnBadRow, Rules, Tokenized, closing_notes
from solotune.data.workers import tokenized
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import Tokenizer


def dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    format: Format | None = None,
    column_map: dict[str, str] | None = None,
    train_on_input: bool = False,
    train_on: TrainOn = "all",
    history: History = "per_turn",
    packed: bool = True,
    on_bad_row: OnBadRow = "stop",
    max_rows: Annotated[int, Minimum(1)] | None = None,
    num_workers: Annotated[int, Minimum(0)] | None = None,
    cache_dir: str | None = "auto",
    split_across_pack: bool = False,
    max_tokens_per_batch: Annotated[int, Minimum(1)] | None = None,
    streaming: bool = False,
    rows_per_epoch: Annotated[int, Minimum(1)] | None = None,
    shuffle_buffer: Annotated[int, Minimum(1)] | None = None,
) -> SampleSet:
    """Samples from a file, a folder, a glob or a data set of the Hub.

    `config`, `split` and `revision` choose a part of a Hub data set. `format` is detected from the
    columns of the first row where it is None; `column_map` gives the file's name for each of our
    column names. Trained are the assistant turns and their terminators (`train_on`: all | last),
    with `train_on_input` all tokens. `history`: per_turn | as_rendered, for templates that rewrite
    earlier turns. `on_bad_row`: stop | skip. `max_rows`: the first rows only. `num_workers`
    processes tokenize, None: one a core, at most 8, once there are many rows; 0 or 1: this one
    alone. `cache_dir` keeps the tokens of large sets, None: nowhere; auto: in the user's folder for
    caches. `split_across_pack` cuts samples where a pack is full, `max_tokens_per_batch` makes
    batches of unpacked rows by their size with filler. `streaming` reads while training goes on:
    `rows_per_epoch` rows of batches are an epoch, and `shuffle_buffer` samples (None: 10 000) are
    shuffled and packed at a time. Raises DataError with file, row and reason.
    """
    batching = Batching(
        packed=packed,
        split_across_pack=split_across_pack,
        max_tokens_per_batch=max_tokens_per_batch,
    )
    rules = Rules(
        format=format,
        column_map=column_map or {},
        train_on_input=train_on_input,
        train_on=train_on,
        history=history,
        on_bad_row=on_bad_row,
        cut=not split_across_pack,
    )
    part: dict[str, Any] = {"config": config, "split": split, "revision": revision}
    name = source_name(source, **part)
    if streaming:
        return _streamed(
            Stream(
                tokenizer,
                read=lambda: islice(read_rows(source, **part, streaming=True), max_rows),
                rules=rules,
                identity=cache_key(
                    tokenizer, rules, data=[name, *_dated(source, split)], max_rows=max_rows
                ),
                source=name,
                block_size=shuffle_buffer or 10_000,
                num_workers=num_workers,
            ),
            rows_per_epoch=rows_per_epoch,
            batching=batching,
        )
    for key, value in (("rows_per_epoch", rows_per_epoch), ("shuffle_buffer", shuffle_buffer)):
        if value is not None:
            raise ConfigError(f"dataset.{key}={value} is of streaming: set dataset.streaming=True")
    entry = None
    if cache_dir is not None and not is_hub_name(source):
        data = [file_identity(path) for path in data_files(source, split=split)]
        key = cache_key(tokenizer, rules, data=[source, *data], max_rows=max_rows)
        folder = default_cache_dir() if cache_dir == "auto" else Path(cache_dir).expanduser()
        entry = CacheEntry(folder, key)
    return build_samples(
        tokenizer,
        read_rows(source, **part),
        source=name,
        rules=rules,
        batching=batching,
        max_rows=max_rows,
        num_workers=num_workers,
        cache=entry,
    )


def build_samples(
    tokenizer: Tokenizer,
    rows: Iterator[Row],
    *,
    source: str,
    rules: Rules | None = None,
    batching: Batching | None = None,
    max_rows: int | None = None,
    num_workers: int | None = None,
    cache: CacheEntry | None = None,
) -> SampleSet:
    """Samples from any iterator of rows, by the rules of `dataset`, or those of the cache entry."""
    if cache is not None and (samples := cache.read(batching=batching)) is not None:
        return samples
    rules = rules or Rules()
    report = Report(source=source, format=rules.format)
    first: Tokenized | None = None  # with a sample
    # on a terminal, where it takes longer than two seconds
    bar = tqdm(desc="tokenizing", unit=" rows", leave=False, disable=None, delay=2)
    with bar, SampleWriter() if cache is None else CacheWriter(cache) as writer:
        for part in tokenized(tokenizer, islice(rows, max_rows), rules, num_workers=num_workers):
            writer.extend(part.tokens_T, part.trained_T, part.lengths_N, part.rows_N)
            report.add(part.report)
            bar.update(part.report.rows)
            if not first and len(part.lengths_N):
                first = part
        if first is None:
            skipped = "".join(f"; {note}" for note in report.notes)
            raise DataError(
                f"{source} leaves nothing to train on: {report.rows} rows, "
                f"{report.rows_unreadable} unreadable, {report.rows_skipped} without a target (an "
                f"assistant turn, within tokenizer.max_seq_len={tokenizer.max_seq_len}){skipped}"
            )
        report.notes += closing_notes(tokenizer, first)
        return writer.finish(report=report, batching=batching)


def _streamed(stream: Stream, *, rows_per_epoch: int | None, batching: Batching) -> StreamedSamples:
    if rows_per_epoch is None:
        raise ConfigError(
            "dataset.streaming=True reads rows of an unknown number: set dataset.rows_per_epoch to "
            "the rows of a batch (packs of tokenizer.max_seq_len tokens) that shall be an epoch"
        )
    return StreamedSamples(stream, rows_per_epoch=rows_per_epoch, batching=batching)


def _dated(source: str, split: str | None) -> list[tuple[str, int, int]]:
    """Path, size and date of local files: to hash them would take as long as to read them."""
    if is_hub_name(source):
        return []
    stats = {path: path.stat() for path in data_files(source, split=split)}
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()]

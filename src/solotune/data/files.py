"""Rows of one local file, each with its place in the file, so that an error can name it.

json, jsonl, csv and tsv are read with the standard library: what is text in the file stays text.
No reader holds more than one row, or one batch of rows of a parquet file.
"""

import csv
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solotune.data.json_list import json_list_items
from solotune.data.opening import (
    COMPRESSIONS,
    byte_lines,
    check_magic,
    data_suffix,
    not_utf8,
    open_data,
    text_chunks,
    text_lines,
)
from solotune.errors import DataError

_LONGEST_FIELD = 2**31 - 1  # characters of one csv field; the standard library stops at 131072
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 1024  # of a parquet file, decoded together


@dataclass(frozen=True)
class Row:
    """One row: its `place` (`chats.jsonl, line 3`), its columns, or the `fault` why it has none."""

    place: str
    columns: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a data file; those that cannot be parsed carry a `fault`.

    Lines and rows count from 1. Raises DataError where the file as a whole cannot be read.
    """
    return READERS[data_suffix(path)](path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    is_first = True
    for number, offset, line in byte_lines(path):
        place = f"{path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield Row(place, fault=not_utf8(offset + error.start))
            continue
        if not text.strip():
            continue
        row = _json_row(place, text)
        if is_first and row.fault and text.rstrip().endswith(("{", "[", ",")):
            raise DataError(
                f"{path}: its first object goes over several lines; wanted one row a line, or a "
                "list of rows (.json)"
            )
        is_first = False
        yield row


def _json_row(place: str, line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # also whole numbers of more than 4300 digits
        return Row(place, fault=f"not JSON: {error}")
    return _object_row(place, value)


def _object_row(place: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(place, value)
    return Row(
        place, fault=f"holds a {type(value).__name__}, wanted an object with the columns of one row"
    )


def _json_rows(path: Path) -> Iterator[Row]:
    """A list of rows, or one object a line under this name."""
    first = next((text.lstrip()[0] for text in text_chunks(path) if text.strip()), "")
    if first == "{":
        yield from _jsonl_rows(path)
    else:
        for number, value in enumerate(json_list_items(path), start=1):
            yield _object_row(f"{path}, row {number}", value)


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    lines = (text for _, text in text_lines(path))
    head: list[str] = []
    for text in lines:
        head.append(text)
        if text.strip():
            break
    skipped = len(head) - 1
    delimiter = _delimiter(path, head[-1]) if head else ","
    # strict: a quote that is never closed is an error, it would swallow the rest of the file
    reader = csv.reader(_chain(head[-1:], lines), strict=True, delimiter=delimiter)
    line = skipped + 1
    try:
        header = [name.strip() or f"column {k}" for k, name in enumerate(next(reader, []), start=1)]
        if len(set(header)) < len(header):
            raise DataError(f"{path}: two columns have the same name in {header}; rename one")
        line = skipped + reader.line_num + 1
        for values in reader:
            place = f"{path}, line {line}"
            line = skipped + reader.line_num + 1
            if len(values) == len(header):
                yield Row(place, dict(zip(header, values, strict=True)))
            elif values:
                yield Row(place, fault=f"has {len(values)} fields, the header has {len(header)}")
    except csv.Error as error:
        if "new-line character" in str(error):
            raise DataError(
                f"{path}: its lines end with CR alone (old Mac); save it with LF line ends"
            ) from None
        raise DataError(f"{path}, the row at line {line}: {error}; repair the quoting") from None


def _delimiter(path: Path, header: str) -> str:
    """Tab in a .tsv file; in a .csv file what stands in the header: comma, semicolon or tab."""
    if data_suffix(path) == ".tsv":
        return "\t"
    return next((mark for mark in ",;\t" if mark in header), ",")


def _chain(first: list[str], rest: Iterator[str]) -> Iterator[str]:
    yield from first
    yield from rest


def _text_rows(path: Path) -> Iterator[Row]:
    """The whole file as one text; its line ends are LF."""
    text = "".join(text_chunks(path)).replace("\r\n", "\n")
    yield Row(str(path), {"text": text})


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet  # heavy, and only here

    number = 0
    with open_data(path) as packed:
        start = packed.read(64)
    if not start.startswith(b"PAR1"):
        check_magic(path, start)
        raise DataError(f"{path} is no parquet file, or damaged: download or write it again")
    try:
        with _seekable(path) as source:
            file = pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
            groups = (file.metadata.row_group(k) for k in range(file.num_row_groups))
            bytes_a_row = sum(g.total_byte_size for g in groups) // max(file.metadata.num_rows, 1)
            size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(bytes_a_row, 1)))
            # threads keep tens of MB between them, and are no faster at batches of this size
            for batch in file.iter_batches(batch_size=size, use_threads=False):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", without_nulls(columns))
    except (pyarrow.ArrowException, OSError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path}, after row {number}: {said}; write the file again") from None


def _seekable(path: Path) -> AbstractContextManager[Any]:
    """A parquet file is read from its end: a packed one is unpacked to a temporary file."""
    if path.suffix.lower() not in COMPRESSIONS:
        return nullcontext(path)
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the reader)
    with open_data(path) as file:
        shutil.copyfileobj(file, unpacked)
    unpacked.seek(0)
    return unpacked


def without_nulls(columns: dict[str, Any]) -> dict[str, Any]:
    """A row of a table, without the keys that it fills with null in nested objects.

    A table gives all objects of a column the same keys: the arguments of every tool call would
    have those of all others.
    """
    return {name: _pruned(value) for name, value in columns.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


READERS = {
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".txt": _text_rows,
    ".parquet": _parquet_rows,
}

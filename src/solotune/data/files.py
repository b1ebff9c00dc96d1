"""Rows of a local file, each with its place in the file, so that an error can name it.

json, jsonl and csv are read with the standard library: what is text in the file stays text.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solotune.errors import DataError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_LONGEST_FIELD = 2**31 - 1  # characters of one csv field; the standard library stops at 131072


@dataclass(frozen=True)
class Row:
    """One row: its `place` (`chats.jsonl, line 3`), its columns, or the `fault` why it has none."""

    place: str
    columns: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


def read_rows(
    source: str | Path,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    key: str = "dataset.source",
) -> Iterator[Row]:
    """The rows of a json, jsonl, csv or parquet file; those that cannot be parsed carry a `fault`.

    Lines and rows count from 1. Raises DataError where the file as a whole cannot be read; it names
    the config `key`.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(
            f"{key}={source}: no such file; give the path of a json, jsonl, csv or parquet file"
        )
    if path.is_dir():
        raise DataError(f"{key}={source} is a folder: name one file in it")
    if path.suffix not in _SUFFIXES:
        raise DataError(
            f"{key}={source} is not a {', '.join(_SUFFIXES)} file: convert it to one of them"
        )
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".csv":
            yield from _csv_rows(path)
        elif path.suffix == ".json" and _first_character(path) != b"{":
            yield from _json_rows(path)
        else:
            yield from _jsonl_rows(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, without a byte order mark; they end at LF only: a text may hold U+2028."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not UTF-8 at byte {offset + error.start} of the file; "
                    "save it as UTF-8"
                ) from None
            offset += len(line)
            yield number, text


def _jsonl_rows(path: Path) -> Iterator[Row]:
    is_first = True
    for number, line in _lines(path):
        if not line.strip():
            continue
        row = _json_row(f"{path}, line {number}", line)
        if is_first and row.fault and line.rstrip().endswith(("{", "[", ",")):
            raise DataError(
                f"{path}: its first object goes over several lines; wanted one row a line, or a "
                "list of rows (.json)"
            )
        is_first = False
        yield row


def _json_row(place: str, line: str) -> Row:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        return Row(place, fault=f"not JSON: {error}")
    return _object_row(place, value)


def _object_row(place: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(place, value)
    return Row(
        place, fault=f"holds a {type(value).__name__}, wanted an object with the columns of one row"
    )


def _json_rows(path: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(path))
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}; repair the file") from None
    if not isinstance(values, list):
        raise DataError(
            f"{path} holds a {type(values).__name__}, wanted a list of rows (or one row a line)"
        )
    for number, value in enumerate(values, start=1):
        yield _object_row(f"{path}, row {number}", value)


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    # strict: a quote that is never closed is an error, it would swallow the rest of the file
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    line = 1
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path}: two columns have the same name in {header}; rename one")
        line = reader.line_num + 1
        for values in reader:
            place = f"{path}, line {line}"
            line = reader.line_num + 1
            if len(values) == len(header):
                yield Row(place, dict(zip(header, values, strict=True)))
            elif values:
                yield Row(place, fault=f"has {len(values)} fields, the header has {len(header)}")
    except csv.Error as error:
        raise DataError(f"{path}, the row at line {line}: {error}; repair the quoting") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet  # heavy, and only here

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for columns in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", columns)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}, after row {number}: {error}; write the file again") from None


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]

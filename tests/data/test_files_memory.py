"""Reading holds a row, not a file: resident memory does not grow with the number of rows."""

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from solotune.data import Row, read_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 1 << 20
Writer = Callable[[Path, Iterator[dict[str, str]]], None]


def resident_mib() -> float:
    """Resident memory of this process without the pages of mapped files."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * 4096 / MIB


def rows_of(count: int) -> Iterator[dict[str, str]]:
    for k in range(count):
        yield {"prompt": f"What is {k} squared? " + "x" * 300, "completion": str(k * k) + "y" * 300}


def as_jsonl(path: Path, rows: Iterator[dict[str, str]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def as_list(path: Path, rows: Iterator[dict[str, str]]) -> None:
    """All of it on one line."""
    with path.open("w") as file:
        file.write("[" + json.dumps(next(rows)))
        file.writelines(", " + json.dumps(row) for row in rows)
        file.write("]")


def as_csv(path: Path, rows: Iterator[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion"])
        writer.writerows(row.values() for row in rows)


def as_gzip(path: Path, rows: Iterator[dict[str, str]]) -> None:
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def as_zstd(path: Path, rows: Iterator[dict[str, str]]) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        for row in rows:
            file.write(json.dumps(row).encode() + b"\n")


def as_parquet(path: Path, rows: Iterator[dict[str, str]]) -> None:
    """All of it in one row group, as some writers do."""
    table = pyarrow.Table.from_pylist(list(rows))
    parquet.write_table(table, path, row_group_size=len(table))
    del table
    pyarrow.default_memory_pool().release_unused()


WRITERS: dict[str, Writer] = {
    "a.jsonl": as_jsonl,
    "a.json": as_list,
    "a.csv": as_csv,
    "a.jsonl.gz": as_gzip,
    "a.jsonl.zst": as_zstd,
    "a.parquet": as_parquet,
}


# all rows as objects take 100 MiB and more; Arrow's allocator keeps for a while what is freed
LIMITS_MIB = dict.fromkeys(WRITERS, 16) | {"a.parquet": 40}


def growth_mib(rows: Iterator[Row], count: int) -> float:
    """How far resident memory rises while `rows` are read, above that before the first one."""
    start, highest, number = resident_mib(), 0.0, 0
    for number, _ in enumerate(rows, start=1):
        if number % 5000 == 0:
            highest = max(highest, resident_mib() - start)
    assert number == count
    return highest


def warmed(name: str, folder: Path) -> Path:
    """The path of a file to write; a small one was read, so that all imports are done."""
    WRITERS[name](folder / f"small_{name}", rows_of(9))
    assert growth_mib(read_rows(folder / f"small_{name}"), 9) == 0
    return folder / name


@pytest.mark.parametrize("name", WRITERS)
def test_memory_does_not_grow_with_the_rows(name: str, tmp_path: Path) -> None:
    path = warmed(name, tmp_path)
    WRITERS[name](path, rows_of(80_000))  # 53 MB of text
    assert growth_mib(read_rows(path), 80_000) < LIMITS_MIB[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_million_rows_take_no_more_memory(name: str, tmp_path: Path) -> None:
    path = warmed(name, tmp_path)
    texts = (f"{k} squared is {k * k}" for k in range(1_000_000))
    WRITERS[name](path, ({"prompt": text, "completion": text[::-1]} for text in texts))
    assert growth_mib(read_rows(path), 1_000_000) < LIMITS_MIB[name]


def test_the_measure_sees_a_reader_that_holds_its_file(tmp_path: Path) -> None:
    path, count = warmed("a.jsonl", tmp_path), 200_000
    as_jsonl(path, rows_of(count))  # 130 MB: more than other tests have left free in the heap
    held = []
    assert growth_mib((held.append(row) or row for row in read_rows(path)), count) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_a_row_of_a_hundred_megabytes_is_read(name: str, tmp_path: Path) -> None:
    row = {"prompt": "q", "completion": "z" * (100 * MIB)}
    WRITERS[name](tmp_path / name, iter([row]))
    (read,) = read_rows(tmp_path / name)
    assert read.columns == row

"""Files: text stays text, places are the file's, and what cannot be read is said with its place."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from solotune import data
from solotune.data import opening, read_rows
from solotune.errors import DataError
from solotune.tokenizers import CHATML, Tokenizer

Write = Callable[[str, bytes], str]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML)


def columns(path: str) -> list[dict[str, Any]]:
    return [row.columns for row in read_rows(path)]


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


# csv and tsv


def test_a_windows_csv_gives_the_tokens_of_the_unix_one(write: Write, tokenizer: Tokenizer) -> None:
    """Field case 3."""
    windows = write("windows.csv", b"instruction,output\r\nAdd 2 and 3,5\r\n")
    unix = write("unix.csv", b"instruction,output\nAdd 2 and 3,5\n")
    assert columns(windows) == [{"instruction": "Add 2 and 3", "output": "5"}]
    a, b = (data.dataset(tokenizer, source=path) for path in (windows, unix))
    assert a.fingerprint() == b.fingerprint()


def test_csv_cells_stay_text(write: Write) -> None:
    path = write(
        "a.csv", b'\xef\xbb\xbfa,b,c,d\n00501,NA,1.10,"two\nlines, ""quoted"""\n,null,True,\n'
    )
    assert columns(path) == [
        {"a": "00501", "b": "NA", "c": "1.10", "d": 'two\nlines, "quoted"'},
        {"a": "", "b": "null", "c": "True", "d": ""},
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"prompt;completion\nq, really;a\n"),  # what a European Excel writes
        ("a.csv", b"prompt\tcompletion\nq, really\ta\n"),
        ("a.tsv", b"prompt\tcompletion\nq, really\ta\n"),
        ("A.CSV", b'prompt,completion\n"q, really",a\n'),
        ("a.csv", b"\n \nprompt , completion\n\n" + b'"q, really",a\n\n'),
    ],
)
def test_the_header_tells_how_cells_are_separated(write: Write, name: str, content: bytes) -> None:
    assert columns(write(name, content)) == [{"prompt": "q, really", "completion": "a"}]


def test_columns_without_a_name_are_numbered(write: Write) -> None:
    assert columns(write("a.csv", b",text,\n0,a,\n")) == [
        {"column 1": "0", "text": "a", "column 3": ""}
    ]


def test_two_columns_of_one_name_are_refused(write: Write) -> None:
    with pytest.raises(DataError, match=r"a\.csv: two columns have the same name in .*rename one"):
        columns(write("a.csv", b"text,text\na,b\n"))


def test_csv_rows_are_named_by_the_line_where_they_start(write: Write) -> None:
    path = write("a.csv", b'\ntext,n\n"one\ntwo",1\nthree\nfour,4\n')
    rows = list(read_rows(path))
    assert [row.place.removeprefix(path) for row in rows] == [", line 3", ", line 5", ", line 6"]
    assert rows[1].fault == "has 1 fields, the header has 2"


def test_an_open_quote_is_an_error_instead_of_one_huge_cell(write: Write) -> None:
    with pytest.raises(DataError, match=r"the row at line 3: .*repair the quoting"):
        columns(write("a.csv", b'text\nok\n"open\nrest\nrest\n'))


def test_lines_that_end_with_cr_alone_are_named(write: Write) -> None:
    with pytest.raises(DataError, match=r"a\.csv: its lines end with CR alone .*LF line ends"):
        columns(write("a.csv", b"a,b\r1,2\r"))


@pytest.mark.parametrize("size", [200_000, 8_000_000])
def test_a_long_cell_is_read(write: Write, size: int) -> None:
    assert len(columns(write("a.csv", b"text\n" + b"x" * size + b"\n"))[0]["text"]) == size


CELLS = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=6), mark=st.sampled_from(",;\t"))
def test_what_the_standard_library_writes_as_csv_is_read_back(
    rows: list[tuple[str, str]], mark: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=mark).writerows([("a", "b"), *rows])
    path = tmp_path_factory.getbasetemp() / "round_trip.csv"
    path.write_bytes(text.getvalue().encode())
    read = list(read_rows(str(path)))
    assert [tuple(row.columns.values()) for row in read] == rows
    lines = text.getvalue().split("\n")
    for row, (first, _) in zip(read, rows, strict=True):  # the place is where the row starts
        number = int(row.place.rpartition(" ")[2])
        assert first.split("\n")[0].replace('"', '""') in lines[number - 1]


# json and jsonl


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_one_object_a_line_is_read_under_each_name(write: Write, name: str) -> None:
    path = write(name, '\ufeff{"text": "a\u2028b"}\r\n\r\n{"text": "c"}'.encode())
    assert columns(path) == [{"text": "a\u2028b"}, {"text": "c"}]
    assert [row.place for row in read_rows(path)] == [f"{path}, line 1", f"{path}, line 3"]


def test_a_json_list_is_read(write: Write) -> None:
    path = write("a.json", b'[{"text": "a"}, 3, {"text": "b"}]')
    rows = list(read_rows(path))
    assert [row.columns for row in rows] == [{"text": "a"}, {}, {"text": "b"}]
    assert rows[1].place == f"{path}, row 2"
    assert rows[1].fault == "holds a int, wanted an object with the columns of one row"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=5)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, chunk=st.integers(1, 40), indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_a_json_list_is_the_same_wherever_its_pieces_end(
    rows: list[dict], chunk: int, indent: int | None, ascii: bool, tmp_path_factory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii)
    path.write_bytes(text.encode(errors="surrogatepass"))
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        return  # half a surrogate pair is no UTF-8
    whole, opening._CHUNK = opening._CHUNK, chunk
    try:
        assert columns(str(path)) == rows
    finally:
        opening._CHUNK = whole
    lines = "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows)
    path.with_suffix(".jsonl").write_bytes(lines.encode())
    assert columns(str(path.with_suffix(".jsonl"))) == rows


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b'[{"a": 1},\n{"a": 2}', "line 2, after row 2: the file ends here, it is cut off"),
        (b'[{"a": 1},\n{"a": "tw', "row 2, line 2: not JSON: Unterm.*the file ends there, it is"),
        (b'[{"a": 1},\n{"a": 2},]', "row 3, line 2: not JSON: .*; repair the file"),
        (b'[{"a": 1},\n{"a" 2}, {"b": 3}]', "row 2, line 2: not JSON: Expecting ':'.*; repair"),
        (b'[{"a": 1}\n{"a": 2}]', r"line 2, after row 1: a comma or \] is missing"),
        (b'[{"a": 1}]\n{"a": 2}', "line 2: text after the end of the list: remove it"),
        (b'"text"', r"a\.json holds no list of rows \(nor one row a line\)"),
    ],
)
def test_a_broken_json_list_is_named_by_row_and_line(
    write: Write, content: bytes, wanted: str
) -> None:
    with pytest.raises(DataError, match=wanted):
        columns(write("a.json", content))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_object_over_several_lines_is_told_how_rows_are_written(
    write: Write, name: str, tokenizer: Tokenizer
) -> None:
    path = write(name, json.dumps({"text": "a", "id": 1}, indent=2).encode())
    with pytest.raises(DataError, match=r"one row a line, or a list of rows \(\.json\)"):
        data.dataset(tokenizer, source=path, on_bad_row="skip")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"text": "b"', "line 2: not JSON: "),
        (b'["b"]', "line 2: holds a list, wanted an object"),
        (b'{"text": "\xe9"}', "line 2: not UTF-8 at byte 24 of the file; save it as UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "line 2: not JSON: "),
        (b'{"text": ' + b"1" * 5000 + b"}", "line 2: not JSON: "),
    ],
)
def test_a_broken_line_is_named_and_can_be_skipped(
    write: Write, tokenizer: Tokenizer, line: bytes, wanted: str
) -> None:
    path = write("a.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl, {wanted}.*dataset\.on_bad_row=skip"):
        data.dataset(tokenizer, source=path)
    assert len(data.dataset(tokenizer, source=path, on_bad_row="skip")) == 2


def test_a_row_of_many_megabytes_is_read(write: Write) -> None:
    text = "x" * (20 << 20)
    for name, end in (("a.jsonl", "\n"), ("a.json", "]")):
        row = json.dumps({"text": text})
        path = write(name, (row if name == "a.jsonl" else f"[{row}").encode() + end.encode())
        assert columns(path) == [{"text": text}]


# text


def test_a_text_file_is_one_text_with_unix_line_ends(write: Write) -> None:
    assert columns(write("a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")) == [{"text": "one\n\ntwo\n"}]


# parquet


def test_parquet_rows_are_read_with_their_own_keys(tmp_path: Path) -> None:
    """Field case 4: a table gives all tool calls the arguments of each other, as null."""
    rows = [
        {"text": "a", "call": [{"name": "f", "arguments": {"time": "2030-01-01"}}]},
        {"text": None, "call": [{"name": "g", "arguments": {"place": {"zip": "00501"}}}]},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert columns(str(path)) == rows
    assert [row.place for row in read_rows(path)] == [f"{path}, row 1", f"{path}, row 2"]


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda raw: raw[:-20], "after row 0: .*write the file again"),
        (lambda raw: raw[:30] + b"????" + raw[34:], "after row 0: .{9,}; write the file again"),
        (lambda raw: b"hello", "is no parquet file, or damaged: download or write it again"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, .*"),
    ],
)
def test_a_damaged_parquet_file_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], wanted: str
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["some text"] * 9}), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"a\.parquet[ ,]*{wanted}"):
        columns(str(path))


# packed files and other encodings


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet"])
def test_every_kind_of_file_may_be_packed(
    write: Write, tmp_path: Path, name: str, suffix: str
) -> None:
    table = tmp_path / "table"
    parquet.write_table(pyarrow.table({"text": ["a"]}), table)
    content = {
        "a.jsonl": b'{"text": "a"}\n',
        "a.json": b'[{"text": "a"}]',
        "a.csv": b"text\na\n",
        "a.txt": b"a",
        "a.parquet": table.read_bytes(),
    }[name]
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[suffix]
    assert columns(write(name + suffix, pack(content))) == [{"text": "a"}]


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_files_packed_in_several_parts_are_read_whole(
    write: Write, pack: Callable[[bytes], bytes]
) -> None:
    """As `cat a.gz b.gz` and parallel packers write them."""
    suffix = ".gz" if pack is gzip.compress else ".zst"
    content = pack(b'{"text": "a"}\n') + pack(b'{"text": "b"}\n')
    assert columns(write("a.jsonl" + suffix, content)) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz", "a.json.zst"])
def test_a_packed_file_that_is_cut_off_is_an_error(write: Write, name: str) -> None:
    rows = "".join(json.dumps({"text": str(k * k)}) + "\n" for k in range(9000)).encode()
    content = (zstd if name.endswith("zst") else gzip.compress)(rows)
    with pytest.raises(DataError, match=rf"{name} is cut off or damaged \(.*\): download or pack"):
        columns(write(name, content[: len(content) // 2]))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_packed_by_name_only_is_an_error(write: Write, suffix: str) -> None:
    with pytest.raises(DataError, match="is cut off or damaged"):
        columns(write(f"a.jsonl{suffix}", b'{"text": "a"}\n'))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ('[{"text": "a"}]'.encode("utf-16"), r'is UTF-16 \(Windows calls it "Unicode"\): save it'),
        ("\ufefftext".encode("utf-16-be"), "is UTF-16: save it as UTF-8"),
        ("text".encode("utf-16-le"), r"is not text \(it holds NUL bytes\): save it as UTF-8"),
        (gzip.compress(b"text"), r"is packed with gzip: end its name with \.gz"),
        (zstd(b"text"), r"is packed with zstd: end its name with \.zst"),
        (b"PK\x03\x04", "is a zip or Excel file: unpack it, or save it as csv"),
        (b"PAR1", r"is a parquet file: end its name with \.parquet"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer.*: run git lfs"),
    ],
)
def test_what_is_no_text_is_told_by_its_first_bytes(
    write: Write, name: str, content: bytes, wanted: str
) -> None:
    with pytest.raises(DataError, match=rf"{name} {wanted}"):
        columns(write(name, content))


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.txt"])
def test_a_file_that_is_not_utf8_is_refused_with_line_and_byte(write: Write, name: str) -> None:
    content = b"[\n   \xe9]" if name == "a.json" else b'"a"\n,\xe9'
    with pytest.raises(DataError, match=r"line 2: not UTF-8 at byte 5 of the file; save it as UTF"):
        columns(write(name, content))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(
    write: Write, tokenizer: Tokenizer, name: str, content: bytes
) -> None:
    with pytest.raises(DataError, match=r"leaves nothing to train on: [01] rows"):
        data.dataset(tokenizer, source=write(name, content))

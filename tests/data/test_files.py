"""Files: text stays text, places are the file's, and what cannot be read is said with its place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solotune import data
from solotune.data import SampleSet, read_rows
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import CHATML, Tokenizer

Load = Callable[..., SampleSet]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes a file and returns its path."""

    def write(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


Write = Callable[[str, bytes], str]


def columns(path: str) -> list[dict[str, Any]]:
    return [row.columns for row in read_rows(path)]


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


def test_csv_rows_are_named_by_the_line_where_they_start(write: Write) -> None:
    path = write("a.csv", b'text,n\n"one\ntwo",1\nthree\nfour,4\n')
    rows = list(read_rows(path))
    assert [row.place.removeprefix(path) for row in rows] == [", line 2", ", line 4", ", line 5"]
    assert rows[1].fault == "has 1 fields, the header has 2"


def test_an_open_quote_is_an_error_instead_of_one_huge_cell(write: Write) -> None:
    with pytest.raises(DataError, match=r"the row at line 3: .*repair the quoting"):
        columns(write("a.csv", b'text\nok\n"open\nrest\nrest\n'))


def test_a_long_cell_is_read(write: Write) -> None:
    assert len(columns(write("a.csv", b"text\n" + b"x" * 200_000 + b"\n"))[0]["text"]) == 200_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_one_object_a_line_is_read_under_either_name(write: Write, name: str) -> None:
    path = write(name, '\ufeff{"text": "a\u2028b"}\r\n\r\n{"text": "c"}'.encode())
    assert columns(path) == [{"text": "a\u2028b"}, {"text": "c"}]
    assert [row.place for row in read_rows(path)] == [f"{path}, line 1", f"{path}, line 3"]


def test_a_json_list_is_read(write: Write) -> None:
    path = write("a.json", b'[{"text": "a"}, 3, {"text": "b"}]')
    rows = list(read_rows(path))
    assert [row.columns for row in rows] == [{"text": "a"}, {}, {"text": "b"}]
    assert rows[1].place == f"{path}, row 2"
    assert rows[1].fault == "holds a int, wanted an object with the columns of one row"


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    parquet.write_table(pyarrow.table({"messages": messages}), path)
    assert columns(str(path)) == [{"messages": messages[0]}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_file_that_is_not_utf8_is_refused_with_line_and_byte(write: Write, name: str) -> None:
    with pytest.raises(DataError, match=r"line 2: not UTF-8 at byte 5 of the file; save it as UTF"):
        columns(write(name, b"[\n   \xe9]" if name == "a.json" else b'"a"\n,\xe9'))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]"])
def test_an_empty_file_is_an_error(write: Write, tokenizer: Tokenizer, content: bytes) -> None:
    with pytest.raises(DataError, match="leaves nothing to train on: 0 rows"):
        data.dataset(tokenizer, source=write("a.json", content))


@pytest.mark.parametrize("source", ["missing.jsonl", "a.xlsx", "."])
def test_a_source_that_is_no_data_file_says_what_would_be(
    source: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(DataError, match=r"dataset\.source=.*(jsonl.*csv|is a folder)"):
        data.dataset(tokenizer, source=str(tmp_path / source))


def test_rows_of_another_shape_name_wanted_found_and_file(
    load_rows: Load, tokenizer: Tokenizer
) -> None:
    """Field case 2."""
    rows = [{"text": f"t{k}"} for k in range(3)]
    with pytest.raises(
        DataError,
        match=r"rows.jsonl, line 1: format messages wants the column messages, found \['text'\]",
    ):
        load_rows(tokenizer, *rows, format="messages")


def test_unknown_columns_list_the_formats(load_rows: Load, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"\['body'\] .*instruction, output.*dataset.column_map"):
        load_rows(tokenizer, {"body": "t"})


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TEXT_PART = {"type": "text", "text": "q"}
HUMAN = {"from": "human", "value": "q"}


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"messages": [{"role": "user", "content": [TEXT_PART]}, ASSISTANT]}, "messages"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": "a"}]}, "conversations"),
        ({"prompt": "q", "completion": "a"}, "prompt"),
        ({"instruction": "q", "output": "a"}, "instruction"),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction"),
    ],
)
def test_each_format_is_detected_and_gives_the_same_sample(
    row: dict[str, Any], format: str, load_rows: Load, tokenizer: Tokenizer
) -> None:
    samples = load_rows(tokenizer, row)
    assert samples.report.format == format
    assert f"format {format}" in samples.lines()[0]
    text = tokenizer.decode(samples.sample(0)[0].tolist())
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


def test_alpaca_input_follows_the_instruction(load_rows: Load, tokenizer: Tokenizer) -> None:
    row = {"instruction": "Add.", "input": "2 and 3", "output": "5", "system": "Be brief."}
    text = tokenizer.decode(load_rows(tokenizer, row).sample(0)[0].tolist())
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd.\n\n2 and 3<|im_end|>\n"
    )


def test_column_map_names_the_columns_of_the_file(load_rows: Load, tokenizer: Tokenizer) -> None:
    mapped = load_rows(
        tokenizer,
        {"Frage": "q", "Antwort": "a", "output": "not this one"},
        column_map={"instruction": "Frage", "output": "Antwort"},
    )
    plain = load_rows(tokenizer, {"instruction": "q", "output": "a"})
    assert mapped.fingerprint() == plain.fingerprint()


def test_an_unknown_role_names_row_and_role_list(load_rows: Load, tokenizer: Tokenizer) -> None:
    good = {"messages": [USER, ASSISTANT]}
    bad = {"messages": [USER, ASSISTANT | {"role": "narrator"}]}
    with pytest.raises(
        DataError, match=r"line 2: message 1 has the role 'narrator', of the roles \['user', 'narr"
    ):
        load_rows(tokenizer, good, bad)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"text": 5}, "column text holds a int, wanted text"),
        ({"text": None}, "format text wants the column text"),
        ({"text": "a \ufdd0"}, "U\\+FDD0..U\\+FDEF"),
        ({"text": "a \ud800"}, "half a surrogate pair \\(U\\+D800\\)"),
    ],
)
def test_a_bad_row_stops_or_is_skipped_counted_and_shown(
    bad: dict[str, Any], reason: str, load_rows: Load, tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl, line 2: .*{reason}"):
        load_rows(tokenizer, {"text": "ok"}, bad)
    samples = load_rows(tokenizer, {"text": "ok"}, bad, {"text": "ok"}, on_bad_row="skip")
    assert len(samples) == 2
    assert samples.report.rows_unreadable == 1
    assert any("line 2" in line for line in samples.lines())


def test_broken_json_names_its_line(write: Write, tokenizer: Tokenizer) -> None:
    path = write("a.jsonl", b'{"text": "a"}\n{"text": "b"\n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2: not JSON: .*on_bad_row=skip"):
        data.dataset(tokenizer, source=path)


@pytest.mark.parametrize("key", ["format", "train_on", "history", "on_bad_row"])
def test_an_unknown_choice_names_key_and_choices(
    key: str, load_rows: Load, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=rf"dataset.{key}=never: use \w+ or \w+"):
        load_rows(tokenizer, {"text": "a"}, **{key: "never"})


def test_images_are_refused(load_rows: Load, tokenizer: Tokenizer) -> None:
    parts = [{"type": "image", "url": "x"}]
    with pytest.raises(DataError, match=r"message 0 has parts of the types \['image'\]: only text"):
        load_rows(tokenizer, {"messages": [{"role": "user", "content": parts}]})


def test_max_rows_takes_the_first_rows(load_rows: Load, tokenizer: Tokenizer) -> None:
    samples = load_rows(tokenizer, *({"text": f"row {k}"} for k in range(9)), max_rows=4)
    assert (len(samples), samples.report.rows) == (4, 4)


def test_a_message_that_the_template_drops_is_counted(
    load_rows: Load, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    template = (
        "{% set messages = messages[1:] if messages[0].role == 'system' else messages %}" + CHATML
    )
    messages = [{"role": "system", "content": "secret"}, USER, ASSISTANT]
    samples = load_rows(make_tokenizer(template), {"messages": messages})
    assert any(
        "1 messages whose text the chat template does not show" in x for x in samples.lines()
    )


def test_a_row_keeps_its_side_of_the_split_when_the_template_changes(
    load_rows: Load, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    rows = [{"prompt": "q", "completion": str(k)} for k in range(9)]
    today, tomorrow = (make_tokenizer(date + CHATML) for date in ("1 May ", "2 May "))
    hashes = [load_rows(each, *rows).rows_N.tolist() for each in (today, tomorrow)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 9


def test_bos_stands_once_and_eos_once(
    load_rows: Load, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    """Field case 7: BOS by the post-processor and by the template."""
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, adds_bos=True)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    for text in ("hello", "hello</s>", "<s>hello</s>"):
        tokens, trained = load_rows(tokenizer, {"text": text}).sample(0)
        assert tokens.tolist() == [bos, *b"hello", eos]
        assert trained.tolist() == [0, 1, 1, 1, 1, 1, 1]
    tokens, _ = load_rows(tokenizer, {"prompt": "q", "completion": "a"}).sample(0)
    assert tokens.tolist().count(bos) == 1
    assert tokens[0] == bos
    prompt = tokenizer.encode_chat([{"role": "user", "content": "q"}])
    assert prompt == tokens[: len(prompt)].tolist()
    assert tokenizer.encode("q", add_bos=True) == [bos, *b"q"]


def test_json_text_in_a_csv_cell_is_a_conversation(write: Write, tokenizer: Tokenizer) -> None:
    cell = json.dumps([USER, ASSISTANT]).replace('"', '""')
    samples = data.dataset(tokenizer, source=write("a.csv", f'messages\n"{cell}"\n'.encode()))
    assert tokenizer.decode(samples.sample(0)[0].tolist()).endswith("assistant\na<|im_end|>\n")

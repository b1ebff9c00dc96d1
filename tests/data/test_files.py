"""Files: text stays text, places are the file's, and what cannot be read is said with its place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solotune import data
from solotune.data import SampleSet, read_prompts, read_rows
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
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TEXT_PART = {"type": "text", "text": "q"}
HUMAN = {"from": "human", "value": "q"}


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


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_object_over_several_lines_is_told_how_rows_are_written(
    write: Write, name: str, tokenizer: Tokenizer
) -> None:
    path = write(name, json.dumps({"text": "a", "id": 1}, indent=2).encode())
    with pytest.raises(DataError, match=r"one row a line, or a list of rows \(\.json\)"):
        data.dataset(tokenizer, source=path, on_bad_row="skip")


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


@pytest.mark.parametrize(
    ("column_map", "message"),
    [
        (
            {"inputt": "Frage"},
            r"inputt=Frage: no format has a column inputt; .* input\?",
        ),
        ({"instruction": "Frge"}, r"instruction=Frge: .*, line 1 has no column Frge; .* Frage\?"),
        ({"tools": "xxxxxx"}, r"tools=xxxxxx: .* no column xxxxxx \(columns: Frage, Antwort\)"),
    ],
)
def test_a_column_map_that_names_no_column_is_refused_even_where_bad_rows_are_skipped(
    column_map: dict[str, str], message: str, load_rows: Load, tokenizer: Tokenizer
) -> None:
    row = {"Frage": "q", "Antwort": "a"}
    column_map = {"output": "Antwort"} | column_map
    with pytest.raises(ConfigError, match=rf"^dataset\.column_map\.{message}"):
        load_rows(tokenizer, row, column_map=column_map, on_bad_row="skip")


def test_a_column_map_for_a_column_of_another_format_is_refused(
    load_rows: Load, tokenizer: Tokenizer
) -> None:
    columns = {"format": "prompt", "column_map": {"output": "completion"}}
    with pytest.raises(ConfigError, match="format prompt has no column output"):
        load_rows(tokenizer, {"prompt": "q", "completion": "a"}, **columns)


def test_columns_that_are_not_used_are_printed_once(load_rows: Load, tokenizer: Tokenizer) -> None:
    rows = [
        {"id": 1, "Frage": "q", "Antwort": "a", "output": "other", "system": ""},
        {"id": 2, "Frage": "q", "Antwort": "a", "url": None},
    ]
    column_map = {"instruction": "Frage", "output": "Antwort"}
    lines = load_rows(tokenizer, *rows, column_map=column_map).lines()
    assert [line for line in lines if "not used" in line] == [
        "dataset: columns not used: id, output, url"
    ]
    all_used = load_rows(tokenizer, {"prompt": "q", "completion": "a", "system": "s"})
    assert not any("not used" in line for line in all_used.lines())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]},
        {"conversations": [HUMAN, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
    ],
)
def test_a_system_column_is_the_first_message_of_every_chat_format(
    row: dict[str, Any], load_rows: Load, tokenizer: Tokenizer
) -> None:
    text = tokenizer.decode(
        load_rows(tokenizer, {**row, "system": "Be brief."}).sample(0)[0].tolist()
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n"
    )


def test_two_system_messages_that_differ_are_refused(load_rows: Load, tokenizer: Tokenizer) -> None:
    row = {"messages": [{"role": "system", "content": "a"}, USER, ASSISTANT], "system": "b"}
    with pytest.raises(DataError, match="line 1: column system and the system message differ"):
        load_rows(tokenizer, row)


@pytest.mark.parametrize("value", [0, 5, 1.5])
@pytest.mark.parametrize("column", ["prompt", "completion", "system", "text", "input", "content"])
def test_a_number_is_not_taken_for_text(
    value: float, column: str, load_rows: Load, tokenizer: Tokenizer
) -> None:
    row: dict[str, Any] = {
        "text": {},
        "input": {"instruction": "q", "output": "a"},
        "content": {"messages": [USER, {"role": "assistant", "content": value}]},
    }.get(column, {"prompt": "q", "completion": "a"})
    row = row if column == "content" else {**row, column: value}
    with pytest.raises(DataError, match=rf'the number {value}, wanted text: store it as text \("'):
        load_rows(tokenizer, row)


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
        ({"text": 5}, "column text holds the number 5, wanted text"),
        ({"text": ["a"]}, "column text holds a list, wanted text"),
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


def test_prompts_keep_their_system_message(write: Write) -> None:
    rows = [{"prompt": "q", "system": "s"}, {"prompt": "q"}, {"messages": [USER], "system": "s"}]
    system = {"role": "system", "content": "s"}
    asked = [prompt.asked for prompt in read_prompts(write("a.json", json.dumps(rows).encode()))]
    assert asked == [[system, USER], "q", [system, USER]]
    bad = write("b.jsonl", b'{"prompt": "q", "system": 3}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: column system holds the number 3"):
        read_prompts(bad)

"""Formats: every spelling of a conversation gives the same sample; what is unclear is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from solotune import data
from solotune.data import SampleSet
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import CHATML, Tokenizer

Load = Callable[..., SampleSet]
Write = Callable[[str, bytes], str]
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TEXT_PART = {"type": "text", "text": "q"}
HUMAN = {"from": "human", "value": "q"}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML)


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
        ({"text": None}, "column text holds null"),
        ({"body": "a"}, "format text wants the column text, found"),
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


def test_images_are_refused(load_rows: Load, tokenizer: Tokenizer) -> None:
    parts = [{"type": "image", "url": "x"}]
    with pytest.raises(DataError, match=r"message 0 has parts of the types \['image'\]: only text"):
        load_rows(tokenizer, {"messages": [{"role": "user", "content": parts}]})


def test_json_text_in_a_csv_cell_is_a_conversation(write: Write, tokenizer: Tokenizer) -> None:
    cell = json.dumps([USER, ASSISTANT]).replace('"', '""')
    samples = data.dataset(tokenizer, source=write("a.csv", f'messages\n"{cell}"\n'.encode()))
    assert tokenizer.decode(samples.sample(0)[0].tolist()).endswith("assistant\na<|im_end|>\n")

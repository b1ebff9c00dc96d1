"""Prompts: the rows of a training file, without the answers."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from solotune.data import read_prompts
from solotune.errors import DataError

Write = Callable[[str, bytes], str]
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_prompts_keep_their_system_message(write: Write) -> None:
    rows = [{"prompt": "q", "system": "s"}, {"prompt": "q"}, {"messages": [USER], "system": "s"}]
    system = {"role": "system", "content": "s"}
    asked = [prompt.asked for prompt in read_prompts(write("a.json", json.dumps(rows).encode()))]
    assert asked == [[system, USER], "q", [system, USER]]
    bad = write("b.jsonl", b'{"prompt": "q", "system": 3}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: column system holds the number 3"):
        read_prompts(bad)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "q", "completion": "a"}, "q"),
        ({"question": "q"}, "q"),
        ({"question": "q", "answer": "a", "label": False}, "q"),
        ({"instruction": "q", "input": "c", "output": "a"}, "q\n\nc"),
        ({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}, [USER, ASSISTANT, USER]),
        ({"messages": [USER, ASSISTANT]}, [USER]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER],
        ),
    ],
)
def test_a_training_row_asks_for_its_answer(write: Write, row: dict, asked: str | list) -> None:
    (prompt,) = read_prompts(write("a.jsonl", json.dumps(row).encode()))
    assert prompt.asked == asked


def test_tools_are_offered(write: Write) -> None:
    row = {"messages": [USER], "tools": [{"name": "f"}]}
    (prompt,) = read_prompts(write("a.jsonl", json.dumps(row).encode()))
    assert prompt.tools == [{"type": "function", "function": {"name": "f"}}]


def test_each_line_of_a_text_is_a_prompt_and_rows_may_mix_formats(write: Write) -> None:
    text = b"\xef\xbb\xbfone\r\n\r\n  two \xe2\x80\xa8\r\n"
    write("a.txt", text)
    rows = [{"prompt": "three"}, {"messages": [USER]}]
    folder = Path(
        write("b.jsonl.gz", gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    ).parent
    prompts = read_prompts(f"{folder}/[ab].*")
    assert [prompt.asked for prompt in prompts] == ["one", "  two \u2028", "three", [USER]]
    assert [prompt.place.removeprefix(f"{folder}/") for prompt in prompts] == [
        "a.txt, line 1",
        "a.txt, line 3",
        "b.jsonl.gz, line 1",
        "b.jsonl.gz, line 2",
    ]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", b"\n \n", r"^prompts_file=.*a\.txt holds no prompt$"),
        (
            "a.txt",
            b"ok\n\xff",
            r"a\.txt, line 2: not UTF-8 at byte 3 of the file; save it as UTF-8",
        ),
        ("a.jsonl", b'{"prompt": 5}', r"line 1: column prompt holds the number 5, wanted text"),
        ("a.jsonl", b'{"text": "t"}', r"line 1: wanted one of messages, .*; found \['text'\]$"),
        (
            "a.jsonl",
            b'{"prompt": "q"}\n{"x": 1}',
            r"line 2: wanted one of messages, conversations,",
        ),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "a"}]}', "no message stands"),
        ("a.jsonl", b'{"messages": [{"content": "a"}]}', r"line 1: message 0 has no role or from$"),
        ("a.jsonl", b'{"prompt": ', r"line 1: not JSON"),
        ("b.md", b"x", r"prompts_file=.*b\.md: b\.md is not a jsonl"),
    ],
)
def test_what_is_no_prompt_is_named_by_file_and_row(
    write: Write, name: str, content: bytes, wanted: str
) -> None:
    with pytest.raises(DataError, match=wanted):
        read_prompts(write(name, content))

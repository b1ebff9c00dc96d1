"""Prompts for generation, from a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solotune.data.files import Row, file_rows
from solotune.data.formats import FORMATS, Layout, find_layout
from solotune.data.messages import Conversation
from solotune.data.opening import data_suffix, text_lines
from solotune.data.sources import data_files
from solotune.errors import DataError
from solotune.tokenizers import Message


@dataclass(frozen=True)
class Prompt:
    """What is asked: a text, or the messages before the answer, with the tools offered to it.

    `place` says where it stands, for messages.
    """

    asked: str | list[Message]
    tools: list[dict[str, Any]] | None = None
    place: str = "prompt"


def read_prompts(path: str | Path) -> list[Prompt]:
    """Return one prompt a line of .txt files, or a row of files that training could read.

    `path` is a file, folder or glob. Rows have the columns of training rows; an answer, or a last
    assistant turn among the messages, is what is asked for, and left out. Empty lines of a .txt
    file are passed over. Raises DataError that names file and row.
    """
    prompts = []
    for file in data_files(path, key="prompts_file"):
        prompts += _lines_of(file) if data_suffix(file) == ".txt" else _rows_of(file)
    if not prompts:
        raise DataError(f"prompts_file={path} holds no prompt")
    return prompts


def _lines_of(path: Path) -> Iterator[Prompt]:
    for number, line in text_lines(path):
        if line.strip():
            yield Prompt(line.rstrip("\r\n"), place=f"{path}, line {number}")


def _rows_of(path: Path) -> Iterator[Prompt]:
    for row in file_rows(path):
        if row.fault:
            raise DataError(f"{row.place}: {row.fault}")
        layout = _layout_of(row)  # its own: a file of prompts may mix formats
        try:
            yield _prompt_of(row, layout)
        except DataError as error:
            said = str(error).partition(": name the ")[0]  # by keys of training, follows
            raise DataError(f"{row.place}: {said}") from None


def _layout_of(row: Row) -> Layout:
    try:
        layout = find_layout(row.columns, row.place, answered=False)
    except DataError:
        layout = None
    if layout is None or layout.format == "text":
        wanted = ", ".join(columns[0] for name, columns in FORMATS.items() if name != "text")
        raise DataError(f"{row.place}: wanted one of {wanted}; found {sorted(row.columns)}")
    return layout


def _prompt_of(row: Row, layout: Layout) -> Prompt:
    conversation = layout.parse(row.columns, answered=False)
    assert isinstance(conversation, Conversation)  # the format `text` alone gives text
    messages = list(conversation.messages)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError("no message stands before the answer")
    only_text = [message["role"] for message in messages] == ["user"] and layout.is_exchange
    asked = messages[0]["content"] if only_text else messages
    return Prompt(asked, tools=conversation.tools, place=row.place)

"""Prompts for generation, from a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solotune.data.files import Row, read_rows
from solotune.data.messages import Conversation, parse_row, system_message
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
    """Return one prompt a line of a .txt file, or a row of a json, jsonl, csv or parquet file.

    A row holds `prompt`, or `messages` and perhaps `tools`; perhaps `system`. A last assistant turn
    among the messages is what is asked for, and left out. Empty lines of a .txt file are passed
    over. Raises DataError that names file and row.
    """
    path = Path(path).expanduser()
    read = _text_prompts if path.suffix == ".txt" else _row_prompts
    prompts = list(read(path))
    if not prompts:
        raise DataError(f"prompts_file={path} holds no prompt")
    return prompts


def _text_prompts(path: Path) -> Iterator[Prompt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"prompts_file={path} is not UTF-8 at byte {error.start}: save it as UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"prompts_file={path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Prompt(line, place=f"{path}, line {number}")


def _row_prompts(path: Path) -> Iterator[Prompt]:
    for row in read_rows(path, key="prompts_file"):
        try:
            yield _prompt_of(row)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from None


def _prompt_of(row: Row) -> Prompt:
    if row.fault:
        raise DataError(row.fault)
    asked = row.columns.get("prompt")
    if isinstance(asked, str):
        opening = system_message(row.columns)
        messages = [*opening, {"role": "user", "content": asked}]
        return Prompt(messages if opening else asked, place=row.place)
    if "messages" not in row.columns:
        raise DataError(f"wanted prompt (text) or messages, found {sorted(row.columns)}")
    conversation = parse_row(row.columns, "messages")
    assert isinstance(conversation, Conversation)  # the format `text` alone gives text
    messages = list(conversation.messages)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError("no message stands before the answer")
    return Prompt(messages, tools=conversation.tools, place=row.place)

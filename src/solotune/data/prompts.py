"""Prompts for generation, from a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solotune.data.files import Row, read_rows
from solotune.data.messages import Conversation, parse_row
from solotune.errors import DataError


def read_prompts(path: str | Path) -> list[str | list[dict[str, Any]]]:
    """Return one prompt a line of a .txt file, or a row of a json, jsonl or csv file.

    A row holds `prompt`, or `messages`; a last assistant turn among the messages is what is asked
    for, and left out. Raises DataError that names file and row.
    """
    path = Path(path).expanduser()
    if path.suffix == ".txt":
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except FileNotFoundError:
            raise DataError(f"prompts_file={path}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"prompts_file={path} cannot be read: {error}") from None
        prompts: list[str | list[dict[str, Any]]] = [line for line in lines if line.strip()]
    else:
        prompts = [_prompt(row.columns, row.place) for row in _readable(path)]
    if not prompts:
        raise DataError(f"prompts_file={path} holds no prompt")
    return prompts


def _readable(path: Path) -> Iterator[Row]:
    for row in read_rows(path):
        if row.fault:
            raise DataError(f"{row.place}: {row.fault}")
        yield row


def _prompt(columns: dict[str, Any], place: str) -> str | list[dict[str, Any]]:
    if isinstance(columns.get("prompt"), str):
        return columns["prompt"]
    if "messages" not in columns:
        raise DataError(f"{place}: wanted prompt or messages, found {', '.join(columns)}")
    try:
        conversation = parse_row(columns, "messages")
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    assert isinstance(conversation, Conversation)  # the format `text` alone gives text
    messages = list(conversation.messages)
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages

"""The items of a JSON file that is one list, one after the other: the file is never held whole."""

import json
from collections.abc import Iterator
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import Any

from solotune.data.opening import text_chunks
from solotune.errors import DataError

_LONGEST_TOKEN = 16  # characters of `-Infinity` or of an escape: a fault nearer to the end of
# what was read may be one that was cut in two


class _Text:
    """What is read of a file and not yet parsed: `left[position:]`; `line` is that of `left[0]`."""

    def __init__(self, path: Path) -> None:
        self._chunks = text_chunks(path)
        self.left, self.position, self.line = "", 0, 1

    def read(self) -> bool:
        """Read as much again as is not parsed; False at the end of the file."""
        self.line += self.left.count("\n", 0, self.position)
        parts = [self.left[self.position :]]
        self.left, self.position = parts[0], 0
        wanted = max(len(parts[0]), 1)  # doubled each time: a long row is parsed a few times only
        while wanted > 0 and (chunk := next(self._chunks, "")):
            parts.append(chunk)
            wanted -= len(chunk)
        self.left = "".join(parts)
        return len(parts) > 1

    def next_mark(self) -> str:
        """The next character that is no white space, or an empty text at the end of the file."""
        while True:
            while self.position < len(self.left) and self.left[self.position] in " \t\r\n":
                self.position += 1
            if self.position < len(self.left):
                return self.left[self.position]
            if not self.read():
                return ""

    def line_at(self, position: int) -> int:
        return self.line + self.left.count("\n", 0, position)


def json_list_items(path: Path) -> Iterator[Any]:
    """The items of the list in a file; nothing for an empty file.

    Raises DataError with the row and line where the file is no list or no JSON.
    """
    text = _Text(path)
    if (mark := text.next_mark()) == "":
        return
    if mark != "[":
        raise DataError(f"{path} holds no list of rows (nor one row a line)")
    text.position += 1
    number = 0
    if text.next_mark() != "]":
        while True:
            number += 1
            yield _item(text, path, number)
            mark = text.next_mark()
            if mark != ",":
                break
            text.position += 1
            text.next_mark()
        if mark != "]":
            fault = "a comma or ] is missing" if mark else "the file ends here, it is cut off"
            raise DataError(
                f"{path}, line {text.line_at(text.position)}, after row {number}: {fault}"
            )
    text.position += 1
    if text.next_mark():
        raise DataError(
            f"{path}, line {text.line_at(text.position)}: text after the end of the list: remove it"
        )


def _item(text: _Text, path: Path, number: int) -> Any:
    decoder = json.JSONDecoder()
    while True:
        try:
            value, end = decoder.raw_decode(text.left, text.position)
        except JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated")
            place = f"{path}, row {number}, line {text.line_at(error.pos)}"
            at_end = is_open or error.pos >= len(text.left.rstrip())
            may_be_cut = is_open or error.pos >= len(text.left) - _LONGEST_TOKEN
            if may_be_cut and text.read():
                continue
            ends = "the file ends there, it is cut off" if at_end else "repair the file"
            raise DataError(f"{place}: not JSON: {error.msg}; {ends}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, row {number}: not JSON: {error}") from None
        if end == len(text.left) and text.read():  # a number may go on
            continue
        text.position = end
        return value

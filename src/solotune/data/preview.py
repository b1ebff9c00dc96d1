"""A sample in a few lines of the terminal: what the model reads, and which of it it learns."""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

_HEAD, _TAIL = 60, 30  # tokens of a span that are shown
_SPANS = 8


class Decodes(Protocol):
    """What turns tokens into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...


def sample_lines(tokenizer: Decodes, tokens: np.ndarray, trained: np.ndarray) -> list[str]:
    """One line for each run of trained or untrained tokens, quoted, as it reads when decoded.

    `tokens` are the ids of a sample, `trained` its flags. Of a long run head and tail are shown,
    of many runs the first and last; what is left out is counted.
    """
    lines, start = [], 0
    for flag, run in groupby(trained.tolist(), key=bool):
        ids = tokens[start : start + sum(1 for _ in run)].tolist()
        start += len(ids)
        lines.append(f"  {'trained' if flag else 'context'}: {_shown(tokenizer, ids)}")
    if len(lines) > _SPANS:
        half = _SPANS // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} more ..."]
    return lines


def _shown(tokenizer: Decodes, ids: Sequence[int]) -> str:
    left_out = len(ids) - _HEAD - _TAIL
    if left_out <= 0:
        return _quoted(tokenizer.decode(ids))
    head, tail = _quoted(tokenizer.decode(ids[:_HEAD])), _quoted(tokenizer.decode(ids[-_TAIL:]))
    return f"{head} ... {left_out:,} tokens ... {tail}"


def _quoted(text: str) -> str:
    """`text` on one line; what a terminal would not show, or obey, is escaped."""
    visible = (
        character
        if character.isprintable() and character != "\\"
        else character.encode("unicode_escape").decode()
        for character in text
    )
    return f'"{"".join(visible)}"'

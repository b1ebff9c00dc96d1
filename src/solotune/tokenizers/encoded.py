"""The tokens of one rendering, and which of them hold given characters."""

from collections.abc import Sequence

import numpy as np
import tokenizers


class EncodedText:
    """The tokens of one rendering: `ids`, and which of them overlap given character spans.

    `edits` are (end, growth) of each respelling that stands between `text` and the rendering.
    """

    def __init__(
        self, encoding: tokenizers.Encoding, text: str, edits: list[tuple[int, int]]
    ) -> None:
        self.ids: list[int] = encoding.ids
        self._encoding = encoding
        self._length = len(text)
        self._edits = edits

    def mask(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """uint8, 1 for each token that overlaps one of `spans` (ascending character spans)."""
        trained = np.zeros(len(self.ids), np.uint8)
        growth, passed = 0, 0
        for span in spans:
            guarded = []
            for position in span:
                while passed < len(self._edits) and self._edits[passed][0] <= position:
                    growth += self._edits[passed][1]
                    passed += 1
                guarded.append(position + growth)
            first, stop = self._token_at(guarded[0]), self._token_at(guarded[1])
            chars = self._encoding.token_to_chars(stop) if stop < len(self.ids) else None
            if chars is not None and chars[0] < guarded[1]:
                stop += 1  # this token also holds the last characters of the span
            trained[first:stop] = 1
        return trained

    def _token_at(self, position: int) -> int:
        """The first token that holds the character at `position` or one after it."""
        for char in range(position, self._length):
            if (token := self._encoding.char_to_token(char)) is not None:
                return token
        return len(self.ids)

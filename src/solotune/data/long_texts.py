"""Tokens of the beginning of a text, without tokenizing the rest of it."""

from collections.abc import Sequence
from dataclasses import replace

from solotune.tokenizers import EncodedText, Rendering, Tokenizer

CHARS_A_TOKEN = 16  # English has 4, code 3; where they are not enough, four times as many are taken
# Before a cut some tokens may be others than in the whole text, and half a control token is spelled
# out; they are beyond those asked for.
_MARGIN = 64  # tokens


def encode_beginnings(
    tokenizer: Tokenizer, renderings: Sequence[Rendering], *, max_tokens: int
) -> list[EncodedText]:
    """Encode so much of each text that its first `max_tokens` tokens are those of the whole.

    A text that gives fewer than `max_tokens` tokens is encoded to its end.
    """
    max_chars = (max_tokens + _MARGIN) * CHARS_A_TOKEN
    begun = [_beginning(rendering, max_chars) for rendering in renderings]
    encoded = tokenizer.encode_renderings(begun)
    for k, (part, whole) in enumerate(zip(begun, renderings, strict=True)):
        chars = max_chars
        while part is not whole and len(encoded[k].ids) < max_tokens + _MARGIN:
            chars *= 4
            part = _beginning(whole, chars)
            encoded[k] = tokenizer.encode_renderings([part])[0]
    return encoded


def _beginning(rendering: Rendering, max_chars: int) -> Rendering:
    """The rendering up to `max_chars`, or to the control token that stands there."""
    if len(rendering.text) <= max_chars:
        return rendering
    spans = [*rendering.plain, *(rendering.controls or ())]
    cut = min([max_chars, *(start for start, end in spans if start < max_chars < end)])
    return replace(
        rendering,
        text=rendering.text[:cut],
        plain=tuple(span for span in rendering.plain if span[1] <= cut),
        controls=rendering.controls and tuple(s for s in rendering.controls if s[1] <= cut),
    )

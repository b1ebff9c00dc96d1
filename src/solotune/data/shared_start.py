"""What many renderings begin with is encoded once: often a system message, the same in all."""

from collections.abc import Sequence

from solotune.data.chat import Span
from solotune.tokenizers import Rendering, Tokenizer

_WORTH_CHARACTERS = 32

Spans = tuple[Span, ...]


def without_shared_start(
    tokenizer: Tokenizer, renderings: Sequence[Rendering], trained: Sequence[Spans]
) -> tuple[list[int], Sequence[Rendering], Sequence[Spans]]:
    """The ids of what all renderings begin with, and renderings and trained spans without it.

    It ends with a control token of the template, so that the ids of a rendering are those of the
    start and those of its rest. It is empty where it would be short, where something in it is
    trained or spells a control token, or where the tokenizer does not encode what follows a control
    token by itself.
    """
    whole: tuple[list[int], Sequence[Rendering], Sequence[Spans]] = ([], renderings, trained)
    if len(renderings) < 2 or not tokenizer.splits_at_controls:
        return whole
    texts = [rendering.text for rendering in renderings]
    pairs = enumerate(zip(min(texts), max(texts), strict=False))  # all others lie between
    common = next((k for k, (one, other) in pairs if one != other), 0)
    controls = tuple(span for span in renderings[0].controls or () if span[1] <= common)
    length = controls[-1][1] if controls else 0
    if length < _WORTH_CHARACTERS:
        return whole
    for rendering, spans in zip(renderings, trained, strict=True):
        if (
            rendering.controls is None
            or rendering.controls[: len(controls)] != controls
            or (spans and spans[0][0] < length)
            or (rendering.plain and rendering.plain[0][0] < length)
        ):
            return whole
    start = Rendering(texts[0][:length], controls=controls)
    rests = [
        Rendering(
            rendering.text[length:],
            plain=_moved(rendering.plain, -length),
            controls=_moved((rendering.controls or ())[len(controls) :], -length),
        )
        for rendering in renderings
    ]
    moved = [_moved(spans, -length) for spans in trained]
    return tokenizer.encode_renderings([start])[0].ids, rests, moved


def _moved(spans: Spans, by: int) -> Spans:
    return tuple([(start + by, end + by) for start, end in spans])

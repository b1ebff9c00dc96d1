"""Where one assistant turn starts and ends, beside its texts.

A turn is what inference leaves to the model: from the end of what the template writes to ask for
it up to the control token that ends it. An empty think block that the template writes by itself is
left out. Where the template has `{% generation %}` blocks, they decide instead.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile

from solotune.tokenizers.traced_text import Leaf, Path

Span = tuple[int, int]

_EMPTY_THINK = re.compile(r"\s*(<think>)?\s*</think>\s*")


class Markers:
    """What a template opens and ends turns with.

    `prompt` is what it writes to ask for an assistant turn, `enders` the control tokens that are
    known to end one, `tail(k)` what follows the last text where message k is asked for, or None.
    """

    def __init__(
        self,
        control_pattern: re.Pattern[str],
        *,
        prompt: str,
        enders: frozenset[str],
        tail: Callable[[int], str | None],
    ) -> None:
        self.control_pattern, self.prompt = control_pattern, prompt
        self.enders, self.tail = enders, tail
        opener = control_pattern.search(prompt)
        self.opener = opener[0] if opener else None
        self.opening = prompt[opener.start() :] if opener else prompt


def units(text: str, control_pattern: re.Pattern[str]) -> list[str]:
    """`text` as control tokens and single characters."""
    found, done = [], 0
    for match in control_pattern.finditer(text):
        found += [*text[done : match.start()], match[0]]
        done = match.end()
    return found + list(text[done:])


def common_length(one: str, other: str, control_pattern: re.Pattern[str]) -> int:
    """How many characters two texts have in common at their start, control tokens unbroken."""
    pairs = zip(units(one, control_pattern), units(other, control_pattern), strict=False)
    return sum(len(a) for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def own_blocks(
    blocks: Sequence[Span], run: Span, before: int, after: int, follows_assistant: bool
) -> list[Span]:
    """The generation blocks of a run; those without a text go with the turn before them."""
    spans: list[Span] = []
    for start, end in blocks:
        holds = start < run[1] and run[0] < end
        closes = run[1] <= start and end <= after
        opens = before <= start and end <= run[0] and not follows_assistant
        if start < end and (holds or closes or opens):
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
    return spans


def after_header(
    text: str, before: int, first: int, leaf: Leaf, markers: Markers, message: int, path: Path
) -> int:
    """Where a turn starts whose first text is `leaf`, at `first`: after inference's own part.

    That is the template's prompt for an assistant turn, or as much of it as stands there, its
    control token at least; without one, what the conversation up to here ends with.
    """
    written = text[before:first]
    opened = -1
    if markers.opener:
        openers = [m for m in markers.control_pattern.finditer(written) if m[0] == markers.opener]
        opened = openers[-1].start() if openers else -1
    elif markers.prompt:
        opened = written.rfind(markers.prompt)
    if opened < 0:
        tail = markers.tail(message) or written
        return before + common_length(written, tail, markers.control_pattern)
    common = common_length(written[opened:], markers.opening, markers.control_pattern)
    start = before + opened + common
    rest = markers.opening[common:]
    if start == first and rest and path.note(leaf, str.startswith, rest):
        return first + len(rest)  # the text itself begins as the prompt ends: <think>
    empty = _EMPTY_THINK.match(text, start, first)
    return empty.end() if empty else start


def end_of_text(
    controls: Sequence[re.Match[str]], end: int, markers: Markers
) -> tuple[int, str | None]:
    """Where a turn ends whose text ends at `end`, terminator included; the terminator."""
    after = [match for match in controls if end <= match.start()]
    if not after or (after[0][0] == markers.opener and after[0][0] not in markers.enders):
        return end, None  # nothing, or the next header
    closing = after[0]
    for one, following in pairwise(after):
        # a mark that closes the text may stand before the token that ends the turn
        if one[0] in markers.enders or one.end() != following.start():
            break
        if following[0] in markers.enders:
            closing = following
    return closing.end(), closing[0]


def end_of_block(
    text: str, controls: Sequence[re.Match[str]], block: Span, markers: Markers
) -> tuple[int, str | None]:
    """The same for a generation block, which may hold the terminator or leave it out."""
    start, end = block
    inside = [match for match in controls if start <= match.start() and match.end() <= end]
    if not inside or text[inside[-1].end() : end].strip():
        return end_of_text(controls, end, markers)
    closing = inside[-1]
    if closing.end() == end and closing[0] not in markers.enders:
        for match in controls:
            if match.start() == end and match[0] in markers.enders:
                return match.end(), match[0]
    return end, closing[0]


def end_of_call(
    text: str, controls: Sequence[re.Match[str]], end: int, markers: Markers, *, is_last: bool
) -> tuple[int, str | None]:
    """The same for a call, which may be written with control tokens of its own.

    So only a known one ends the turn. Without one the turn has no terminator and ends before the
    next header, or with the text.
    """
    after = [match for match in controls if end <= match.start()]
    for match in after:
        if match[0] in markers.enders:
            return match.end(), match[0]
    before_header = _before_header(text, after, markers)
    if before_header is not None:
        return before_header, None
    return (len(text.rstrip()) if is_last else end), None


def _before_header(text: str, controls: Sequence[re.Match[str]], markers: Markers) -> int | None:
    """The end of the control token that stands right before the next header, if one does."""
    for one, following in pairwise(controls):
        if following[0] == markers.opener and not text[one.end() : following.start()].strip():
            return one.end()
    return None

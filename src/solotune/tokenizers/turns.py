"""Where the assistant's turns stand in a rendering, found from where its texts went.

A turn is what inference leaves to the model: from the end of what the template writes to ask for
it up to the control token that ends it. An empty think block that the template writes by itself is
left out. Where the template has `{% generation %}` blocks, they decide instead.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import NamedTuple

from solotune.tokenizers.traced_text import CLOSE, OPEN, Leaf

Span = tuple[int, int]

_EMPTY_THINK = re.compile(r"\s*(<think>)?\s*</think>\s*")
_THINK_TAG = re.compile(r"</?think>")


class Source(NamedTuple):
    """A text of a conversation; `message` -1 stands for the tools."""

    message: int
    kind: str  # content | reasoning | call (its name) | argument | other
    text: str


@dataclass(frozen=True)
class Turn:
    """One assistant turn in a rendering: its character spans, the terminator among them.

    `lost` names what of the message this rendering does not show: reasoning, text, call.
    """

    message: int
    spans: tuple[Span, ...]
    terminator: str | None
    lost: frozenset[str] = frozenset()

    @property
    def start(self) -> int:
        """The first character."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """After the last character."""
        return self.spans[-1][1]


@dataclass(frozen=True)
class Rendering:
    """A conversation as text.

    `plain` are the spans where a message text spells a control token, `controls` those of the
    template's own (None: all others); `not_shown` are messages of others without a trace in it.
    """

    text: str
    turns: tuple[Turn, ...] = ()
    plain: tuple[Span, ...] = ()
    controls: tuple[Span, ...] | None = None
    not_shown: tuple[int, ...] = ()


def kept_turn(whole: Rendering, alone: Rendering) -> Turn | None:
    """The last turn of `alone` as it stands in `whole`, if all up to its end stands there alike.

    `alone` is the conversation up to that turn, as inference would see it. What ends the turn may
    be written with the next message only; a turn that nothing ends is not kept.
    """
    turn = alone.turns[-1]
    found = next((one for one in whole.turns if one.message == turn.message), None)
    if found is None or found.terminator is None:
        return None
    ends_alike = turn.terminator is None or found.spans == turn.spans
    starts_alike = found.start == turn.start and whole.text.startswith(alone.text[: turn.end])
    return found if starts_alike and ends_alike else None


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


class _Shown(NamedTuple):
    start: int
    end: int
    leaf: Leaf


def locate(
    pieces: Sequence[str], sources: Sequence[Source], *, markers: Markers, last: int
) -> Rendering:
    """The rendering that `pieces` make, its turns found; `last` is the last message's number."""
    text, shown, blocks, opened = "".join(pieces), [], [], []
    position = 0
    for piece in pieces:
        if piece is OPEN:
            opened.append(position)
        elif piece is CLOSE:
            blocks.append((opened.pop(), position))
        elif isinstance(piece, Leaf) and piece:
            shown.append(_Shown(position, position + len(piece), piece))
        position += len(piece)
    has_blocks = bool(blocks)

    plain, controls = _tell_controls(text, shown, markers.control_pattern)
    turns: list[Turn] = []
    for first, stop in _runs(shown, sources):
        run = shown[first:stop]
        source = sources[run[-1].leaf.source]
        # template's own text before and after: no text of the conversation stands there
        before = shown[first - 1].end if first else 0
        after = shown[stop].start if stop < len(shown) else len(text)
        follows_assistant = first > 0 and _is_trained(sources[shown[first - 1].leaf.source])
        spans = [(run[0].start, run[-1].end)]
        if has_blocks:
            spans = _own_blocks(blocks, spans[0], before, after, follows_assistant)
            if not spans:
                continue  # the template says that this turn is not the model's
        else:
            spans = [
                (_after_header(text, before, spans[0][0], markers, source.message), spans[0][1])
            ]
        near = [match for match in controls if before <= match.start() and match.end() <= after]
        if has_blocks:
            end, terminator = _end_of_block(text, near, spans[-1], markers)
        elif source.kind in ("call", "argument"):
            is_last = source.message == last
            end, terminator = _end_of_call(text, near, spans[-1][1], markers, is_last=is_last)
        else:
            end, terminator = _end_of_text(near, spans[-1][1], markers)
        spans[-1] = (spans[-1][0], end)
        lost = _lost(sources, shown, source.message)
        turns.append(Turn(source.message, tuple(spans), terminator, lost))

    written = {sources[one.leaf.source].message for one in shown}
    hidden = {
        source.message
        for source in sources
        if source.kind == "other" and source.text.strip() and source.message >= 0
    } - written
    spans_of_controls = tuple(match.span() for match in controls)
    return Rendering(text, tuple(turns), plain, spans_of_controls, tuple(sorted(hidden)))


def _is_trained(source: Source) -> bool:
    return source.kind != "other"


def _tell_controls(
    text: str, shown: Sequence[_Shown], pattern: re.Pattern[str]
) -> tuple[tuple[Span, ...], list[re.Match[str]]]:
    """The spans where texts spell a control token, and those that the template wrote."""
    plain: list[Span] = []
    controls: list[re.Match[str]] = []
    number = 0
    for match in pattern.finditer(text):
        while number < len(shown) and shown[number].end <= match.start():
            number += 1
        if number < len(shown) and shown[number].start < match.end():
            plain.append(match.span())
        elif match[0]:
            controls.append(match)
    return tuple(plain), controls


def _runs(shown: Sequence[_Shown], sources: Sequence[Source]) -> list[Span]:
    """For each assistant message the leaves (first, stop) that stand together in its turn.

    A template may repeat the name of a call where it writes the result, so what repeats at the end
    of a run is left out.
    """
    runs: list[Span] = []
    seen: set[int] = set()
    first = 0
    while first < len(shown):
        source = sources[shown[first].leaf.source]
        stop = first + 1
        if _is_trained(source) and source.message not in seen:
            seen.add(source.message)
            while stop < len(shown) and _same_turn(sources[shown[stop].leaf.source], source):
                stop += 1
            kept = stop
            while kept > first + 1 and _repeats(shown, first, kept - 1):
                kept -= 1
            runs.append((first, kept))
        first = stop
    return runs


def _same_turn(source: Source, other: Source) -> bool:
    return source.message == other.message and _is_trained(source)


def _repeats(shown: Sequence[_Shown], first: int, number: int) -> bool:
    leaf = shown[number].leaf
    return any(
        one.leaf.source == leaf.source and one.leaf.offset == leaf.offset and one.leaf == leaf
        for one in shown[first:number]
    )


def _own_blocks(
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


def _after_header(text: str, before: int, first: int, markers: Markers, message: int) -> int:
    """Where a turn starts whose first text stands at `first`: after what inference begins with.

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
    if opened >= 0:
        like = (written[opened:], markers.opening)
    else:
        like = (written, markers.tail(message) or written)
    start = before + max(opened, 0) + common_length(*like, markers.control_pattern)
    empty = _EMPTY_THINK.match(text, start, first)
    return empty.end() if empty else start


def _end_of_text(
    controls: Sequence[re.Match[str]], end: int, markers: Markers
) -> tuple[int, str | None]:
    """Where a turn ends whose text ends at `end`, terminator included; the terminator."""
    after = [match for match in controls if end <= match.start()]
    if not after:
        return end, None
    closing = after[0]
    for one, following in pairwise(after):
        # a mark that closes the text may stand before the token that ends the turn
        if one[0] in markers.enders or one.end() != following.start():
            break
        if following[0] in markers.enders:
            closing = following
    return closing.end(), closing[0]


def _end_of_block(
    text: str, controls: Sequence[re.Match[str]], block: Span, markers: Markers
) -> tuple[int, str | None]:
    """The same for a generation block, which may hold the terminator or leave it out."""
    start, end = block
    inside = [match for match in controls if start <= match.start() and match.end() <= end]
    if not inside or text[inside[-1].end() : end].strip():
        return _end_of_text(controls, end, markers)
    closing = inside[-1]
    if closing.end() == end and closing[0] not in markers.enders:
        for match in controls:
            if match.start() == end and match[0] in markers.enders:
                return match.end(), match[0]
    return end, closing[0]


def _end_of_call(
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


def _lost(sources: Sequence[Source], shown: Sequence[_Shown], message: int) -> frozenset[str]:
    """What of an assistant message does not stand in the rendering."""
    lost: set[str] = set()
    for number, source in enumerate(sources):
        if source.message != message or source.kind in ("argument", "other"):
            continue
        leaves = [one.leaf for one in shown if one.leaf.source == number]
        if source.kind != "content":
            if source.text.strip() and not leaves:
                lost.add(source.kind)
        elif not any(leaf.offset is None for leaf in leaves):
            left = list(source.text)
            for match in _THINK_TAG.finditer(source.text):  # the template writes its own
                left[match.start() : match.end()] = " " * len(match[0])
            for leaf in leaves:
                offset = leaf.offset or 0
                left[offset : offset + len(leaf)] = " " * len(leaf)
            answer = source.text.rfind("</think>") + 1
            parts = {"reasoning": left[:answer], "text": left[answer:]}
            lost |= {kind for kind, part in parts.items() if "".join(part).strip()}
    return frozenset(lost)

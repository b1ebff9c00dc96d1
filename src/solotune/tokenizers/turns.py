"""Where the assistant's turns stand in a rendering, found from where its texts went."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from solotune.tokenizers.traced_text import CLOSE, OPEN, Leaf, Path
from solotune.tokenizers.turn_edges import (
    Markers,
    Span,
    after_header,
    end_of_block,
    end_of_call,
    end_of_text,
    own_blocks,
)

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


class _Shown(NamedTuple):
    start: int
    end: int
    leaf: Leaf


def locate(
    pieces: Sequence[str], sources: Sequence[Source], path: Path, *, markers: Markers, last: int
) -> Rendering:
    """The rendering that `pieces` make, its turns found; `last` is the last message's number.

    What is asked about a text to find them is noted in `path`.
    """
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
            spans = own_blocks(blocks, spans[0], before, after, follows_assistant)
            if not spans:
                continue  # the template says that this turn is not the model's
        else:
            start = after_header(
                text, before, run[0].start, run[0].leaf, markers, source.message, path
            )
            spans = [(start, spans[0][1])]
        near = [match for match in controls if before <= match.start() and match.end() <= after]
        if has_blocks:
            end, terminator = end_of_block(text, near, spans[-1], markers)
        elif source.kind in ("call", "argument"):
            is_last = source.message == last
            end, terminator = end_of_call(text, near, spans[-1][1], markers, is_last=is_last)
        else:
            end, terminator = end_of_text(near, spans[-1][1], markers)
        spans[-1] = (spans[-1][0], end)
        lost = lost_parts(sources, [one.leaf for one in shown], source.message)
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


def lost_parts(sources: Sequence[Source], leaves: Sequence[Leaf], message: int) -> frozenset[str]:
    """What of an assistant message does not stand among `leaves`: reasoning, text, call."""
    lost: set[str] = set()
    for number, source in enumerate(sources):
        if source.message != message or source.kind in ("argument", "other"):
            continue
        own = [leaf for leaf in leaves if leaf.source == number and leaf]
        if source.kind != "content":
            if source.text.strip() and not own:
                lost.add(source.kind)
        elif not any(leaf.offset is None for leaf in own):
            left = list(source.text)
            for match in _THINK_TAG.finditer(source.text):  # the template writes its own
                left[match.start() : match.end()] = " " * len(match[0])
            for leaf in own:
                offset = leaf.offset or 0
                left[offset : offset + len(leaf)] = " " * len(leaf)
            answer = source.text.rfind("</think>") + 1
            parts = {"reasoning": left[:answer], "text": left[answer:]}
            lost |= {kind for kind, part in parts.items() if "".join(part).strip()}
    return frozenset(lost)

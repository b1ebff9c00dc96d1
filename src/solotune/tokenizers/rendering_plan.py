"""A rendering as literal pieces and slots, filled without running the template again.

Made from one traced rendering. It holds for every conversation of the same roles and keys whose
texts answer the checks of that rendering's path alike: the template would take the same way.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from solotune.tokenizers.traced_text import Leaf, Path, Step, Steps
from solotune.tokenizers.turns import Rendering, Source, Turn, lost_parts

# A character of a rendering: the piece, and the distance from its start.
Place = tuple[int, int]


@dataclass(frozen=True)
class _Check:
    steps: tuple[tuple[int, Step], ...]  # made before it, each of the value with that number
    value: int
    question: Callable[..., Any]
    args: tuple[Any, ...]
    answer: Any


class RenderingPlan:
    """Fills the texts of a conversation into the pieces of another one's rendering."""

    def __init__(
        self, pieces: Sequence[str], sources: Sequence[Source], path: Path, rendering: Rendering
    ) -> None:
        self._values: dict[tuple[int, Steps], int] = {(n, ()): n for n in range(len(sources))}
        self._new_steps: list[tuple[int, Step]] = []
        merged: list[str] = []
        for piece in pieces:
            if isinstance(piece, Leaf):
                merged += [piece] if piece.source >= 0 else []
            elif merged and not isinstance(merged[-1], Leaf):
                merged[-1] += piece
            else:
                merged.append(piece)
        self._pieces = ["" if isinstance(piece, Leaf) else piece for piece in merged]
        # in the order of the template: a later step may be possible only after an earlier check
        self._checks = [
            self._check(source, steps, question, args, answer)
            for (source, steps, question, args), answer in path.checks.items()
        ]
        self._slots: list[tuple[int, int]] = []  # (piece, value)
        for number, piece in enumerate(merged):
            if isinstance(piece, Leaf):
                steps = piece.steps or ()
                # where a slot is empty, turns are found otherwise
                self._checks.append(self._check(piece.source, steps, bool, (), bool(piece)))
                self._slots.append((number, self._values[piece.source, steps]))
        hidden = set(range(len(sources))) - {p.source for p in merged if isinstance(p, Leaf)}
        for number in sorted(hidden):  # what is not shown is counted by whether it holds anything
            has_text = _has_text(sources[number].text)
            self._checks.append(self._check(number, (), _has_text, (), has_text))
        # whether some of a message is lost may depend on which part of its content is shown
        whole = {p.source for p in merged if isinstance(p, Leaf) and _only_stripped(p.steps or ())}
        self._sources = list(sources)
        self._parted = {
            source.message
            for number, source in enumerate(sources)
            if source.kind == "content" and number not in whole
        }
        starts = [0]
        for piece in merged:
            starts.append(starts[-1] + len(piece))

        def place(position: int) -> Place:
            number = bisect(starts, position) - 1
            ends_literal = number > 0 and starts[number] == position
            if ends_literal and not isinstance(merged[number - 1], Leaf):
                number -= 1
            # else in a literal, or inside a text of which a check holds that it begins alike
            return number, position - starts[number]

        self._turns = [
            (turn, [(place(start), place(end)) for start, end in turn.spans])
            for turn in rendering.turns
        ]
        self._controls = [(place(start), place(end)) for start, end in rendering.controls or ()]
        self._not_shown = rendering.not_shown

    def fill(self, texts: Sequence[str], find_controls: Callable[[str], Any]) -> Rendering | None:
        """The rendering with these texts, or None where the template would take another way.

        `find_controls` iterates over the matches of control tokens in a text.
        """
        values = list(texts)
        for check in self._checks:
            for origin, step in check.steps:
                values.append(step.take(values[origin]))
            if check.question(values[check.value], *check.args) != check.answer:
                return None
        pieces = self._pieces.copy()
        for number, value in self._slots:
            pieces[number] = values[value]
        starts, position = [], 0
        for piece in pieces:
            starts.append(position)
            position += len(piece)
        starts.append(position)
        plain = [
            (starts[number] + match.start(), starts[number] + match.end())
            for number, value in self._slots
            for match in find_controls(values[value])
        ]
        lost = self._lost(values) if self._parted else {}
        # lists: a generator costs more than what it yields here
        turns = [
            Turn(
                turn.message,
                tuple([(starts[a] + b, starts[c] + d) for (a, b), (c, d) in spans]),
                turn.terminator,
                lost.get(turn.message, turn.lost),
            )
            for turn, spans in self._turns
        ]
        controls = [(starts[a] + b, starts[c] + d) for (a, b), (c, d) in self._controls]
        text = "".join(pieces)
        return Rendering(text, tuple(turns), tuple(plain), tuple(controls), self._not_shown)

    def _lost(self, values: Sequence[str]) -> dict[int, frozenset[str]]:
        """What is lost of each message whose content is shown in parts."""
        leaves = [Leaf.of(values[n], n) for n in range(len(self._sources))]
        for check in self._checks:
            for origin, step in check.steps:
                leaves.append(leaves[origin].after(step, values[len(leaves)]))
        shown = [leaves[value] for _, value in self._slots]
        texts = [s._replace(text=values[n]) for n, s in enumerate(self._sources)]
        return {k: lost_parts(texts, shown, k) for k in self._parted}

    def _check(
        self,
        source: int,
        steps: Steps,
        question: Callable[..., Any],
        args: tuple[Any, ...],
        answer: Any,
    ) -> _Check:
        value = self._value(source, steps)
        made, self._new_steps = tuple(self._new_steps), []
        return _Check(made, value, question, args, answer)

    def _value(self, source: int, steps: Steps) -> int:
        """The number of the value that `steps` make of a source text."""
        key = (source, steps)
        if key not in self._values:
            self._new_steps.append((self._value(source, steps[:-1]), steps[-1]))
            self._values[key] = len(self._values)
        return self._values[key]


def _only_stripped(steps: Steps) -> bool:
    methods = ("strip", "lstrip", "rstrip")
    return all(
        step.method in methods and not (step.args and step.args[0] and step.args[0].strip())
        for step in steps
    )


def _has_text(text: str) -> bool:
    return bool(text.strip())

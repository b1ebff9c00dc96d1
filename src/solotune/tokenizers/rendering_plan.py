"""A rendering as literal pieces and slots, filled without running the template again.

Made from one traced rendering. It holds for every conversation of the same roles and keys whose
texts answer the checks of that rendering's path alike: the template would take the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from solotune.tokenizers.traced_text import Leaf, Path, Steps
from solotune.tokenizers.turns import Rendering, Source, Turn

# A character of a rendering: the piece, and the distance from its start.
Place = tuple[int, int]


@dataclass(frozen=True)
class _Check:
    value: int
    question: Callable[..., Any]
    args: tuple[Any, ...]
    answer: Any


class RenderingPlan:
    """Fills the texts of a conversation into the pieces of another one's rendering."""

    def __init__(
        self, pieces: Sequence[str], sources: Sequence[Source], path: Path, rendering: Rendering
    ) -> None:
        self._num_texts = len(sources)
        self._values: dict[tuple[int, Steps], int] = {(n, ()): n for n in range(len(sources))}
        self._steps: list[tuple[int, Any]] = []  # (value that it is made of, step)
        merged: list[str] = []
        for piece in pieces:
            if isinstance(piece, Leaf):
                merged += [piece] if piece.source >= 0 else []
            elif merged and not isinstance(merged[-1], Leaf):
                merged[-1] += piece
            else:
                merged.append(piece)
        self._pieces = ["" if isinstance(piece, Leaf) else piece for piece in merged]
        self._slots = [
            (number, self._value(piece.source, piece.steps or ()))
            for number, piece in enumerate(merged)
            if isinstance(piece, Leaf)
        ]
        self._checks = [
            _Check(self._value(source, steps), question, args, answer)
            for (source, steps, question, args), answer in path.checks.items()
        ]
        filled = {value: merged[number] for number, value in self._slots}
        # where a slot is empty, turns are found otherwise
        self._checks += [_Check(value, bool, (), bool(text)) for value, text in filled.items()]
        # what is not shown is counted by whether it holds anything
        hidden = set(range(len(sources))) - {p.source for p in merged if isinstance(p, Leaf)}
        self._checks += [
            _Check(number, _has_text, (), _has_text(sources[number].text)) for number in hidden
        ]
        starts = [0]
        for piece in merged:
            starts.append(starts[-1] + len(piece))

        def place(position: int) -> Place:
            for number, piece in enumerate(merged):
                if not isinstance(piece, Leaf) and starts[number] <= position <= starts[number + 1]:
                    return number, position - starts[number]
            for number in range(len(merged) + 1):
                if starts[number] == position:
                    return number, 0
            raise AssertionError("a turn starts or ends inside a text")

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
        for origin, step in self._steps:
            values.append(step.take(values[origin]))
        for check in self._checks:
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
        # lists: a generator costs more than what it yields here
        turns = [
            Turn(
                turn.message,
                tuple([(starts[a] + b, starts[c] + d) for (a, b), (c, d) in spans]),
                turn.terminator,
                turn.lost,
            )
            for turn, spans in self._turns
        ]
        controls = [(starts[a] + b, starts[c] + d) for (a, b), (c, d) in self._controls]
        text = "".join(pieces)
        return Rendering(text, tuple(turns), tuple(plain), tuple(controls), self._not_shown)

    def _value(self, source: int, steps: Steps) -> int:
        """The number of the value that `steps` make of a source text."""
        key = (source, steps)
        if key not in self._values:
            origin = self._value(source, steps[:-1])
            self._values[key] = self._num_texts + len(self._steps)
            self._steps.append((origin, steps[-1]))
        return self._values[key]


def _has_text(text: str) -> bool:
    return bool(text.strip())

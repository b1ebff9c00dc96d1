"""What a sweep tries: the words of a command line as axes, and the runs in their order.

optimizer.lr=1e-4,1e-5       an axis of two values
'names=[a, b],[c]'           a comma inside brackets or quotes separates nothing
dataset=a\\,b.jsonl           one value: \\, is a comma
optimizer.lr=1e-5..1e-3      a range, drawn from by a random sweep, uniformly in the logarithm
"""

import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from solotune.config.overrides import key_of, parse_override
from solotune.errors import UsageError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_WHOLE = re.compile(r"\d+")
_CLOSING = {"]": "[", "}": "{"}
_NAME_CHARACTERS = 32  # of one value in the name of a folder
_MANY = 1000  # runs: more is a slip of the fingers

Run = tuple[str, ...]  # the value of each axis, as text


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both above 0; whole ones where both ends are."""

    low: float
    high: float
    is_whole: bool

    def draw(self, generator: random.Random) -> str:
        """Return a number, uniform in the logarithm, to three digits."""
        number = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return str(round(number)) if self.is_whole else f"{number:.3g}"


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes in turn, as text; or one range."""

    key: str
    values: tuple[str, ...] | Range


def read_axes(words: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Return the axes among overrides, and the other words as `tune run` takes them.

    Raises UsageError for an empty value, one given twice, and a key given twice.
    """
    axes, others = [], []
    for word in words:
        parse_override(word)  # the grammar of a word that is no axis
        key, equals, text = word.partition("=")
        values = split_values(text)
        if (bounds := _RANGE.fullmatch(text)) is not None:
            axes.append(Axis(key, _range(word, *bounds.groups())))
        elif len(values) > 1:
            _check_values(word, values)
            axes.append(Axis(key, tuple(values)))
        else:
            others.append(f"{key}{equals}{''.join(values)}")
    swept = [axis.key for axis in axes]
    for key, count in Counter([*swept, *map(key_of, others)]).items():
        if count > 1 and key in swept:
            raise UsageError(f"{key} is given twice: name all of its values in one word")
    return axes, others


def split_values(text: str) -> list[str]:
    """Return the parts between the commas that separate; `\\,` becomes a comma."""
    parts, part, opened, quote = [], "", [], ""
    characters = iter(range(len(text)))
    for i in characters:
        character = text[i]
        if text.startswith("\\,", i) and not quote:
            part += ","
            next(characters)
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not part.strip():  # an apostrophe inside a word is text
            quote = character
        elif character in "[{":
            opened.append(character)
        elif character in _CLOSING and opened and opened[-1] == _CLOSING[character]:
            opened.pop()
        elif character == "," and not opened:
            parts.append(part.strip())
            part = ""
            continue
        part += character
    return [*parts, part.strip()] if parts else [part]


def _check_values(word: str, values: list[str]) -> None:
    if "" in values:
        raise UsageError(f"{word}: a value is empty: write '' for a text without letters, or None")
    for value, count in Counter(values).items():
        if count > 1:
            raise UsageError(f"{word}: {value} is there twice")
        if _RANGE.fullmatch(value):
            raise UsageError(f"{word}: a range stands alone: {word.partition('=')[0]}={value}")


def _range(word: str, low: str, high: str) -> Range:
    if not 0 < float(low) < float(high):
        raise UsageError(f"{word}: a range goes from a number above 0 to a higher one")
    is_whole = bool(_WHOLE.fullmatch(low) and _WHOLE.fullmatch(high))
    return Range(float(low), float(high), is_whole)


def grid(axes: Sequence[Axis]) -> list[Run]:
    """Return every combination, so that the first ones already show all axes.

    Each next run is the one whose values were tried least so far, weighed by how many the axis has.
    Raises UsageError for a range.
    """
    for axis in axes:
        if isinstance(axis.values, Range):
            raise UsageError(f"{axis.key}: a range needs --random N, the number of runs")
    lists = [axis.values for axis in axes if not isinstance(axis.values, Range)]
    _check_count(math.prod(len(values) for values in lists))
    waiting, ordered = list(itertools.product(*lists)), []
    tried = [Counter() for _ in lists]
    while waiting:
        costs = [
            sum(len(values) * seen[v] for values, seen, v in zip(lists, tried, run, strict=True))
            for run in waiting
        ]
        run = waiting.pop(costs.index(min(costs)))
        ordered.append(run)
        for seen, value in zip(tried, run, strict=True):
            seen[value] += 1
    return ordered


def drawn(axes: Sequence[Axis], *, count: int, seed: int) -> list[Run]:
    """Return `count` different combinations; a higher count begins with the same ones.

    Raises UsageError where there are fewer.
    """
    if count < 1:
        raise UsageError(f"--random {count}: 1 or more runs are needed")
    _check_count(count)
    generator = random.Random(seed)
    runs: dict[Run, None] = {}
    missed = 0
    while len(runs) < count:
        run = tuple(
            axis.values.draw(generator)
            if isinstance(axis.values, Range)
            else generator.choice(axis.values)
            for axis in axes
        )
        missed = missed + 1 if run in runs else 0
        runs[run] = None
        if missed > 100 * count:
            raise UsageError(f"--random {count}: these axes have {len(runs)} combinations")
    return list(runs)


def _check_count(count: int) -> None:
    if count > _MANY:
        raise UsageError(f"{count:,} runs are more than the {_MANY:,} of one sweep")


def words_of(axes: Sequence[Axis], run: Run) -> list[str]:
    """Return the overrides of a run."""
    return [f"{axis.key}={value}" for axis, value in zip(axes, run, strict=True)]


def name_of(axes: Sequence[Axis], run: Run) -> str:
    """Return the name of a run's folder, as `lr=1e-4_rank=8`.

    A value with characters that a folder's name should not have, or a long one, ends in a hash.
    """
    last = Counter(axis.key.rpartition(".")[2] for axis in axes)
    names = []
    for axis, value in zip(axes, run, strict=True):
        short = axis.key.rpartition(".")[2]
        key = short if last[short] == 1 else axis.key
        names.append(f"{key}={_clean(value)}")
    return "_".join(names)


def _clean(value: str) -> str:
    clean = re.sub(r"[^\w.+-]+", "-", value).strip("-.") or "empty"
    if clean == value and len(clean) <= _NAME_CHARACTERS:
        return clean
    return f"{clean[-_NAME_CHARACTERS:]}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"

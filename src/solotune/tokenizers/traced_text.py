"""Text that remembers what it was made of, so that a rendering tells where each text went.

A chat template is run on `Traced` texts. They act as `str` does; what a template writes is then a
row of pieces, literal ones and `Leaf` ones, which know their source text. A `Path` notes how the
template looked at the texts on the way: another conversation that answers all of its checks alike
takes the same way through the template, so its rendering is known without running it
(rendering_plan.py). What cannot be noted closes the path.
"""

import json
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A call on a text, `method(*args)`, and the item of its result where it is a list."""

    method: str
    args: tuple[Any, ...]
    item: int | None = None

    def take(self, text: str) -> str:
        """The text after this step."""
        result = getattr(text, self.method)(*self.args)
        return result if self.item is None else result[self.item]


Steps = tuple[Step, ...]
# What was asked about a text: its source, the steps to it, the question, its further arguments.
Check = tuple[int, Steps, Callable[..., Any], tuple[Any, ...]]


class Path:
    """The checks that a template made on the texts of one conversation, with their results."""

    def __init__(self) -> None:
        self.checks: dict[Check, Any] = {}
        self.closed = False

    def note(self, leaf: "Leaf", question: Callable[..., Any], *args: Any) -> Any:
        """The answer to `question(leaf, *args)`, noted."""
        answer = question("".join((leaf,)), *args)
        if leaf.steps is None:
            self.closed = True
        else:
            self.checks[(leaf.source, leaf.steps, question, args)] = answer
        return answer


class Leaf(str):
    """Characters of the source text with the number `source`.

    `steps` lead from the source text to this one, None where they are not known; `offset` is where
    in the source text it starts, None where it is not a part of it as it stands.
    """

    __slots__ = ("offset", "source", "steps")
    source: int
    steps: Steps | None
    offset: int | None

    @classmethod
    def of(
        cls, text: str, source: int, *, steps: Steps | None = (), offset: int | None = 0
    ) -> "Leaf":
        """A leaf that holds `text`."""
        leaf = str.__new__(cls, text)
        leaf.source, leaf.steps, leaf.offset = source, steps, offset
        return leaf

    def after(self, step: Step, text: str) -> "Leaf":
        """The leaf that holds `text`, the result of `step` on this one."""
        moved: int | None = None
        if self.offset is not None and (found := str.find(self, text)) >= 0:
            if step.method == "rstrip":
                found = 0
            elif step.method == "split":
                parts = str.split(self, *step.args)[: step.item]
                found = sum(map(len, parts)) + len(step.args[0]) * len(parts)
            moved = self.offset + found
        steps = None if self.steps is None else (*self.steps, step)
        return Leaf.of(text, self.source, steps=steps, offset=moved)


# Edges of generation blocks, among the pieces.
OPEN, CLOSE = Leaf.of("", -1), Leaf.of("", -2)


def count_parts(text: str, separator: str, most: int = -1) -> int:
    """Into how many parts `text.split(separator, most)` falls."""
    return len(text.split(separator, most))


class Traced(str):
    """A text with its pieces. The path is None for one that holds no leaf but edges of blocks.

    The sandbox hides names that start with an underscore from templates.
    """

    __slots__ = ("_path", "_pieces")
    _pieces: tuple[str, ...]
    _path: Path | None

    @classmethod
    def of(cls, pieces: Iterable[str], path: Path | None) -> "Traced":
        """The text of `pieces`, of which the empty literal ones are left out."""
        kept = tuple(piece for piece in pieces if piece or type(piece) is Leaf)
        text = str.__new__(cls, "".join(kept))
        text._pieces, text._path = kept, path
        return text

    def _close(self) -> None:
        if self._path is not None:
            self._path.closed = True

    @property
    def _only(self) -> Leaf | None:
        """The leaf that this text is, or None where it is more than one leaf."""
        if len(self._pieces) == 1 and type(leaf := self._pieces[0]) is Leaf and leaf.source >= 0:
            return leaf
        return None

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        leaf = self._only
        plain = not any(isinstance(argument, Traced) for argument in args)
        if leaf is not None and self._path is not None and plain:
            return self._path.note(leaf, question, *args)
        self._close()
        return question("".join((self,)), *args)

    def _step(self, method: str, *args: Any) -> "str":
        """The result of a method that makes one text of this one."""
        leaf = self._only
        result = getattr(str, method)(self, *args)
        if leaf is None:
            self._close()
            return result
        return Traced.of((leaf.after(Step(method, args), result),), self._path)

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, str):
            return NotImplemented
        return joined((self, other))

    def __radd__(self, other: Any) -> Any:
        if not isinstance(other, str):
            return NotImplemented
        return joined((other, self))

    def __bool__(self) -> bool:
        if any(type(piece) is not Leaf for piece in self._pieces):
            return True
        leaves = [piece for piece in self._pieces if isinstance(piece, Leaf) and piece.source >= 0]
        return self._path is not None and any(self._path.note(leaf, bool) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return self._ask(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self._close()
        return str.__hash__(self)

    def __contains__(self, part: object) -> bool:
        if any(type(piece) is not Leaf and part in piece for piece in self._pieces):  # type: ignore[operator]
            return True
        return self._ask(operator.contains, part)

    def startswith(self, prefix: Any, *args: Any) -> bool:
        """As `str.startswith`."""
        first = self._pieces[0] if self._pieces else ""
        if type(first) is not Leaf and isinstance(prefix, str) and len(prefix) <= len(first):
            return first.startswith(prefix, *args)
        return self._ask(str.startswith, prefix, *args)

    def endswith(self, suffix: Any, *args: Any) -> bool:
        """As `str.endswith`."""
        last = self._pieces[-1] if self._pieces else ""
        if type(last) is not Leaf and isinstance(suffix, str) and len(suffix) <= len(last):
            return last.endswith(suffix, *args)
        return self._ask(str.endswith, suffix, *args)

    def strip(self, chars: str | None = None, /) -> str:
        """As `str.strip`."""
        if self._only is not None:
            return self._step("strip", chars)
        return Traced.of(self._stripped("lstrip", chars), self._path).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        """As `str.lstrip`."""
        return Traced.of(self._stripped("lstrip", chars), self._path)

    def rstrip(self, chars: str | None = None, /) -> str:
        """As `str.rstrip`."""
        return Traced.of(self._stripped("rstrip", chars), self._path)

    def _stripped(self, method: str, chars: str | None) -> list[str]:
        """The pieces after stripping one end, piece by piece until one is left there."""
        pieces = list(self._pieces)
        end = 0 if method == "lstrip" else -1
        while pieces:
            piece = pieces[end]
            rest = getattr(str, method)(piece, chars)
            if isinstance(piece, Leaf):
                rest = piece.after(Step(method, (chars,)), rest)
                if len(pieces) == 1:
                    return [rest]
                if self._path is not None and piece.source >= 0:
                    self._path.note(rest, bool)
            if rest:
                pieces[end] = rest
                break
            pieces.pop(end)
        return pieces

    def split(self, separator: str | None = None, most: int = -1) -> list[str]:  # type: ignore[override]
        """As `str.split`."""
        parts = str.split(self, separator, most)
        leaf = self._only
        if separator is None:
            self._close()
            return parts
        if leaf is None or self._path is None:
            self._close()
            starts = [0]
            for part in parts:
                starts.append(starts[-1] + len(part) + len(separator))
            return [
                self[start : start + len(part)] for start, part in zip(starts, parts, strict=False)
            ]
        self._path.note(leaf, count_parts, separator, most)
        made: list[str] = []
        for item, part in enumerate(parts):
            one = leaf.after(Step("split", (separator, most), item), part)
            self._path.note(one.after(Step("strip", ()), part.strip()), bool)
            made.append(Traced.of((one,), self._path))
        return made

    def replace(self, old: str, new: str, count: int = -1, /) -> str:  # type: ignore[override]
        """As `str.replace`."""
        if not self._ask(operator.contains, old):
            return self
        return self._step("replace", old, new, count)

    def __getitem__(self, key: Any) -> str:
        self._close()
        if not isinstance(key, slice):
            key = slice(key, key + 1 or None)
            str.__getitem__(self, key.start)  # raises IndexError
        start, stop, stride = key.indices(str.__len__(self))
        if stride != 1:
            return str.__getitem__(self, key)
        taken: list[str] = []
        for piece in self._pieces:
            part = str.__getitem__(piece, slice(max(start, 0), max(stop, 0)))
            if isinstance(piece, Leaf):
                offset = None if piece.offset is None else piece.offset + max(start, 0)
                part = Leaf.of(part, piece.source, steps=None, offset=offset)
            if part:
                taken.append(part)
            start, stop = start - len(piece), stop - len(piece)
        return Traced.of(taken, self._path)


def _stepping(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._step(name, *args)


def _closing(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: Traced, *args: Any, **kwargs: Any) -> Any:
        self._close()
        return method(self, *args, **kwargs)

    return call


for _name in "capitalize casefold lower removeprefix removesuffix swapcase title upper".split():
    setattr(Traced, _name, _stepping(_name))
for _name in (
    "__format__ __ge__ __gt__ __iter__ __le__ __len__ __lt__ __mod__ __mul__ __rmod__ __rmul__ "
    "center count encode expandtabs find format format_map index isalnum isalpha isascii isdecimal "
    "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust "
    "partition rfind rindex rjust rpartition rsplit splitlines translate zfill"
).split():
    setattr(Traced, _name, _closing(_name))


class TracedDict(dict):
    """A mapping of one source, so that its JSON text is traced too.

    It has no attributes that a template could take for its keys.
    """

    __slots__ = ("_origin",)
    _origin: tuple[int, Path]


def traced_dict(items: dict[Any, Any], source: int, path: Path) -> TracedDict:
    """`items`, of the source with this number."""
    made = TracedDict(items)
    made._origin = (source, path)
    return made


def alike(original: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    """`items`, of one source where `original` is."""
    return traced_dict(items, *original._origin) if isinstance(original, TracedDict) else items


def pieces_of(text: str) -> tuple[str, ...]:
    """The pieces of a text: one where it is not traced."""
    return text._pieces if isinstance(text, Traced) else (text,)


def path_of(text: str) -> Path | None:
    """The path of a traced text."""
    return text._path if isinstance(text, Traced) else None


def joined(parts: Iterable[str]) -> str:
    """`"".join(parts)`, traced where a part is."""
    parts = list(parts)
    path, traced = None, False
    for part in parts:
        if type(part) is Traced:
            path, traced = path or part._path, True
    if not traced:
        return "".join(parts)
    pieces: list[str] = []
    for part in parts:
        pieces.extend(part._pieces if type(part) is Traced else (part,))
    return Traced.of(pieces, path)


def to_json(
    value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False
) -> str:
    """The filter `tojson` as Hugging Face sets it; traced, as one leaf, where `value` is."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    origin = _origin(value)
    if origin is None:
        return text
    source, path = origin
    if path is not None:
        path.closed = True
    return Traced.of((Leaf.of(text, source, steps=None, offset=None),), path)


def _origin(value: Any) -> tuple[int, Path | None] | None:
    """The source of the first traced part of a value, and its path."""
    if isinstance(value, TracedDict):
        return value._origin
    if isinstance(value, Traced):
        leaf = next((piece for piece in value._pieces if isinstance(piece, Leaf)), None)
        return None if leaf is None else (leaf.source, value._path)
    inner: Sequence[Any] = ()
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    return next((origin for item in inner if (origin := _origin(item)) is not None), None)

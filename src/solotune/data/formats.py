"""How the rows of a data set are read: a format, and which column of a row is what."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from solotune.config.suggest import suggest
from solotune.data.detection import (
    FORMATS,
    OPTIONAL,
    OTHER_NAMES,
    Format,
    detect,
    other_names,
    required_columns,
)
from solotune.data.messages import (
    Conversation,
    checked_text,
    from_json,
    parse_messages,
    parse_tools,
)
from solotune.errors import ConfigError, DataError

_CHATS = ("messages", "conversations")
_MESSAGE_KEYS = ("role", "content")  # of each message, where column_map names them


@dataclass(frozen=True)
class Layout:
    """A format, and for each of its columns the names that it may have in a row."""

    format: Format
    names: Mapping[str, tuple[str, ...]]
    message_keys: Mapping[str, str]  # the file's names of `role` and `content`

    @property
    def is_exchange(self) -> bool:
        """Whether a row is one question and its answer."""
        return self.format in ("prompt", "instruction")

    def parse(self, columns: Mapping[str, Any], *, answered: bool = True) -> Conversation | str:
        """A row as a conversation, or as text (format `text`); not `answered`: without its answer.

        Raises DataError with the reason.
        """
        self.check_required(columns, answered)
        if self.format == "text":
            return checked_text(self._value(columns, "text"), "column text")
        system, tools = self._value(columns, "system"), parse_tools(self._value(columns, "tools"))
        system = checked_text(system, "column system") if system is not None else ""
        if self.format in _CHATS:
            given = self._value(columns, self.format)
            return parse_messages(given, system=system, tools=tools, keys=self.message_keys)
        answer = self._value(columns, FORMATS[self.format][1]) if answered else None
        earlier = _earlier_turns(self._value(columns, "history"))
        return _exchange(earlier, self._asked(columns), answer, system=system, tools=tools)

    def not_used(self, columns: Iterable[str]) -> set[str]:
        """The columns of a row that the format does not read."""
        return set(columns) - {name for names in self.names.values() for name in names}

    def _value(self, columns: Mapping[str, Any], column: str) -> Any:
        names = self.names.get(column, ())
        return next((columns[name] for name in names if columns.get(name) is not None), None)

    def check_required(self, columns: Mapping[str, Any], answered: bool) -> None:
        """Raise DataError where a row lacks a column that the format must have."""
        for column in required_columns(self.format, answered):
            if self._value(columns, column) is None:
                (name,) = self.names[column]
                if name in columns:
                    raise DataError(f"column {name} holds null")
                raise DataError(
                    f"format {self.format} wants the column {name}, found {sorted(columns)}: "
                    "set dataset.format or dataset.column_map"
                )

    def _asked(self, columns: Mapping[str, Any]) -> Any:
        if self.format == "prompt":
            return self._value(columns, "prompt")
        question = checked_text(self._value(columns, "instruction"), "column instruction")
        addition = self._value(columns, "input")
        addition = checked_text(addition, "column input") if addition is not None else ""
        return f"{question}\n\n{addition}" if addition else question


def _exchange(
    earlier: list[Any], asked: Any, answer: Any, *, system: str, tools: Any
) -> Conversation:
    """A question and perhaps its answer, each a text or a list of messages, behind earlier turns.

    Assistant turns inside the question are context, unless they carry a `weight` of their own.
    """
    opening, closing = _as_messages(asked, "user"), _as_messages(answer, "assistant")
    opening = [
        message | {"weight": 0}
        if isinstance(message, dict) and message.get("weight") is None
        else message
        for message in opening
    ]
    return parse_messages(earlier + opening + closing, system=system, tools=tools)


def _earlier_turns(history: Any) -> list[Any]:
    """The messages of a column of [question, answer] pairs."""
    pairs = from_json(history) or []
    if not isinstance(pairs, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in pairs
    ):
        raise DataError("column history is not a list of [question, answer] pairs")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _as_messages(value: Any, role: str) -> list[Any]:
    if value is None or isinstance(value, list):
        return value or []
    name = "prompt" if role == "user" else "completion"
    return [{"role": role, "content": checked_text(value, f"column {name}")}]


def find_layout(
    columns: Mapping[str, Any],
    place: str,
    *,
    format: Format | None = None,
    column_map: Mapping[str, str] | None = None,
    answered: bool = True,
) -> Layout:
    """The layout of the rows, from the columns of the first one, which stands at `place`.

    `column_map` gives the file's name for each of our column names; without `answered` a row may
    lack what is to be answered. Raises ConfigError for a `column_map` that names no column of ours
    or of the row, and DataError where no format, or more than one, has the columns.
    """
    column_map = column_map or {}
    _check_column_map(columns, column_map, format, place)
    found = {name for name in columns if name not in column_map.values()} | set(column_map)
    if format is None:
        format = detect(columns, place, found=found, answered=answered)
    names: dict[str, tuple[str, ...]] = {}
    for column in (*FORMATS[format], *OPTIONAL.get(format, ())):
        if column in column_map:
            names[column] = (column_map[column],)
        elif column not in FORMATS[format]:  # looked for in each row: it may come later
            names[column] = (column, *OTHER_NAMES.get(column, ()))
        else:
            others = other_names(column, format, found)
            if column not in found and len(others) > 1:
                raise DataError(
                    f"{place}: {' and '.join(others)} may each be the {column} of format {format}: "
                    f"name one with dataset.column_map.{column}"
                )
            names[column] = (column,) if column in found or not others else (others[0],)
    keys = {key: column_map[key] for key in _MESSAGE_KEYS if key in column_map}
    layout = Layout(format, names, keys)
    layout.check_required(columns, answered)
    return layout


def _check_column_map(
    columns: Mapping[str, Any],
    column_map: Mapping[str, str],
    format: Format | None,
    place: str,
) -> None:
    formats = FORMATS if format is None else (format,)
    known = {column for each in formats for column in (*FORMATS[each], *OPTIONAL.get(each, ()))}
    if known & set(_CHATS):
        known |= set(_MESSAGE_KEYS)
    for ours, theirs in column_map.items():
        key = f"dataset.column_map.{ours}={theirs}"
        if ours not in known:
            holder = "no format has a" if format is None else f"format {format} has no"
            guess = suggest(ours, known) or f" (columns: {', '.join(sorted(known))})"
            raise ConfigError(f"{key}: {holder} column {ours}{guess}")
        # the names of message keys are looked for in the messages
        if ours not in _MESSAGE_KEYS and theirs not in columns:
            guess = suggest(theirs, columns) or f" (columns: {', '.join(columns)})"
            raise ConfigError(f"{key}: {place} has no column {theirs}{guess}")

"""Which column of a row is what: the known formats, other names of their columns, `column_map`.

| format        | columns (?: may be missing)          | becomes                               |
|---------------|--------------------------------------|---------------------------------------|
| messages      | messages, system?, tools?            | the conversation                      |
| conversations | conversations, system?, tools?       | the conversation                      |
| prompt        | prompt, completion, system?, tools?  | a user and an assistant message       |
| instruction   | instruction, output, input?, system? | the same; input after an empty line   |
| text          | text                                 | text as it stands                     |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from solotune.config.suggest import suggest
from solotune.data.messages import Conversation, checked_text, parse_messages, parse_tools
from solotune.errors import ConfigError, DataError

Format = Literal["messages", "conversations", "prompt", "instruction", "text"]

# In the order in which they are tried; the columns that a row must have.
FORMATS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
_OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("system", "tools"),
    "conversations": ("system", "tools"),
    "prompt": ("system", "tools"),
    "instruction": ("input", "system"),
}
_CHATS = ("messages", "conversations")
_MESSAGE_KEYS = ("role", "content")  # of each message, where column_map names them
_ANSWERS = ("completion", "output")

# Other names that a column is known by, taken where no two of them are in a row.
_OTHER_NAMES = {
    "conversations": ("conversation",),
    "prompt": ("question", "query", "input"),
    "completion": ("response", "answer", "output"),
    "output": ("response", "completion", "answer"),
    "input": ("context",),
    "system": ("system_prompt",),
    "tools": ("functions",),
}


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
        return _exchange(self._asked(columns), answer, system=system, tools=tools)

    def not_used(self, columns: Iterable[str]) -> set[str]:
        """The columns of a row that the format does not read."""
        return set(columns) - {name for names in self.names.values() for name in names}

    def _value(self, columns: Mapping[str, Any], column: str) -> Any:
        names = self.names.get(column, ())
        return next((columns[name] for name in names if columns.get(name) is not None), None)

    def check_required(self, columns: Mapping[str, Any], answered: bool) -> None:
        """Raise DataError where a row lacks a column that the format must have."""
        for column in _required(self.format, answered):
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


def _exchange(asked: Any, answer: Any, *, system: str, tools: Any) -> Conversation:
    """A question and perhaps its answer, each a text or a list of messages; the answer is trained.

    Assistant turns inside the question are context, unless they carry a `weight` of their own.
    """
    opening, closing = _as_messages(asked, "user"), _as_messages(answer, "assistant")
    opening = [
        {"weight": 0, **message} if isinstance(message, dict) else message for message in opening
    ]
    return parse_messages(opening + closing, system=system, tools=tools)


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
        format = _detect(found, columns, place, answered)
    names: dict[str, tuple[str, ...]] = {}
    for column in (*FORMATS[format], *_OPTIONAL.get(format, ())):
        if column in column_map:
            names[column] = (column_map[column],)
        elif column not in FORMATS[format]:  # looked for in each row: it may come later
            names[column] = (column, *_OTHER_NAMES.get(column, ()))
        else:
            others = _other_names(column, format, found)
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


def _required(format: Format, answered: bool) -> Sequence[str]:
    return [column for column in FORMATS[format] if answered or column not in _ANSWERS]


def _other_names(column: str, format: Format, found: Iterable[str]) -> list[str]:
    taken = FORMATS[format]
    return [n for n in _OTHER_NAMES.get(column, ()) if n in found and n not in taken]


def _detect(found: set[str], columns: Mapping[str, Any], place: str, answered: bool) -> Format:
    def those_with(is_there: Callable[[str, Format], bool]) -> list[Format]:
        return [f for f in FORMATS if all(is_there(c, f) for c in _required(f, answered))]

    complete = those_with(lambda column, _: column in found)
    alike = those_with(lambda column, f: column in found or len(_other_names(column, f, found)) > 0)
    chosen: Format
    if complete and complete[0] != "text":
        chosen = complete[0]
    elif complete and len(alike) > 1:
        others = " or ".join(alike)
        raise DataError(
            f"{place}: the columns {sorted(columns)} may be {others}: set dataset.format"
        )
    elif not alike:
        raise DataError(f"{place}: {_no_format(found, columns)}")
    else:  # an instruction goes before a prompt, which may be named `input`
        chosen = "instruction" if "instruction" in alike else alike[0]
        if chosen == "prompt" and answered and "context" in found:
            raise DataError(
                f"{place}: the column context would be left out of {sorted(columns)}: for a "
                "question with its context set dataset.column_map.instruction, .input and .output, "
                "for the question alone dataset.format=prompt"
            )
    if chosen == "prompt" and answered and isinstance(columns.get("label"), bool):
        raise DataError(
            f"{place}: label says which answers are good, and fine-tuning would learn the bad ones "
            "too: leave them out of the file, or set dataset.format=prompt"
        )
    return chosen


def _no_format(found: set[str], columns: Mapping[str, Any]) -> str:
    if {"chosen", "rejected"} <= found:
        column = "messages" if isinstance(columns.get("chosen"), list) else "completion"
        return (
            "chosen and rejected are two answers for preference training; to learn the chosen one "
            f"set dataset.column_map.{column}=chosen"
        )
    known = "; ".join(f"{name}: {', '.join(wanted)}" for name, wanted in FORMATS.items())
    return (
        f"no known format has the columns {sorted(columns)} (wanted {known}): name yours "
        "with dataset.column_map"
    )


def _check_column_map(
    columns: Mapping[str, Any],
    column_map: Mapping[str, str],
    format: Format | None,
    place: str,
) -> None:
    formats = FORMATS if format is None else (format,)
    known = {column for each in formats for column in (*FORMATS[each], *_OPTIONAL.get(each, ()))}
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

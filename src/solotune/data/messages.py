"""Rows of the known formats, as conversations or as text.

| format        | columns                              | becomes                               |
|---------------|--------------------------------------|---------------------------------------|
| messages      | messages [{role, content}],          | the conversation                      |
|               | system?, tools?                      |                                       |
| conversations | conversations [{from, value}],       | the conversation                      |
|               | system?, tools?                      |                                       |
| prompt        | prompt, completion, system?          | one user and one assistant message    |
| instruction   | instruction, input?, output, system? | the same; input after an empty line   |
| text          | text                                 | text as it stands                     |
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from solotune.config.suggest import suggest
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import Message

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
    "messages": ("tools", "system"),
    "conversations": ("tools", "system"),
    "prompt": ("system",),
    "instruction": ("input", "system"),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_NAMES = {role: role for role in _ROLES} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages as a template takes them; `weights[i]` is 0 where message i is not to be trained."""

    messages: list[Message]
    weights: list[int]
    tools: list[dict[str, Any]] | None = None


def detect_format(columns: Mapping[str, Any], place: str) -> Format:
    """The format whose columns a row has. Raises DataError that lists what was wanted and found."""
    for name, wanted in FORMATS.items():
        if all(column in columns for column in wanted):
            return name
    known = "; ".join(f"{name}: {', '.join(wanted)}" for name, wanted in FORMATS.items())
    raise DataError(
        f"{place}: no known format has the columns {sorted(columns)} (wanted {known}): name yours "
        "with dataset.column_map"
    )


def check_column_map(
    column_map: Mapping[str, str], format: Format | None, columns: Mapping[str, Any], place: str
) -> None:
    """Raise ConfigError where `column_map` names a column that no format or not the row has."""
    formats = FORMATS if format is None else (format,)
    known = list(dict.fromkeys(column for each in formats for column in columns_used(each)))
    for ours, theirs in column_map.items():
        key = f"dataset.column_map.{ours}={theirs}"
        if ours not in known:
            holder = "no format has a" if format is None else f"format {format} has no"
            guess = suggest(ours, known) or f" (columns: {', '.join(known)})"
            raise ConfigError(f"{key}: {holder} column {ours}{guess}")
        if theirs not in columns:
            guess = suggest(theirs, columns) or f" (columns: {', '.join(columns)})"
            raise ConfigError(f"{key}: {place} has no column {theirs}{guess}")


def rename_columns(columns: Mapping[str, Any], column_map: Mapping[str, str]) -> dict[str, Any]:
    """`columns` under our names; `column_map` gives for each of our names the file's."""
    renamed = {name: value for name, value in columns.items() if name not in column_map.values()}
    return renamed | {
        ours: columns[theirs] for ours, theirs in column_map.items() if theirs in columns
    }


def parse_row(columns: Mapping[str, Any], format: Format) -> Conversation | str:
    """A row as a conversation, or as text (format `text`). Raises DataError with the reason."""
    missing = [column for column in FORMATS[format] if columns.get(column) is None]
    if missing:
        raise DataError(
            f"format {format} wants the column {' and '.join(missing)}, found {sorted(columns)}: "
            "set dataset.format or dataset.column_map"
        )
    if format == "text":
        return _text(columns, "text")
    opening = system_message(columns)
    if format == "prompt":
        question, answer = _text(columns, "prompt"), _text(columns, "completion")
    elif format == "instruction":
        question, answer = _text(columns, "instruction"), _text(columns, "output")
        if columns.get("input") is not None and (addition := _text(columns, "input")):
            question += f"\n\n{addition}"
    else:
        return _conversation(opening, columns[FORMATS[format][0]], columns.get("tools"))
    exchange = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(opening + exchange, [1] * (len(opening) + 2))


def system_message(columns: Mapping[str, Any]) -> list[Message]:
    """The message of a row's column `system`; none where it is missing or empty."""
    text = _text(columns, "system") if columns.get("system") is not None else ""
    return [{"role": "system", "content": text}] if text else []


def columns_used(format: Format) -> tuple[str, ...]:
    """All columns that a format reads."""
    return FORMATS[format] + _OPTIONAL.get(format, ())


def _text(columns: Mapping[str, Any], name: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise DataError(f"column {name} holds {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """What stands where text is wanted, and for a number why it is not turned into text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            f'the number {value}, wanted text: store it as text ("{value}"); numbers are not '
            "converted, as 1.10 would become 1.1"
        )
    return f"a {type(value).__name__}, wanted text"


def _conversation(opening: list[Message], given: Any, tools: Any) -> Conversation:
    given = _from_json(given)
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(message, dict) for message in given)
    ):
        raise DataError("the conversation is not a list of messages with role and content")
    messages, weights = list(opening), [1] * len(opening)
    spelled = [message.get("role", message.get("from")) for message in given]
    for number, message in enumerate(given):
        role = _ROLE_NAMES.get(str(spelled[number]).lower())
        if role is None:
            raise DataError(
                f"message {number} has the role {spelled[number]!r}, of the roles {spelled}: use "
                f"one of {', '.join(sorted(_ROLE_NAMES))}"
            )
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise DataError(f"message {number} has the weight {weight!r}: use 0 or 1")
        weights.append(1 if weight is None else int(weight))
        messages.append(_message(message, role, number))
    if opening and messages[1]["role"] == "system":
        if messages[1]["content"] != opening[0]["content"]:
            raise DataError("column system and the system message differ: keep one of them")
        messages, weights = messages[1:], weights[1:]
    return Conversation(messages, weights, _tools(tools))


def _message(given: Mapping[str, Any], role: str, number: int) -> Message:
    """The message with our key names; keys without a value are left out, as Hugging Face does."""
    message = {
        key: value
        for key, value in given.items()
        if value is not None and key not in ("role", "from", "value", "content", "weight")
    }
    content = _content(given.get("content", given.get("value")), number)
    for other in ("thinking", "reasoning"):
        if isinstance(message.get(other), str):
            message.setdefault("reasoning_content", message[other])
            message.pop("reasoning", None)
    calls = message.get("tool_calls")
    if content is None and not calls:
        raise DataError(f"message {number} ({role}) has no content; its keys are {sorted(given)}")
    if calls:
        message["tool_calls"] = [_tool_call(call, number) for call in _from_json(calls)]
    return {"role": role, "content": content or "", **message}


def _content(value: Any, number: int) -> str | None:
    """The text of a message given as text or as a list of text parts."""
    if isinstance(value, list):
        kinds = [
            part.get("type") if isinstance(part, dict) else type(part).__name__ for part in value
        ]
        if any(kind != "text" for kind in kinds):
            raise DataError(
                f"message {number} has parts of the types {kinds}: only text can be trained"
            )
        return "".join(part["text"] for part in value)
    if value is not None and not isinstance(value, str):
        raise DataError(f"message {number} has as its content {_shown(value)}")
    return value


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """The call with arguments as an object: `tojson` in a template would quote a text again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"message {number} has a tool call without a function name")
    function = {**function, "arguments": _from_json(function.get("arguments", {}))}
    return {**call, "function": function} if "function" in call else function


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(value)
    if tools in (None, "", []):
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError("column tools is not a list of tool descriptions")
    return tools


def _from_json(value: Any) -> Any:
    """`value`, parsed where it is JSON text (csv cells, tool arguments of OpenAI's format)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def assistant_indexes(conversation: Conversation, train_on: str) -> list[int]:
    """The messages to train: every assistant turn or the last one, without those of weight 0."""
    turns = [k for k, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    chosen: Sequence[int] = turns if train_on == "all" else turns[-1:]
    return [k for k in chosen if conversation.weights[k]]

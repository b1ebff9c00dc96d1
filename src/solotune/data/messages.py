"""The messages of a conversation, as files spell them, in the one form that templates take."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from solotune.errors import DataError
from solotune.tokenizers import Message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL_ROLES = ("function_call", "tool_call", "tool_calls")  # an assistant turn that is a call
_ROLE_NAMES = {role: role for role in _ROLES} | {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    **dict.fromkeys(_CALL_ROLES, "assistant"),
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value", "text")
_TEXT_PARTS = ("text", "input_text", "output_text")
# What the conversation formats define, or this module reads.
_MESSAGE_KEYS = {
    *_ROLE_KEYS,
    *_CONTENT_KEYS,
    *("weight", "name", "tool_calls", "tool_call_id", "function_call"),
    *("reasoning_content", "reasoning", "thinking"),
}


@dataclass(frozen=True)
class Conversation:
    """Messages as a template takes them; `weights[i]` is 0 where message i is not to be trained.

    `other_keys` are keys of messages that no format defines; a template may still read them.
    """

    messages: list[Message]
    weights: list[int]
    tools: list[dict[str, Any]] | None = None
    other_keys: frozenset[str] = frozenset()


def parse_messages(
    given: Any,
    *,
    system: str = "",
    tools: list[dict[str, Any]] | None = None,
    keys: Mapping[str, str] | None = None,
) -> Conversation:
    """A conversation of a list of messages, or of its JSON text, behind a `system` message.

    `keys` gives the file's names of `role` and `content`. Raises DataError with the reason.
    """
    given = from_json(given)
    if isinstance(given, str) and given.lstrip().startswith(("[{'", '[{"')):
        raise DataError(
            "the conversation is text that is not JSON (Python writes lists with single quotes): "
            "write it with json.dumps"
        )
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(message, dict) for message in given)
    ):
        raise DataError("the conversation is not a list of messages with role and content")
    keys = keys or {}
    role_keys = (keys["role"],) if "role" in keys else _ROLE_KEYS
    content_keys = (keys["content"],) if "content" in keys else _CONTENT_KEYS
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    weights = [1] * len(messages)
    spelled = [_first(message, role_keys) for message in given]
    for number, message in enumerate(given):
        role = _role(spelled, number, role_keys)
        weights.append(_weight(message.get("weight"), number))
        is_call = str(spelled[number]).lower() in _CALL_ROLES
        messages.append(_message(message, role, number, role_keys, content_keys, is_call=is_call))
    if system and messages[1]["role"] == "system":
        if messages[1]["content"] != system:
            raise DataError("column system and the system message differ: keep one of them")
        messages, weights = messages[1:], weights[1:]
    known = {*_MESSAGE_KEYS, *role_keys, *content_keys}
    other = {k for message in given for k, v in message.items() if v is not None and k not in known}
    return Conversation(messages, weights, tools, frozenset(other))


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a row, each as an API sends it: `{"type": "function", "function": {...}}`."""
    tools = from_json(value)
    if tools in (None, "", []):
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError("column tools is not a list of tool descriptions")
    return [
        {"type": "function", "function": tool}
        if isinstance(tool.get("name"), str) and "function" not in tool
        else tool
        for tool in tools
    ]


def assistant_indexes(conversation: Conversation, train_on: str) -> list[int]:
    """The messages to train: every assistant turn or the last one, without those of weight 0."""
    turns = [k for k, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    chosen: Sequence[int] = turns if train_on == "all" else turns[-1:]
    return [k for k in chosen if conversation.weights[k]]


def checked_text(value: Any, what: str) -> str:
    """`value`, which must be text: a number is not converted. Raises DataError, naming `what`."""
    if not isinstance(value, str):
        raise DataError(f"{what} holds {_shown(value)}")
    return value


def from_json(value: Any) -> Any:
    """`value`, parsed where it is JSON text (csv cells, tool arguments of OpenAI's format)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value


def _shown(value: Any) -> str:
    """What stands where text is wanted, and for a number why it is not turned into text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            f'the number {value}, wanted text: store it as text ("{value}"); numbers are not '
            "converted, as 1.10 would become 1.1"
        )
    return f"a {type(value).__name__}, wanted text"


def _first(message: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value under the first of `keys` that has one: tables fill missing keys with null."""
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _role(spelled: Sequence[Any], number: int, keys: Sequence[str]) -> str:
    if spelled[number] is None:
        raise DataError(
            f"message {number} has no {' or '.join(keys)}: name the key with "
            "dataset.column_map.role"
        )
    role = _ROLE_NAMES.get(str(spelled[number]).lower())
    if role is None:
        raise DataError(
            f"message {number} has the role {spelled[number]!r}, of the roles {list(spelled)}: use "
            f"one of {', '.join(sorted(_ROLE_NAMES))}"
        )
    return role


def _weight(value: Any, number: int) -> int:
    if value not in (None, 0, 1, "0", "1"):
        raise DataError(f"message {number} has the weight {value!r}: use 0 or 1")
    return 1 if value is None else int(value)


def _message(
    given: Mapping[str, Any],
    role: str,
    number: int,
    role_keys: Sequence[str],
    content_keys: Sequence[str],
    *,
    is_call: bool,
) -> Message:
    """The message with our key names; keys without a value are left out, as Hugging Face does."""
    read = {*role_keys, *content_keys, "weight", "function_call"}
    message = {key: value for key, value in given.items() if value is not None and key not in read}
    content = _content(_first(given, content_keys), number)
    for other in ("thinking", "reasoning"):
        if isinstance(message.get(other), str):
            message.setdefault("reasoning_content", message[other])
            message.pop("reasoning", None)
    calls = from_json(message.get("tool_calls"))
    if is_call:  # sharegpt: the text of the turn is the call, or a list of calls
        found = from_json(content)
        calls, content = found if isinstance(found, list) else [found], None
    elif given.get("function_call") is not None:  # OpenAI's, before tool_calls
        calls = [given["function_call"]]
    if content is None and not calls:
        raise DataError(
            f"message {number} ({role}) has no content; its keys are {sorted(given)}: name the "
            "right one with dataset.column_map.content"
        )
    if calls:
        is_named = is_call or given.get("function_call") is not None
        if not isinstance(calls, list):
            raise DataError(f"message {number} has tool_calls that are not a list")
        message["tool_calls"] = [
            _tool_call({"type": "function", "function": call} if is_named else call, number)
            for call in calls
        ]
    return {"role": role, "content": content or "", **message}


def _content(value: Any, number: int) -> str | None:
    """The text of a message given as text or as a list of text parts."""
    if value is None:
        return None
    if not isinstance(value, list):
        return checked_text(value, f"message {number}")
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in value]
    if any(kind not in (*_TEXT_PARTS, "str") for kind in kinds):
        raise DataError(
            f"message {number} has parts of the types {kinds}: only text can be trained"
        )
    texts = [part if isinstance(part, str) else part.get("text") for part in value]
    return "".join(checked_text(text, f"a part of message {number}") for text in texts)


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """The call with arguments as an object: `tojson` in a template would quote a text again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"message {number} has a tool call without a function name")
    arguments = from_json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise DataError(
            f"message {number} calls {function['name']} with arguments that are no JSON object: "
            f"{str(arguments)[:60]!r}"
        )
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function

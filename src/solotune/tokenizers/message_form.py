"""Messages in the form that a template reads, and with traced texts.

Hugging Face's form is one dict a message; templates differ in whether content is text or a list of
parts, whether the arguments of a call are an object or JSON text, what stands as the content of a
message that only calls, and how reasoning is named.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from solotune.errors import DataError
from solotune.tokenizers.traced_text import (
    Leaf,
    Path,
    Traced,
    alike,
    pieces_of,
    to_json,
    traced_dict,
)
from solotune.tokenizers.turns import Source

Message = dict[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT, _NAME, _VALUE = "solotuneprobe", "probe_call", "probe_value"


@dataclass(frozen=True)
class MessageForm:
    """The form of one template.

    `parts`: content as a list of parts. `bare_call`: the content of a message that only calls.
    `arguments_as_text`: JSON text. `flat_calls`: a call's name and arguments without `function`.
    """

    parts: bool = False
    bare_call: str | None = ""
    arguments_as_text: bool = False
    flat_calls: bool = False

    def apply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in this form; what is right already is passed on as it is."""
        if not self.parts and not any(
            "tool_calls" in message or "reasoning_content" in message for message in messages
        ):
            return messages
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        formed = dict(message)
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning:
            formed |= dict.fromkeys(REASONING, reasoning)
        if message.get("tool_calls"):
            formed["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            formed["content"] = message.get("content") or self.bare_call
        if self.parts and isinstance(formed.get("content"), str):
            formed["content"] = [{"type": "text", "text": formed["content"]}]
        return formed

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = dict(call["function"])
        if self.arguments_as_text and not isinstance(function["arguments"], str):
            function["arguments"] = to_json(function["arguments"])
        if self.flat_calls:
            return alike(call["function"], function)
        return alike(call, {"type": "function", **call, "function": function})


def find_form(render: Callable[[Sequence[Message]], str]) -> MessageForm:
    """The form of texts in which a template shows them, by trying; `render` may raise DataError."""
    question: Message = {"role": "user", "content": _TEXT}
    for form in (MessageForm(), MessageForm(parts=True)):
        if _TEXT in _rendered(render, form.apply([question])):
            return form
    return MessageForm()


def find_call_form(render: Callable[[Sequence[Message]], str], form: MessageForm) -> MessageForm:
    """The form in which a template shows calls too, by trying."""
    function = {"name": _NAME, "arguments": {"city": _VALUE}}
    call = {"id": "call00001", "type": "function", "function": function}
    asked: list[Message] = [
        {"role": "user", "content": _TEXT},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for flat, as_text, bare_call in product((False, True), (False, True), ("", None)):
        tried = MessageForm(form.parts, bare_call, as_text, flat)
        text = _rendered(render, tried.apply(asked))
        # {'city': is how Python writes a mapping: the template wanted text
        if _NAME in text and _VALUE in text and "{'city'" not in text:
            return tried
    return form


def _rendered(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    try:
        return render(messages)
    except DataError:
        return ""


def canonical(message: Message) -> Message:
    """The message with reasoning under one name and calls as `{"function": {...}}`."""
    if "tool_responses" in message:
        raise DataError(
            "tool_responses inside an assistant message cannot be told from what it says: give "
            "results as messages of the role tool"
        )
    if not message.keys() & {"thinking", "reasoning", "tool_calls"}:
        return message
    made = {key: value for key, value in message.items() if key not in REASONING}
    for name in REASONING:
        if isinstance(message.get(name), str):
            made["reasoning_content"] = message[name]
            break
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            call if "function" in call else {"type": "function", "function": call} for call in calls
        ]
    return made


def trace_message(message: Message, number: int, sources: list[Source], path: Path) -> Message:
    """The message with traced texts; appends them to `sources`."""
    is_assistant = message["role"] == "assistant"
    kinds = {"content": "content", "reasoning_content": "reasoning"} if is_assistant else {}
    traced = {}
    for key, value in message.items():
        if key == "role":
            traced[key] = value
        elif key == "tool_calls" and is_assistant:
            traced[key] = [_trace_call(call, number, sources, path) for call in value]
        else:
            traced[key] = trace(value, number, kinds.get(key, "other"), sources, path)
    return traced


def trace(value: Any, message: int, kind: str, sources: list[Source], path: Path) -> Any:
    """A value with traced texts, mappings of one source each among them."""
    if isinstance(value, str):
        sources.append(Source(message, kind, value))
        return Traced.of((Leaf.of(value, len(sources) - 1),), path)
    if isinstance(value, Mapping):
        sources.append(Source(message, kind, ""))
        made = traced_dict({}, len(sources) - 1, path)
        for key, item in value.items():
            plain = key in ("type", "role")  # templates compare them; no text of anybody
            name = trace(key, message, kind, sources, path) if isinstance(key, str) else key
            made[name] = item if plain else trace(item, message, kind, sources, path)
        return made
    if isinstance(value, list):
        return [trace(item, message, kind, sources, path) for item in value]
    return value


def _trace_call(
    call: Mapping[str, Any], number: int, sources: list[Source], path: Path
) -> Mapping[str, Any]:
    traced = trace(call, number, "argument", sources, path)
    (name,) = pieces_of(traced["function"]["name"])
    assert isinstance(name, Leaf)
    sources[name.source] = sources[name.source]._replace(kind="call")
    return traced

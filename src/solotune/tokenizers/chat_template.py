"""Chat templates: rendered as Hugging Face does, with the place of every assistant turn.

The place is found in one full rendering, by running the template on traced texts (traced_text.py)
and reading off where each text went (turns.py). The text is checked against the rendering of the
plain conversation. A conversation of known shape is filled into the plan of an earlier one
(rendering_plan.py) without running the template at all.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import jinja2

from solotune.errors import ConfigError, DataError
from solotune.tokenizers.message_form import (
    Message,
    MessageForm,
    canonical,
    find_call_form,
    find_form,
    trace,
    trace_message,
)
from solotune.tokenizers.rendering_plan import RenderingPlan
from solotune.tokenizers.template_environment import make_environment, notes_all
from solotune.tokenizers.traced_text import Leaf, Path, pieces_of
from solotune.tokenizers.turn_edges import Markers, common_length
from solotune.tokenizers.turns import Rendering, Source, Turn, kept_turn, locate

__all__ = ["CHATML", "RESERVED", "ChatTemplate", "Message", "Rendering", "Turn", "number_mark"]

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

RESERVED = re.compile("[\ufdd0-\ufdef]")
_END = "\ufde2"
_MOST_PLANS, _MOST_PLANS_OF_A_SHAPE = 4000, 8

_ASK, _SAY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
_CALL = {"name": "f", "arguments": {"a": "b"}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": _CALL}]}
# Conversations whose turns show what a template ends turns with.
_PROBES: tuple[list[Message], ...] = (
    [_ASK, _SAY],
    [_ASK, _SAY, _ASK, _SAY],
    [_ASK, _CALLING],
    [_ASK, _CALLING, {"role": "tool", "content": "z"}, _SAY],
)


def number_mark(kind: str, number: int) -> str:
    """`number` as noncharacters that open with `kind`: unique, and no text may hold them."""
    return kind + "".join(chr(0xFDD0 + int(digit, 16)) for digit in f"{number:x}") + _END


class _TracedRun(NamedTuple):
    """What a template wrote, the texts of the conversation, and what it asked about them."""

    pieces: tuple[str, ...]
    sources: list[Source]
    path: Path


class ChatTemplate:
    """A chat template in jinja2's sandbox.

    `variables` are what Hugging Face offers every template (`bos_token`, `eos_token`, ...),
    `control_tokens` the texts of the special tokens, `turn_enders` those of them that are known to
    end a turn, `kwargs` the user's `chat_template_kwargs`.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "chat template",
        variables: Mapping[str, Any] | None = None,
        control_tokens: Sequence[str] = (),
        turn_enders: Sequence[str] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.name = name
        self.variables = {**(variables or {}), **(kwargs or {})}
        self.turn_enders = frozenset(turn_enders)
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        environment = make_environment()
        try:
            parsed = environment.parse(source)
            self._notes_all = notes_all(parsed)
            self._template = environment.from_string(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{name}, line {error.lineno}: {error.message}; repair the chat template or choose "
                "another with tokenizer.chat_template"
            ) from None
        self._plans: dict[tuple[Any, ...], list[RenderingPlan]] = {}
        self._num_plans = 0

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as one text. Raises DataError with the words of a refusing template."""
        formed = self._formed([canonical(message) for message in messages])
        return "".join((self._run(formed, tools, add_generation_prompt),))

    def render_turns(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """The conversation as one text, with its assistant turns and `plain` spans located."""
        messages = [canonical(message) for message in messages]
        key, texts = _shape(messages, add_generation_prompt) if tools is None else (None, [])
        if key is not None:
            for plan in self._plans.get(key, ()):
                rendering = plan.fill(texts, self.control_pattern.finditer)
                if rendering is not None:
                    return rendering
        traced = self._trace(messages, tools, add_generation_prompt)
        enders = self.turn_enders | ({self.terminator} if self.terminator else set())
        rendering = self._locate(messages, tools, traced, enders)
        if key is not None and self._notes_all and not traced.path.closed:
            plans = self._plans.setdefault(key, [])
            if len(plans) < _MOST_PLANS_OF_A_SHAPE and len(self._plans) <= _MOST_PLANS:
                plans.append(RenderingPlan(*traced, rendering))
        return rendering

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to ask for an assistant turn; empty where it writes nothing."""
        question = [{"role": "user", "content": "x"}]
        try:
            without, asked = (
                self.render(question),
                self.render(question, add_generation_prompt=True),
            )
        except DataError:
            return ""
        # not always at the end of `without`: Phi-3 writes EOS where nothing is asked for
        return asked[common_length(without, asked, self.control_pattern) :]

    @cached_property
    def terminators(self) -> frozenset[str]:
        """The control tokens that end turns as they are trained, calls among them."""
        found: set[str | None] = set()
        for probe in _PROBES:
            try:
                whole = self.render_turns(probe)
                for turn in whole.turns:
                    alone = self.render_turns(probe[: turn.message + 1])
                    found.add(alone.turns[-1].terminator)
                    if kept := kept_turn(whole, alone):
                        found.add(kept.terminator)
            except (DataError, IndexError):
                continue  # a template without calls
        return frozenset(text for text in found if text is not None)

    @cached_property
    def terminator(self) -> str | None:
        """The control token that the template writes after an assistant's answer, or None."""
        try:
            traced = self._trace(_PROBES[0], None, False)
            located = self._locate(_PROBES[0], None, traced, self.turn_enders)
            return located.turns[-1].terminator
        except (DataError, IndexError):
            return None

    @cached_property
    def _form(self) -> MessageForm:
        return find_form(self._run)

    @cached_property
    def _call_form(self) -> MessageForm:
        return find_call_form(self._run, self._form)

    def _run(
        self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = False
    ) -> str:
        """What jinja2 makes of messages in this template's form."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"{self.name} refuses the roles {roles}: {error}") from None

    def _formed(self, messages: Sequence[Message]) -> Sequence[Message]:
        has_calls = any(message.get("tool_calls") for message in messages)
        return (self._call_form if has_calls else self._form).apply(messages)

    def _trace(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> _TracedRun:
        path, sources = Path(), []
        traced = [trace_message(one, k, sources, path) for k, one in enumerate(messages)]
        traced_tools = None if tools is None else trace(tools, -1, "other", sources, path)
        rendered = self._run(self._formed(traced), traced_tools, add_generation_prompt)
        pieces = pieces_of(rendered)
        plain = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        if "".join(pieces) != plain:
            raise DataError(
                f"{self.name} treats texts in a way that cannot be followed, so that the assistant "
                "turns cannot be found: use another template"
            )
        return _TracedRun(pieces, sources, path)

    def _locate(
        self,
        messages: Sequence[Message],
        tools: Any,
        traced: _TracedRun,
        enders: frozenset[str],
    ) -> Rendering:
        markers = Markers(
            self.control_pattern,
            prompt=self.generation_prompt,
            enders=enders,
            tail=lambda message: self._tail(messages[:message], tools),
        )
        return locate(*traced, markers=markers, last=len(messages) - 1)

    def _tail(self, messages: Sequence[Message], tools: Any) -> str | None:
        """What follows the last text where the next turn is asked for."""
        try:
            pieces = self._trace(messages, tools, True).pieces
        except DataError:
            return None
        after = takewhile(lambda piece: not (isinstance(piece, Leaf) and piece), reversed(pieces))
        return "".join(reversed(list(after)))


def _shape(
    messages: Sequence[Message], add_generation_prompt: bool
) -> tuple[tuple[Any, ...] | None, list[str]]:
    """Roles and keys of a conversation of texts alone, and the texts; None where it holds more."""
    key: list[Any] = [add_generation_prompt]
    texts: list[str] = []
    for message in messages:
        for name, value in message.items():
            if name == "role":
                key.append(value)
            elif type(value) is str:
                key.append((name,))
                texts.append(value)
            else:
                return None, []
    return tuple(key), texts

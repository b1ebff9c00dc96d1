"""Chat templates: rendered as Hugging Face does, with the place of every assistant turn.

The place is found in one full rendering. The same conversation is rendered twice: once as it is,
once with marks around the texts of its assistant turns and around control tokens that message texts
happen to contain. The second rendering without its marks must equal the first, otherwise other mark
positions are tried and in the end an error is raised. Marks are Unicode noncharacters
(U+FDD0..U+FDEF), which no text may hold.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from solotune.errors import ConfigError, DataError

Message = dict[str, Any]

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_OPEN, _CLOSE, _END, _GENERATION, _ENDGENERATION = "\ufde0", "\ufde1", "\ufde2", "\ufde3", "\ufde4"
_MARK = re.compile("[\ufde0\ufde1][\ufdd0-\ufddf]+\ufde2|[\ufde3\ufde4]")
RESERVED = re.compile("[\ufdd0-\ufdef]")
_THINK = re.compile(r"</?think>")
_EMPTY_THINK = re.compile(r"\s*(<think>)?\s*</think>\s*")


def number_mark(kind: str, number: int) -> str:
    """`number` as noncharacters that open with `kind`: unique, and no template touches it."""
    return kind + "".join(chr(0xFDD0 + int(digit, 16)) for digit in f"{number:x}") + _END


@dataclass(frozen=True)
class Turn:
    """One assistant turn in a rendering: characters `start` to `end`, its terminator among them.

    `lost_reasoning`: the message carries reasoning that this rendering does not show.
    """

    message: int
    start: int
    end: int
    terminator: str | None
    lost_reasoning: bool = False


@dataclass(frozen=True)
class Rendering:
    """A conversation as text; `plain` are the spans where a message text spells a control token."""

    text: str
    turns: tuple[Turn, ...] = ()
    plain: tuple[tuple[int, int], ...] = ()


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
        self.has_generation_blocks = bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source))
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        try:
            self._plain = _environment(_UnmarkedGeneration).from_string(source)
            self._marked = _environment(_MarkedGeneration).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{name}, line {error.lineno}: {error.message}; repair the chat template or choose "
                "another with tokenizer.chat_template"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as one text. Raises DataError with the words of a refusing template."""
        return self._run(self._plain, messages, tools, add_generation_prompt)

    def render_turns(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """The conversation as one text, with its assistant turns and `plain` spans located."""
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        for marked_messages, marked_tools, pieces in self._mark_variants(messages, tools):
            marked = self._run(self._marked, marked_messages, marked_tools, add_generation_prompt)
            if _MARK.sub("", marked) == text:
                return self._locate(text, _read_marks(marked), pieces, last=len(messages) - 1)
        raise DataError(
            f"{self.name} changes the texts of a conversation, so that its assistant turns cannot "
            "be found in the rendering: put {% generation %} ... {% endgeneration %} around them"
        )

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
        return asked[len(without) :] if asked.startswith(without) else ""

    @cached_property
    def terminator(self) -> str | None:
        """The control token that the template writes after an assistant turn, or None."""
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        try:
            return self.render_turns(probe).turns[0].terminator
        except (DataError, IndexError):
            return None

    def _run(
        self, template: jinja2.Template, messages: Any, tools: Any, add_generation_prompt: bool
    ) -> str:
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"{self.name} refuses the roles {roles}: {error}") from None

    def _mark_variants(
        self, messages: Sequence[Message], tools: Any
    ) -> Iterator[tuple[list[Message], Any, list["_Piece"]]]:
        """Marked copies of the conversation, the most telling mark positions first.

        A template may strip a text, so a mark stands either outside or inside the white space at
        each end; it may look at the first characters (`content.startswith('<think>')`), so the
        outer marks are left out in the end.
        """
        texts = [text for message in messages for text in _assistant_texts(message)]
        opens = (False, True) if any(text != text.lstrip() for text in texts) else (False,)
        closes = (False, True) if any(text != text.rstrip() for text in texts) else (False,)
        for inner_open in opens:
            for inner_close in closes:
                yield self._mark(
                    messages, tools, inner_open=inner_open, inner_close=inner_close, outer=True
                )
        if any(_THINK.search(text) for text in texts):
            yield self._mark(messages, tools, inner_open=True, inner_close=True, outer=False)

    def _mark(
        self,
        messages: Sequence[Message],
        tools: Any,
        *,
        inner_open: bool,
        inner_close: bool,
        outer: bool,
    ) -> tuple[list[Message], Any, list["_Piece"]]:
        pieces: list[_Piece] = []

        def around(text: str, spans: list[tuple[int, int, str]], message: int) -> str:
            """`text` with numbered marks around `spans` and around each control token."""
            spans = spans + [
                (*match.span(), "plain")
                for match in self.control_pattern.finditer(text)
                if match[0]
            ]
            inserts: list[tuple[int, int, str]] = []
            for start, end, kind in spans:
                number = len(pieces)
                pieces.append(_Piece(message, kind))
                # at one position closing marks come first; earlier spans are the outer ones
                inserts.append((start, number + 1, number_mark(_OPEN, number)))
                inserts.append((end, -number - 1, number_mark(_CLOSE, number)))
            parts, done = [], 0
            for position, _, mark in sorted(inserts):
                parts += [text[done:position], mark]
                done = position
            return "".join(parts) + text[done:]

        def ends(text: str) -> tuple[int, int]:
            start = len(text) - len(text.lstrip()) if inner_open else 0
            return start, max(start, len(text.rstrip()) if inner_close else len(text))

        def content_spans(text: str) -> list[tuple[int, int, str]]:
            spans = [(*ends(text), "content")] if outer and text.strip() else []
            tags = list(_THINK.finditer(text))
            borders = [0, *(edge for tag in tags for edge in tag.span()), len(text)]
            for k in range(0, len(borders) if tags else 0, 2):
                inside = text[borders[k] : borders[k + 1]]
                if inside.strip():
                    start = borders[k] + len(inside) - len(inside.lstrip())
                    closing = k < 2 * len(tags) and tags[k // 2][0] == "</think>"
                    spans.append(
                        (start, start + len(inside.strip()), "reasoning" if closing else "content")
                    )
            return spans

        def plain_leaves(value: Any, message: int) -> Any:
            if isinstance(value, str):
                return around(value, [], message)
            if isinstance(value, Mapping):
                return {key: plain_leaves(item, message) for key, item in value.items()}
            return (
                [plain_leaves(item, message) for item in value]
                if isinstance(value, list)
                else value
            )

        marked = []
        for index, message in enumerate(messages):
            changed = {
                key: value if key == "role" else plain_leaves(value, index)
                for key, value in message.items()
            }
            if message["role"] == "assistant":
                if isinstance(content := message.get("content"), str):
                    changed["content"] = around(content, content_spans(content), index)
                for key in ("reasoning_content", "thinking"):
                    if isinstance(text := message.get(key), str) and text.strip():
                        changed[key] = around(text, [(*ends(text), "reasoning")], index)
                for call in changed.get("tool_calls") or ():
                    function = call.get("function", call)
                    name = _MARK.sub("", function["name"])
                    function["name"] = around(name, [(0, len(name), "call")], index)
            marked.append(changed)
        return marked, plain_leaves(tools, -1), pieces

    def _locate(
        self, text: str, marks: list["_Mark"], pieces: list["_Piece"], *, last: int
    ) -> Rendering:
        """The turns and plain spans of an accepted rendering; `last` is the last message."""
        plain, opened, blocks = [], {}, []
        edges: dict[int, list[_Mark]] = {}
        for mark in marks:
            if mark.kind == _GENERATION:
                blocks.append([mark.position, mark.position])
            elif mark.kind == _ENDGENERATION:
                blocks[-1][1] = mark.position
            elif pieces[mark.number].kind != "plain":
                edges.setdefault(pieces[mark.number].message, []).append(mark)
            elif mark.kind == _OPEN:
                opened[mark.number] = mark.position
            else:
                plain.append((opened[mark.number], mark.position))

        spelled = set(plain)
        controls = [
            match for match in self.control_pattern.finditer(text) if match.span() not in spelled
        ]
        spans = []
        for message, own in sorted(edges.items()):
            first, start, end = own[0], own[0].position, own[-1].position
            if self.has_generation_blocks:
                own_blocks = [block for block in blocks if block[0] < end and start < block[1]]
                if not own_blocks:
                    continue  # the template says that this turn is not the model's
                start, end = own_blocks[0][0], own_blocks[-1][1]
            elif pieces[first.number].kind != "content":
                start = self._after_header(
                    text,
                    previous=spans[-1][2] if spans else 0,
                    before=start,
                    skip_think=pieces[first.number].kind == "call",
                )
            spans.append((message, start, end, pieces[own[-1].number].kind == "call"))

        turns = []
        limits = [*(start for _, start, _, _ in spans[1:]), len(text)][: len(spans)]
        for (message, start, end, is_call), limit in zip(spans, limits, strict=True):
            end, terminator = self._end_of_turn(
                text, controls, start, end, limit, is_call=is_call, is_last=message == last
            )
            shown = {mark.number for mark in edges[message]}
            reasoning = {
                number
                for number, piece in enumerate(pieces)
                if piece.message == message and piece.kind == "reasoning"
            }
            lost = bool(reasoning) and not reasoning & shown
            turns.append(Turn(message, start, end, terminator, lost_reasoning=lost))
        return Rendering(text, tuple(turns), tuple(plain))

    def _after_header(self, text: str, *, previous: int, before: int, skip_think: bool) -> int:
        """Where a turn starts that opens with reasoning or a call.

        The model must write their markup (`<think>`) itself, so the turn starts after the
        generation prompt, or as much of it as stands there, its control token at least. A think
        block before a call is empty, the template wrote it: `skip_think`.
        """
        prompt = self.generation_prompt
        header = self.control_pattern.search(prompt)
        for length in range(len(prompt), header.end() - 1 if header else len(prompt) - 1, -1):
            found = text.rfind(prompt[:length], previous, before) if length else -1
            if found >= 0:
                start = found + length
                empty = _EMPTY_THINK.match(text, start, before) if skip_think else None
                return empty.end() if empty else start
        return before

    def _end_of_turn(
        self,
        text: str,
        controls: list[re.Match],
        start: int,
        end: int,
        limit: int,
        *,
        is_call: bool,
        is_last: bool,
    ) -> tuple[int, str | None]:
        """Where a turn ends whose text ends at `end`, with its terminator; the terminator."""
        inside = [match for match in controls if start < match.end() <= end]
        if inside and not text[inside[-1].end() : end].strip():  # a generation block may hold it
            return end, inside[-1][0]
        after = [match for match in controls if end <= match.start() and match.end() <= limit]
        if not is_call:
            return (after[0].end(), after[0][0]) if after else (end, None)
        # a call may be written with control tokens of its own: only a known one ends the turn, or
        # the one before the next header, or the end of the text
        header = self.control_pattern.search(self.generation_prompt)
        for k, match in enumerate(after):
            if header and match[0] == header[0]:
                last = after[k - 1]
                closes = k > 0 and not text[last.end() : match.start()].strip()
                return (last.end(), last[0]) if closes else (end, None)
            if match[0] in self.turn_enders or match[0] == self.terminator:
                return match.end(), match[0]
        if not is_last:
            return end, None
        end = len(text.rstrip())
        return end, after[-1][0] if after and after[-1].end() == end else None


@dataclass(frozen=True)
class _Piece:
    message: int
    kind: str  # content | reasoning | call | plain


@dataclass(frozen=True)
class _Mark:
    kind: str
    number: int
    position: int  # in the text without marks


def _assistant_texts(message: Message) -> list[str]:
    if message["role"] != "assistant":
        return []
    return [
        text
        for key in ("content", "reasoning_content")
        if isinstance(text := message.get(key), str)
    ]


def _read_marks(marked: str) -> list[_Mark]:
    marks, removed = [], 0
    for match in _MARK.finditer(marked):
        digits = "".join(f"{ord(char) - 0xFDD0:x}" for char in match[0][1:-1])
        marks.append(_Mark(match[0][0], int(digits or "0", 16), match.start() - removed))
        removed += len(match[0])
    return marks


class _UnmarkedGeneration(jinja2.ext.Extension):
    """`{% generation %}` as a block that shows its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)
    marks: ClassVar[tuple[str, str]] = ("", "")

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def _block(self, caller: Any) -> str:
        return self.marks[0] + caller() + self.marks[1]


class _MarkedGeneration(_UnmarkedGeneration):
    marks = (_GENERATION, _ENDGENERATION)


def _environment(generation: type[jinja2.ext.Extension]) -> ImmutableSandboxedEnvironment:
    """jinja2 as Hugging Face sets it up: block trimming, loop controls, unescaped `tojson`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

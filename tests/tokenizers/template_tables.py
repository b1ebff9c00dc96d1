# ruff: noqa: RUF001 (DeepSeek's control tokens are written with full-width bars)
"""The two tables of docs/chat_templates.md, computed from the templates.

Run as a module it writes them: python -m tests.tokenizers.template_tables
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from solotune.data.chat import chat_samples
from solotune.data.messages import Conversation
from solotune.errors import DataError
from solotune.tokenizers import ChatTemplate
from tests.tokenizers.trl_templates import (
    PLAIN,
    RULES,
    TWINS,
    Message,
    control_tokens,
    formed,
    source,
)

PAGE = Path(__file__).parents[2] / "docs/chat_templates.md"

# Why a twin's generation blocks and our spans differ.
REASONS = {
    "line break": "stands after the terminator: generation has stopped before it",
    "empty think": "only the template writes the empty block",
    "prompt": "inference begins with it, so the model never writes it",
    "second EOS": "stands after the terminator, at the end of the conversation only",
    "end left out": "the twin's block closes before the token that ends the turn",
    "open call": "the template ends a single call with nothing known; alone, EOS is added to it",
}

_EMPTY_THINK = re.compile(r"\s*(<think>)?\s*</think>\s*")
_CALL = {"id": "call00001", "type": "function"}
_CALL = _CALL | {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
_ASK = {"role": "user", "content": "How is the weather?"}
_SAY = {"role": "assistant", "content": "Fine."}
_RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"}


def template_of(name: str) -> ChatTemplate:
    """The template with its model's control tokens."""
    rules = RULES[name.removesuffix("_training")]
    return ChatTemplate(
        source(name),
        name=name,
        variables={"bos_token": "<s>", "eos_token": rules.ends[0]},
        control_tokens=control_tokens(name),
        turn_enders=rules.ends,
    )


def conversations(name: str) -> dict[str, list[Message]]:
    """Conversations of each kind that a template renders."""
    rules = RULES[name]
    found: dict[str, list[Message]] = {"one answer": [_ASK, _SAY]}
    again = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Rain."}]
    found["two answers"] = [_ASK, _SAY, *again]
    if rules.reasoning:
        found["one with reasoning"] = [_ASK, _SAY | {"reasoning_content": "Sun."}]
        thought = [_ASK, _SAY | {"reasoning_content": "Sun."}, again[0]]
        found["two with reasoning"] = [*thought, again[1] | {"reasoning_content": "Clouds."}]
    if rules.call:
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        found["a call"] = [_ASK, calling, _RESULT, _SAY]
    return found


def reference(
    name: str, messages: list[Message], *, ask: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text and the generation blocks by transformers."""
    rules = RULES[name.removesuffix("_training")]
    texts: Any
    blocks: Any
    texts, blocks = render_jinja_template(
        conversations=[formed(name, messages)],
        chat_template=source(name),
        return_assistant_tokens_mask=name.endswith("_training"),
        add_generation_prompt=ask,
        bos_token="<s>",
        eos_token=rules.ends[0],
    )
    return texts[0], blocks[0] if blocks else []


@dataclass(frozen=True)
class Difference:
    """Characters that one of two masks trains: `by` is twin or ours."""

    by: str
    text: str
    reason: str | None


def differences(
    name: str, messages: list[Message], ours: list[tuple[int, int]]
) -> list[Difference]:
    """Where our spans and the blocks of the twin differ on the twin's rendering."""
    text, blocks = reference(TWINS[name], messages)
    owner = [""] * len(text)
    for by, spans in (("twin", blocks), ("ours", ours)):
        for start, end in spans:
            for position in range(start, end):
                owner[position] = "" if owner[position] else by
    found, start = [], 0
    for position in range(1, len(text) + 1):
        if position == len(text) or owner[position] != owner[start]:
            if owner[start]:
                part = text[start:position]
                reason = _reason(name, messages, text, start, position, owner[start])
                found.append(Difference(owner[start], part, reason))
            start = position
    return found


def _reason(
    name: str, messages: list[Message], text: str, start: int, end: int, by: str
) -> str | None:
    part, ends = text[start:end], RULES[name].ends
    after_end = text[:start].endswith(ends)
    if by == "ours":
        return "end left out" if part in ends else None
    if part == "\n" and after_end:
        return "line break"
    if after_end and end == len(text) and part.strip() == ends[0]:
        return "second EOS"
    if _EMPTY_THINK.fullmatch(part):
        return "empty think"
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, _ = reference(name, messages[:number], ask=True)
            asked = messages[number - 1]["content"]
            if prompt.startswith(text[:end]) and start >= prompt.rfind(asked) + len(asked):
                return "prompt"
    if name == "deepseek_r1_distill" and part.endswith("<｜tool▁call▁end｜>"):
        return "open call"
    return None


def our_spans(template: ChatTemplate, messages: list[Message]) -> list[tuple[int, int]]:
    """Our trained spans of a conversation in one sample."""
    return [span for turn in template.render_turns(messages).turns for span in turn.spans]


def disagreements(name: str) -> tuple[list[str], list[Difference], list[Difference]]:
    """Kinds of conversations that the twin renders otherwise; differences on the others.

    First those of the plain template's spans, then those of our spans on the twin itself.
    """
    plain, twin = template_of(name), template_of(TWINS[name])
    other, differ, differ_on_twin = [], [], []
    for kind, messages in conversations(name).items():
        differ_on_twin += differences(name, messages, our_spans(twin, messages))
        if reference(name, messages)[0] != reference(TWINS[name], messages)[0]:
            other.append(kind)
        else:
            differ += differences(name, messages, our_spans(plain, messages))
    return other, list(dict.fromkeys(differ)), list(dict.fromkeys(differ_on_twin))


def disagreement_table() -> str:
    """The table of disagreements, twins that differ alike in one line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(TWINS):
        other, differ, _ = disagreements(name)
        more, less = (
            "; ".join(sorted(f"{_code(d.text)} ({d.reason})" for d in differ if d.by == by))
            for by in ("twin", "ours")
        )
        rows.setdefault((", ".join(other), more, less), []).append(name)
    lines = ["| template | other text for | the twin trains also | it does not train |"]
    lines.append("|---|---|---|---|")
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(lines)


def template_table() -> str:
    """The table of templates, alike ones in one line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in PLAIN:
        rows.setdefault(_row(name), []).append(name)
    lines = ["| template | content | reasoning | calls | ends with |", "|---|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(lines)


def _row(name: str) -> tuple[str, ...]:
    template = template_of(name)
    spaced = " \n x \n "
    (sample,) = _samples(template, [_ASK, _SAY | {"content": spaced}])
    said = sample.rendering.text[slice(*sample.trained[0])]
    kept = next(text for text in (spaced, spaced.rstrip(), spaced.strip()) if text in said)
    content = {spaced: "kept", spaced.rstrip(): "stripped right"}.get(kept, "stripped")
    if template._form.parts:
        content += ", as a list of parts"
    found = conversations(name)
    kinds = {"reasoning": "not written", "calls": "not written"}
    thought = [_ASK, _SAY | {"reasoning_content": "Sun."}]
    if _samples(template, thought):
        samples = _samples(template, found["two with reasoning"])
        kinds["reasoning"] = "written" if len(samples) == 1 else "in the last turn: a sample each"
    calling = [_ASK, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
    if _samples(template, calling):
        kinds["calls"] = "written"
        beside = [_ASK, calling[1] | {"reasoning_content": "Sun."}]
        if kinds["reasoning"] == "not written" and _samples(template, beside):
            kinds["reasoning"] = "beside a call only"
        if template._call_form.arguments_as_text:
            kinds["calls"] += ", arguments as JSON text"
    ends = " ".join(_code(text) for text in sorted(template.terminators))
    if not samples_end(template, calling if kinds["calls"] != "not written" else [_ASK, _SAY]):
        ends += " EOS"
    return (content, kinds["reasoning"], kinds["calls"], ends.strip())


def samples_end(template: ChatTemplate, messages: list[Message]) -> bool:
    """Whether the template ends a last turn by itself."""
    return not any(sample.ends_open for sample in _samples(template, messages))


def _samples(template: ChatTemplate, messages: list[Message]) -> list[Any]:
    conversation = Conversation(messages, [1] * len(messages))
    try:
        return chat_samples(
            template, conversation, train_on="all", history="per_turn", train_on_input=False
        )
    except DataError:
        return []


def _code(text: str) -> str:
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


def written() -> dict[str, str]:
    """The tables by the names of their markers in the page."""
    return {"templates": template_table(), "disagreements": disagreement_table()}


def between(page: str, name: str) -> tuple[str, str, str]:
    """The page before a table, the table, and the page after it."""
    opening, closing = f"<!-- table: {name} -->\n\n", f"\n\n<!-- end: {name} -->"
    before, _, rest = page.partition(opening)
    table, _, after = rest.partition(closing)
    return before + opening, table, closing + after


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for marker, table in written().items():
        start, _, stop = between(text, marker)
        text = start + table + stop
    PAGE.write_text(text, encoding="utf-8")

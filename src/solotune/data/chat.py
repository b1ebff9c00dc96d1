"""One conversation as the samples it is trained on: renderings and their trained spans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from solotune.data.messages import Conversation, assistant_indexes
from solotune.errors import DataError
from solotune.tokenizers import ChatTemplate, Rendering, Turn

Span = tuple[int, int]
TrainOn = Literal["all", "last"]  # assistant turns
History = Literal["per_turn", "as_rendered"]


@dataclass(frozen=True)
class ChatSample:
    """A rendering and its trained character spans; facts about it that are counted."""

    rendering: Rendering
    trained: tuple[Span, ...]
    ends_open: bool = False  # the last trained turn stands at the end and has no terminator
    lost_reasoning: int = 0  # earlier turns whose reasoning the template leaves out
    not_shown: int = 0  # messages of others whose text the template leaves out


def chat_samples(
    template: ChatTemplate,
    conversation: Conversation,
    *,
    train_on: TrainOn,
    history: History,
    train_on_input: bool,
) -> list[ChatSample]:
    """The samples of one conversation.

    One sample where every trained turn stands in the full rendering as inference would have seen
    it, that is where the rendering up to the turn opens the full one. Where the template rewrites
    earlier turns, one sample for each trained turn, unless `history` is `as_rendered`. Raises
    DataError where a turn or its reasoning is not rendered.
    """
    full = template.render_turns(conversation.messages, tools=conversation.tools)
    if train_on_input:
        samples = [ChatSample(full, ((0, len(full.text)),))]
    else:
        samples = _trained_samples(template, conversation, full, train_on=train_on, history=history)
    not_shown = sum(
        message["role"] != "assistant" and message["content"].strip() not in full.text
        for message in conversation.messages
    )
    return [replace(samples[0], not_shown=not_shown), *samples[1:]]


def _trained_samples(
    template: ChatTemplate,
    conversation: Conversation,
    full: Rendering,
    *,
    train_on: TrainOn,
    history: History,
) -> list[ChatSample]:
    messages, tools = conversation.messages, conversation.tools
    wanted = [k for k in assistant_indexes(conversation, train_on) if _has_text(messages[k])]
    if history == "as_rendered":
        turns = [_turn(template, full, k) for k in wanted]
        for turn in turns[:-1]:
            if turn.terminator is None and messages[turn.message].get("tool_calls"):
                raise DataError(
                    f"{template.name} writes no terminator after the tool call of message "
                    f"{turn.message}: use dataset.history=per_turn"
                )
        lost = sum(turn.lost_reasoning for turn in turns)
        if turns and turns[-1].message == len(messages) - 1:
            _check_reasoning(template, turns[-1])
        return [_sample(full, turns, lost_reasoning=lost)]

    alone, same = [], True
    for k in wanted:
        rendering = (
            full
            if k == len(messages) - 1
            else template.render_turns(messages[: k + 1], tools=tools)
        )
        turn = _turn(template, rendering, k)
        _check_reasoning(template, turn)
        alone.append(_sample(rendering, [turn]))
        same &= rendering.text[: turn.end] == full.text[: turn.end] and turn in full.turns
    if same:
        return [_sample(full, [turn for turn in full.turns if turn.message in wanted])]
    return alone


def _sample(rendering: Rendering, turns: Sequence[Turn], lost_reasoning: int = 0) -> ChatSample:
    ends_open = (
        bool(turns) and turns[-1].terminator is None and not rendering.text[turns[-1].end :].strip()
    )
    return ChatSample(
        rendering, tuple((turn.start, turn.end) for turn in turns), ends_open, lost_reasoning
    )


def _turn(template: ChatTemplate, rendering: Rendering, message: int) -> Turn:
    for turn in rendering.turns:
        if turn.message == message:
            return turn
    raise DataError(
        f"{template.name} does not render the text of message {message} (assistant): repair the "
        "template or give the message weight 0"
    )


def _check_reasoning(template: ChatTemplate, turn: Turn) -> None:
    if turn.lost_reasoning:
        raise DataError(
            f"{template.name} does not render the reasoning (reasoning_content) of message "
            f"{turn.message}: remove it from the row or use a template that writes it"
        )


def _has_text(message: dict) -> bool:
    keys = ("content", "reasoning_content", "tool_calls")
    return any(
        value.strip() if isinstance(value := message.get(key), str) else value for key in keys
    )

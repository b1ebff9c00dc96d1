"""One conversation as the samples it is trained on: renderings and their trained spans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from solotune.data.messages import Conversation, assistant_indexes
from solotune.errors import DataError
from solotune.tokenizers import ChatTemplate, Rendering, Turn
from solotune.tokenizers.turns import kept_turn

Span = tuple[int, int]
TrainOn = Literal["all", "last"]  # assistant turns
History = Literal["per_turn", "as_rendered"]

_LOST = {
    "reasoning": "the reasoning (reasoning_content)",
    "text": "the whole text",
    "call": "the tool calls",
}


@dataclass(frozen=True)
class ChatSample:
    """A rendering and its trained character spans; facts about it that are counted."""

    rendering: Rendering
    trained: tuple[Span, ...]
    ends_open: bool = False  # the last trained turn stands at the end and has no terminator
    lost_reasoning: int = 0  # turns whose reasoning the template leaves out of the conversation
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
    DataError where a turn, its reasoning or its calls are not rendered.
    """
    whole = template.render_turns(conversation.messages, tools=conversation.tools)
    not_shown = len(whole.not_shown)
    if train_on_input:
        return [ChatSample(whole, ((0, len(whole.text)),), not_shown=not_shown)]
    messages = conversation.messages
    wanted = [k for k in assistant_indexes(conversation, train_on) if _says_something(messages[k])]
    if history == "as_rendered":
        return [_as_rendered(template, whole, messages, wanted, not_shown)]

    samples, kept = [], []
    for k in wanted:
        is_last = k == len(messages) - 1
        alone = (
            whole if is_last else template.render_turns(messages[: k + 1], tools=conversation.tools)
        )
        turn = _turn(template, alone, k)
        _check_lost(template, turn)
        samples.append(_sample(alone, [turn]))
        kept.append(turn if is_last else kept_turn(whole, alone))
    if all(kept):
        return [_sample(whole, [turn for turn in kept if turn is not None], not_shown=not_shown)]
    lost = sum("reasoning" in turn.lost for turn in whole.turns)
    return [replace(samples[0], lost_reasoning=lost, not_shown=not_shown), *samples[1:]]


def _as_rendered(
    template: ChatTemplate,
    whole: Rendering,
    messages: Sequence[dict],
    wanted: Sequence[int],
    not_shown: int,
) -> ChatSample:
    """The one sample of a conversation whose earlier turns may be rewritten."""
    turns = [_turn(template, whole, k) for k in wanted]
    for turn in turns[:-1]:
        if turn.terminator is None and messages[turn.message].get("tool_calls"):
            raise DataError(
                f"{template.name} writes no terminator after the tool call of message "
                f"{turn.message}: use dataset.history=per_turn"
            )
    if turns and turns[-1].message == len(messages) - 1:
        _check_lost(template, turns[-1])
    lost = sum("reasoning" in turn.lost for turn in turns)
    return _sample(whole, turns, lost_reasoning=lost, not_shown=not_shown)


def _sample(
    rendering: Rendering, turns: Sequence[Turn], *, lost_reasoning: int = 0, not_shown: int = 0
) -> ChatSample:
    ends_open = (
        bool(turns) and turns[-1].terminator is None and not rendering.text[turns[-1].end :].strip()
    )
    spans = tuple(span for turn in turns for span in turn.spans)
    return ChatSample(rendering, spans, ends_open, lost_reasoning, not_shown)


def _turn(template: ChatTemplate, rendering: Rendering, message: int) -> Turn:
    for turn in rendering.turns:
        if turn.message == message:
            return turn
    raise DataError(
        f"{template.name} does not render message {message} (assistant): repair the template or "
        "give the message weight 0"
    )


def _check_lost(template: ChatTemplate, turn: Turn) -> None:
    if turn.lost:
        what = " and ".join(_LOST[kind] for kind in sorted(turn.lost))
        raise DataError(
            f"{template.name} does not render {what} of message {turn.message}: take it out of the "
            "row or use a template that writes it"
        )


def _says_something(message: dict) -> bool:
    keys = ("content", "reasoning_content", "tool_calls")
    return any(
        value.strip() if isinstance(value := message.get(key), str) else value for key in keys
    )

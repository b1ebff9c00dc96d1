"""Spellings of a conversation: each becomes the same messages, or a sentence with the repair."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solotune.data import SampleSet, messages
from solotune.data.formats import find_layout
from solotune.data.messages import Conversation
from solotune.errors import DataError
from solotune.tokenizers import CHATML, Tokenizer

Load = Callable[..., SampleSet]
SYSTEM = {"role": "system", "content": "s"}
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def parse(row: dict[str, Any], **options: Any) -> Conversation:
    conversation = find_layout(row, "rows.jsonl, line 1", **options).parse(row)
    assert isinstance(conversation, Conversation)
    return conversation


def refusal(row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        parse(row, **options)
    return str(caught.value)


# columns


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "response": "a"},
        {"question": "q", "answer": "a"},
        {"question": "q", "response": "a"},
        {"query": "q", "response": "a"},
        {"input": "q", "output": "a"},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "response": "a", "context": "", "category": "qa"},
        {"instruction": "q", "input": "", "completion": "a"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "a"},
        {"prompt": "q", "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
        {"messages": json.dumps([USER, ASSISTANT])},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversation": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"role": "user", "value": "q"}, {"role": "assistant", "text": "a"}]},
        # a table gives each message the keys of all
        {
            "messages": [
                {"role": None, "from": "human", "content": None, "value": "q"},
                {"role": "assistant", "from": None, "content": "a", "value": None},
            ]
        },
    ],
)
def test_columns_by_another_name_give_the_same_messages(columns: dict[str, Any]) -> None:
    assert parse(columns).messages == [USER, ASSISTANT]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_opens_the_conversation(name: str) -> None:
    assert parse({name: "s", "question": "q", "response": "a"}).messages[0] == SYSTEM


def test_an_input_or_context_follows_the_instruction() -> None:
    for name in ("input", "context"):
        asked = parse({"instruction": "q", name: "c", "response": "a"}).messages[0]["content"]
        assert asked == "q\n\nc"


def test_pairs_of_a_history_come_first_and_are_trained() -> None:
    for history in ([["q1", "a1"], ["q2", "a2"]], '[["q1", "a1"], ["q2", "a2"]]'):
        row = {"instruction": "q", "output": "a", "system": "s", "history": history}
        conversation = parse(row)
        texts = [message["content"] for message in conversation.messages]
        assert texts == ["s", "q1", "a1", "q2", "a2", "q", "a"]
        assert messages.assistant_indexes(conversation, "all") == [2, 4, 6]
    for nothing in (None, [], "", "[]"):
        row = {"instruction": "q", "output": "a", "history": nothing}
        assert parse(row).messages == [USER, ASSISTANT]
    for wrong in ("q1", ["q1", "a1"], [["q1"]], {"q": "a"}):
        row = {"instruction": "q", "output": "a", "history": wrong}
        assert refusal(row) == "column history is not a list of [question, answer] pairs"


def test_complete_messages_beside_preferences_are_read() -> None:
    row = {"messages": [USER, ASSISTANT], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}
    assert find_layout(row, "").not_used(row) == {"chosen", "rejected"}


def test_tools_may_be_bare_functions_or_json_text() -> None:
    function = {"name": "f", "parameters": {}}
    wanted = [{"type": "function", "function": function}]
    for column, tools in (
        ("tools", wanted),
        ("tools", [function]),
        ("tools", json.dumps([function])),
        ("functions", [function]),
    ):
        assert parse({"messages": [USER, ASSISTANT], column: tools}).tools == wanted
    for nothing in (None, "", "[]", []):
        assert parse({"messages": [USER, ASSISTANT], "tools": nothing}).tools is None


def test_names_that_exist_are_taken_before_others() -> None:
    row = {"prompt": "q", "completion": "a", "answer": "5", "output": "6", "text": "t"}
    layout = find_layout(row, "line 1")
    assert layout.parse(row) == parse({"prompt": "q", "completion": "a"})
    assert layout.not_used(row) == {"answer", "output", "text"}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"prompt": "q", "response": "a", "answer": "b"},
            "response and answer may each be the completion of format prompt: name one with "
            "dataset.column_map.completion",
        ),
        (
            {"question": "q", "query": "r", "answer": "b"},
            "question and query may each be the prompt of format prompt: name one with "
            "dataset.column_map.prompt",
        ),
        (
            {"text": "t", "question": "q", "answer": "a"},
            "the columns ['answer', 'question', 'text'] may be prompt or text: set dataset.format",
        ),
        (
            {"context": "c", "question": "q", "answer": "a"},
            "the column context would be left out of ['answer', 'context', 'question']: for a "
            "question with its context set dataset.column_map.instruction, .input and .output, for "
            "the question alone dataset.format=prompt",
        ),
        (
            {"prompt": "q", "completion": "a", "label": False},
            "label says which answers are good, and fine-tuning would learn the bad ones too: leave"
            " them out of the file, or set dataset.format=prompt",
        ),
        (
            {"messages": [USER, ASSISTANT], "label": True},
            "label says which answers are good, and fine-tuning would learn the bad ones too: leave"
            " them out of the file, or set dataset.format=messages",
        ),
        (
            {"conversations": [{"from": "human"}], "chosen": {}, "rejected": {}},
            "chosen and rejected are two answers to conversations, for preference training; to "
            "learn the chosen one append it to conversations",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "chosen and rejected are two answers for preference training; to learn the chosen one "
            "set dataset.column_map.completion=chosen",
        ),
        (
            {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]},
            "chosen and rejected are two answers for preference training; to learn the chosen one "
            "set dataset.column_map.messages=chosen",
        ),
    ],
)
def test_what_is_unclear_is_refused_with_the_key_that_decides(
    row: dict[str, Any], wanted: str
) -> None:
    assert refusal(row) == f"rows.jsonl, line 1: {wanted}"


def test_the_keys_that_errors_name_do_decide() -> None:
    question = {"context": "c", "question": "q", "answer": "a"}
    by_map = {"instruction": "question", "input": "context", "output": "answer"}
    assert parse(question, column_map=by_map).messages[0]["content"] == "q\n\nc"
    assert parse(question, format="prompt").messages == [USER, ASSISTANT]
    two = {"prompt": "q", "response": "x", "answer": "a"}
    assert parse(two, column_map={"completion": "answer"}).messages == [USER, ASSISTANT]
    text = {"text": "t", "question": "q", "answer": "a"}
    assert parse(text, format="prompt").messages == [USER, ASSISTANT]
    assert find_layout(text, "", format="text").parse(text) == "t"
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert parse(pair, column_map={"completion": "chosen"}).messages == [USER, ASSISTANT]
    pair = {"chosen": [USER, ASSISTANT], "rejected": [USER]}
    assert parse(pair, column_map={"messages": "chosen"}).messages == [USER, ASSISTANT]
    label = {"prompt": "q", "completion": "a", "label": True}
    assert parse(label, format="prompt").messages == [USER, ASSISTANT]


def test_column_map_names_the_keys_of_messages(load_rows: Load, make_tokenizer: Any) -> None:
    tokenizer: Tokenizer = make_tokenizer(CHATML)
    turns = [{"speaker": "human", "utterance": "q"}, {"speaker": "ai", "utterance": "a"}]
    column_map = {"messages": "dialog", "role": "speaker", "content": "utterance"}
    mapped = load_rows(tokenizer, {"dialog": turns}, column_map=column_map)
    assert not any("not used" in line for line in mapped.lines())
    plain = load_rows(tokenizer, {"messages": [USER, ASSISTANT]})
    assert mapped.fingerprint() == plain.fingerprint()
    assert refusal({"messages": turns}) == (
        "message 0 has no role or from: name the key with dataset.column_map.role"
    )
    assert refusal({"messages": [USER | {"content": None}]}).startswith(
        "message 0 (user) has no content; its keys are ['content', 'role']: name the right one with"
    )


# roles, contents, weights


@given(name=st.sampled_from(sorted(messages._ROLE_NAMES)), data=st.data())
def test_roles_are_known_by_all_their_names_in_any_case(name: str, data: st.DataObject) -> None:
    spelled = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    value = '{"name": "f", "arguments": {}}'
    (message,) = parse({"conversations": [{"from": spelled, "value": value}]}).messages
    assert message["role"] == messages._ROLE_NAMES[name]
    assert message["role"] in ("system", "developer", "user", "assistant", "tool")


TURNS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text(max_size=9)),
    min_size=1,
    max_size=6,
)
SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}


@given(TURNS)
def test_every_spelling_of_a_conversation_reads_the_same(turns: list[tuple[str, str]]) -> None:
    openai = [{"role": role, "content": text} for role, text in turns]
    parts = [
        {"role": role, "content": [{"type": "text", "text": c} for c in text]}
        for role, text in turns
    ]
    sharegpt = [{"from": SHAREGPT[role], "value": text} for role, text in turns]
    wanted = parse({"messages": openai})
    assert wanted.messages == openai
    assert parse({"messages": parts}) == wanted
    assert parse({"conversations": sharegpt}) == wanted
    assert parse({"messages": json.dumps(openai)}) == wanted


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "q"}],
        [{"type": "text", "text": ""}, {"type": "input_text", "text": "q"}],
        ["q"],
    ],
)
def test_parts_of_text_are_joined(content: list) -> None:
    assert parse({"messages": [USER | {"content": content}, ASSISTANT]}).messages[0] == USER


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ([{"type": "image_url", "image_url": "x"}], r"parts of the types ['image_url']: only text"),
        ([{"type": "text", "text": 5}], "a part of message 0 holds the number 5, wanted text"),
        ([{"type": "text"}], "a part of message 0 holds a NoneType, wanted text"),
        ([None], "message 0 has parts of the types ['NoneType']: only text can be trained"),
        (5, "message 0 holds the number 5, wanted text"),
        ({"text": "q"}, "message 0 holds a dict, wanted text"),
    ],
)
def test_contents_that_are_no_text_are_refused(content: Any, wanted: str) -> None:
    assert wanted in refusal({"messages": [USER | {"content": content}]})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ([], "the conversation is not a list of messages with role and content"),
        ("hello", "the conversation is not a list of messages with role and content"),
        (["hello"], "the conversation is not a list of messages with role and content"),
        (
            "[{'role': 'user', 'content': 'q'}]",
            "the conversation is text that is not JSON (Python writes lists with single quotes): "
            "write it with json.dumps",
        ),
    ],
)
def test_what_is_no_conversation_is_said(value: Any, wanted: str) -> None:
    assert refusal({"messages": value}) == wanted


def test_weights_choose_what_is_trained() -> None:
    for off in (0, 0.0, False, "0"):
        turns = [
            USER,
            ASSISTANT | {"weight": off},
            USER,
            ASSISTANT | {"weight": 1},
            USER,
            ASSISTANT,
        ]
        conversation = parse({"messages": turns})
        assert messages.assistant_indexes(conversation, "all") == [3, 5]
        assert messages.assistant_indexes(conversation, "last") == [5]
        assert all("weight" not in message for message in conversation.messages)
    for wrong in (0.5, 2, "x", [0]):
        assert f"message 1 has the weight {wrong!r}: use 0 or 1" in refusal(
            {"messages": [USER, ASSISTANT | {"weight": wrong}]}
        )


def test_of_a_prompt_of_messages_the_completion_alone_is_trained() -> None:
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    assert messages.assistant_indexes(parse(row), "all") == [3]
    row = {"prompt": [USER, ASSISTANT | {"weight": 1}, USER], "completion": [ASSISTANT]}
    assert messages.assistant_indexes(parse(row), "all") == [1, 3]


def test_a_misspelt_key_of_a_message_is_printed(load_rows: Load, make_tokenizer: Any) -> None:
    rows = [{"messages": [USER, ASSISTANT | {"Weight": 0, "note": None}]}]
    lines = load_rows(make_tokenizer(CHATML), *rows).lines()
    assert "dataset: columns not used: Weight (of messages)" in lines
    reading = "{% for m in messages %}{{ m.Weight }}{% endfor %}" + CHATML
    assert not any("not used" in x for x in load_rows(make_tokenizer(reading), *rows).lines())


# tools


CALL = {"name": "f", "arguments": {"zip": "00501"}}
RESULT = {"role": "tool", "content": '{"city": "Holtsville"}'}
CALLS = {
    "openai": {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    "openai, as text": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": CALL | {"arguments": '{"zip": "00501"}'}}],
    },
    "openai, all as text": {
        "role": "assistant",
        "tool_calls": json.dumps([{"type": "function", "function": CALL}]),
    },
    "openai, older": {
        "role": "assistant",
        "content": "",
        "function_call": CALL | {"arguments": '{"zip": "00501"}'},
    },
    "sharegpt": {"from": "function_call", "value": json.dumps(CALL)},
    "sharegpt, list": {"from": "tool_call", "value": json.dumps([CALL])},
}


@pytest.mark.parametrize("style", CALLS)
def test_a_tool_call_is_the_same_in_each_style(style: str) -> None:
    result = RESULT
    if style.startswith("sharegpt"):
        result = {"from": "observation", "value": RESULT["content"]}
    conversation = parse({"messages": [USER, CALLS[style], result, ASSISTANT]})
    call = {"type": "function", "function": CALL}
    assert conversation.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        RESULT,
        ASSISTANT,
    ]
    assert messages.assistant_indexes(conversation, "all") == [1, 3]


@pytest.mark.parametrize(
    ("turn", "wanted"),
    [
        (
            {"from": "function_call", "value": "f(1)"},
            "message 0 has a tool call without a function",
        ),
        ({"from": "function_call", "value": "[]"}, "message 0 (assistant) has no content"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "has tool_calls that are not a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool call without a function"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]},
            "message 0 calls f with arguments that are no JSON object: '{oops'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]},
            "message 0 calls f with arguments that are no JSON object: '[1]'",
        ),
    ],
)
def test_a_broken_tool_call_is_named(turn: dict[str, Any], wanted: str) -> None:
    assert wanted in refusal({"messages": [turn]})


def test_a_call_without_arguments_has_none() -> None:
    for empty in ({}, "", None, "{}"):
        turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": empty}]}
        (message,) = parse({"messages": [turn]}).messages
        assert message["tool_calls"] == [{"name": "f", "arguments": {}}]


def test_reasoning_has_one_name() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        (_, message) = parse({"messages": [USER, ASSISTANT | {name: "r"}]}).messages
        assert message["reasoning_content"] == "r"

"""Every template of the trl wheel: trained is what inference leaves to the model to write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solotune import tokenizers
from solotune.data.chat import ChatSample, chat_samples
from solotune.data.messages import Conversation
from solotune.errors import DataError
from solotune.tokenizers import Tokenizer
from tests.tokenizers.trl_templates import (
    CONTROL,
    PLAIN,
    RULES,
    TWINS,
    Message,
    Rules,
    control_tokens,
    source,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather. <|im_end|>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]
WITH_REASONING = [name for name in PLAIN if RULES[name].reasoning]
WITH_CALLS = [name for name in PLAIN if RULES[name].call]

Make = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def make(write_tokenizer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A tokenizer with a template's own control tokens and the stop ids of its model."""
    made: dict[tuple, Tokenizer] = {}

    def make(name: str, **kwargs: Any) -> Tokenizer:
        key = (name, str(kwargs))
        if key not in made:
            specials, ends = control_tokens(name), RULES[name.removesuffix("_training")].ends
            folder = write_tokenizer(
                tmp_path_factory.mktemp(name),
                template=source(name),
                specials=specials,
                eos_token=ends[0],
            )
            ids = [256 + specials.index(text) for text in ends]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
            made[key] = tokenizers.auto(folder, chat_template_kwargs=kwargs or None)
        return made[key]

    return make


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calling(name: str, arguments: dict[str, Any], text: str = "", **more: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return assistant(text, tool_calls=[call], **more)


def result(text: str) -> Message:
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": text}


def samples_of(
    tokenizer: Tokenizer, messages: list[Message], tools: Any = None, **options: Any
) -> list[ChatSample]:
    options = {"train_on": "all", "history": "per_turn", "train_on_input": False, **options}
    conversation = Conversation(messages, [1] * len(messages), tools)
    return chat_samples(tokenizer.require_template(), conversation, **options)


def trained(tokenizer: Tokenizer, samples: list[ChatSample]) -> list[str]:
    """The trained runs of all samples, decoded from their tokens; EOS where it is added."""
    runs: list[str] = []
    encoded = tokenizer.encode_renderings([sample.rendering for sample in samples])
    for sample, one in zip(samples, encoded, strict=True):
        assert tokenizer.decode(one.ids) == sample.rendering.text
        run: list[int] = []
        for token, flag in zip([*one.ids, 0], [*one.mask(sample.trained).tolist(), 0], strict=True):
            if flag:
                run.append(token)
            elif run:
                runs.append(tokenizer.decode(run))
                run = []
        if sample.ends_open:
            runs[-1] += tokenizer.token_text(tokenizer.eos_id) or ""
    return runs


def expected(rules: Rules, message: Message) -> str:
    """What is trained of an assistant's message."""
    closing = rules.closing or rules.ends[0]
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        assert rules.call is not None
        return rules.call(function["name"], function["arguments"]) + (rules.call_closing or closing)
    text = rules.text(message["content"])
    if reasoning := message.get("reasoning_content"):
        assert rules.reasoning is not None
        return rules.reasoning.format(r=reasoning, c=text) + closing
    return rules.opening + text + closing


def same_end(name: str, runs: list[str]) -> list[str]:
    """GLM opens the next turn with the token that ends this one; a last turn gets EOS instead."""
    if name != "glm4moe":
        return runs
    return [
        run.replace("<|user|>", "<|endoftext|>").replace("<|observation|>", "<|endoftext|>")
        for run in runs
    ]


def test_every_template_of_the_wheel_has_rules() -> None:
    assert set(PLAIN) == set(RULES)
    assert len(TWINS) > 25


# --- any conversation -----------------------------------------------------------------------------

CONTROLS = (
    *("<|im_end|>", "<|im_start|>assistant\n", "</s>", "a <|eot_id|>", "<end_of_turn>", "<|end|>"),
    *("<turn|>", "<|return|>", "<|eot|>", "{{ x }}", "{% endfor %}", "<tool_call>", "assistant"),
)
characters = st.characters(exclude_categories=("Cs", "Cn"))
repeated = st.sampled_from(["Yes.", "No.", "ok", "user", "</", "\u00e9\u4e16"])
texts = st.one_of(
    st.text(characters, max_size=20),
    repeated,
    st.sampled_from(CONTROLS),
    st.builds(
        "{}{}{}".format, st.text(" \n\t", max_size=2), repeated, st.text(" \n\t", max_size=2)
    ),
)
values = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8)


def allowed(rules: Rules, text: str) -> bool:
    """Whether a template treats a text as text; the tests below are about the others."""
    tags = ("<think>", "</think>") if rules.divides else ()
    return not any(part in text for part in (*rules.strange, *tags))


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[Message]:
    """Messages in any order that the template accepts, at least one of them the assistant's."""
    rules = RULES[name]
    some = texts.filter(lambda text: allowed(rules, text))
    messages: list[Message] = []
    if rules.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(some)})
    if rules.alternates:
        roles = ["user", "assistant"] * draw(st.integers(1, 3))
    else:
        roles = ["user", *draw(st.lists(st.sampled_from(["user", "assistant"]), max_size=4))]
        roles.append("assistant")
    for role in roles:
        if role == "user":
            messages.append(user(draw(some)))
            continue
        messages.append(assistant(draw(some.filter(lambda text: text.strip() != ""))))
        if rules.reasoning and draw(st.booleans()):
            reasoning = draw(some.filter(lambda text: text.strip() != "")).strip()
            if "think>" not in reasoning:
                messages[-1]["reasoning_content"] = reasoning
    return messages


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_trained_spans_decode_to_what_the_assistant_says_and_its_terminators(
    name: str, data: st.DataObject, make: Make
) -> None:
    tokenizer, messages = make(name), data.draw(conversations(name))
    samples = samples_of(tokenizer, messages)
    said = [message for message in messages if message["role"] == "assistant"]
    wanted = [expected(RULES[name], message) for message in said]
    assert same_end(name, trained(tokenizer, samples)) == wanted
    template = tokenizer.require_template()
    assert samples[-1].rendering.text == template.render(messages)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    """The tokenizer of real weights."""
    return tokenizers.auto(smollm2_dir)


# its vocabulary lacks some control characters
written = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn")), max_size=20)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(written, written | repeated), min_size=1, max_size=3))
def test_trained_spans_decode_alike_with_the_tokenizer_of_real_weights(
    pairs: list[tuple[str, str]], smollm2: Tokenizer
) -> None:
    """White space that opens an answer may be merged with the line break of the header."""
    pairs = [(question, answer.lstrip() or "ok") for question, answer in pairs]
    messages = [made for question, answer in pairs for made in (user(question), assistant(answer))]
    runs = trained(smollm2, samples_of(smollm2, messages))
    assert runs == [answer + "<|im_end|>" for _, answer in pairs]


PARTS_OF_TEXTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_response>", "</tool_response>", "<|channel>", "<channel|>"),
        *("<|channel|>analysis<|message|>", "<|im_end|>", "a", "b c", "\n", " ", "null", "x"),
        *("reasoning effort", "/no_think", "CONTINUE_FINAL_MESSAGE_TAG ", "Reasoning Effort"),
    ]
)
OUTLINES = [
    [("user", ["content"]), ("assistant", ["content"])],
    [("system", ["content"]), ("user", ["content"]), ("assistant", ["content"])],
    [("user", ["content"]), ("assistant", ["content", "reasoning_content"])],
    [("user", ["content"]), ("assistant", ["content"])] * 2,
]


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_conversation_filled_into_a_known_shape_renders_as_by_the_template(
    name: str, data: st.DataObject, make: Make
) -> None:
    """Also where a template looks at the texts: what it asked of the first must hold again."""
    template = make(name).require_template()
    some = st.lists(PARTS_OF_TEXTS, max_size=5).map("".join)
    messages = [
        {"role": role, **{key: data.draw(some) for key in keys}}
        for role, keys in data.draw(st.sampled_from(OUTLINES))
    ]

    def outcome(shapes: dict) -> Any:
        template._plans, before = shapes, template._plans
        try:
            return template.render_turns(messages)
        except DataError as error:
            return str(error)
        finally:
            template._plans = before

    known = outcome(template._plans)
    assert known == outcome({})
    if not isinstance(known, str):
        assert known.text == template.render(messages)


@pytest.mark.parametrize("name", WITH_CALLS)
@settings(max_examples=15, deadline=None)
@given(city=values, days=st.integers(-9, 99), answer=values)
def test_calls_are_trained_as_the_template_writes_them(
    name: str, city: str, days: int, answer: str, make: Make
) -> None:
    tokenizer, rules = make(name), RULES[name]
    messages = [
        user("How is the weather?"),
        calling("weather", {"city": city, "days": days}),
        result(answer),
        assistant(answer),
    ]
    samples = samples_of(tokenizer, messages, TOOLS)
    wanted = [expected(rules, messages[1]), expected(rules, messages[3])]
    assert (
        trained(tokenizer, samples) == wanted
        or same_end(name, trained(tokenizer, samples)) == wanted
    )


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in WITH_CALLS])
def test_calls_that_a_template_does_not_write_are_refused(name: str, make: Make) -> None:
    messages = [user("How?"), calling("weather", {"city": "Rome"})]
    with pytest.raises(DataError, match=r"chat template.*(does not render|refuses)"):
        samples_of(make(name), messages, TOOLS)


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in WITH_REASONING])
def test_reasoning_that_a_template_does_not_write_is_refused(name: str, make: Make) -> None:
    messages = [user("How?"), assistant("So.", reasoning_content="because")]
    with pytest.raises(DataError, match=r"does not render the reasoning \(reasoning_content\)"):
        samples_of(make(name), messages)


# --- reasoning and history ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WITH_REASONING if RULES[name].divides])
def test_reasoning_inside_a_content_is_trained_as_reasoning_of_its_own(
    name: str, make: Make
) -> None:
    inside = [user("How?"), assistant("<think>\nbecause\n</think>\n\nSo.")]
    apart = [user("How?"), assistant("So.", reasoning_content="because")]
    runs = trained(make(name), samples_of(make(name), inside))
    wanted = trained(make(name), samples_of(make(name), apart))
    if name.startswith("nemotron"):  # the content stands as it is
        wanted = ["because\n</think>\n\nSo.<|im_end|>"]
    assert runs == wanted


# What becomes of reasoning in earlier turns: left out there, so that each turn is a sample.
REWRITING = {
    *("diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_2_5_v2"),
    *("lfm2_2_5_vl", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super"),
    *("nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
}


@pytest.mark.parametrize("name", WITH_REASONING)
def test_a_template_that_rewrites_history_gives_a_sample_of_each_turn(
    name: str, make: Make
) -> None:
    tokenizer, rules = make(name), RULES[name]
    messages = [
        *(user("q1"), assistant("a1", reasoning_content="r1")),
        *(user("q2"), assistant("a2", reasoning_content="r2")),
    ]
    samples = samples_of(tokenizer, messages)
    assert len(samples) == (2 if name in REWRITING else 1)
    assert sum(sample.lost_reasoning for sample in samples) == (name in REWRITING)
    said = [message for message in messages if message["role"] == "assistant"]
    wanted = [expected(rules, message) for message in said]
    assert same_end(name, trained(tokenizer, samples)) == wanted
    template = tokenizer.require_template()
    for sample, stop in zip(samples, (2, 4), strict=False):  # as inference would see it
        prompt = template.render(messages[: stop - 1], add_generation_prompt=True)
        if len(samples) == 2 and name != "qwen3_5_nothink":  # which asks for no reasoning
            assert sample.rendering.text.startswith(prompt)
            assert sample.trained[0][0] == len(prompt)
    (whole,) = samples_of(tokenizer, messages, history="as_rendered")
    assert whole.rendering.text == template.render(messages)
    assert ("r1" in whole.rendering.text) == (name not in REWRITING)
    assert whole.lost_reasoning == (name in REWRITING)


@pytest.mark.parametrize(
    ("name", "kwargs", "wanted"),
    [
        ("qwen3", {"enable_thinking": False}, "So.<|im_end|>"),
        ("qwen3_5_think", {"enable_thinking": False}, "So.<|im_end|>"),
        ("nemotron_3_nano", {"enable_thinking": False}, "So.<|im_end|>"),
        ("glm4moe", {"enable_thinking": False}, "\nSo.<|endoftext|>"),
        ("gemma4_v5", {"enable_thinking": True}, "So.<turn|>"),
        ("gptoss", {"reasoning_effort": "low"}, "<|channel|>final<|message|>So.<|return|>"),
        ("llama3_1", {"builtin_tools": ["search"]}, "So.<|eot_id|>"),
    ],
)
def test_chat_template_kwargs_decide_what_inference_begins_with(
    name: str, kwargs: dict[str, Any], wanted: str, make: Make
) -> None:
    tokenizer, messages = make(name, **kwargs), [user("How?"), assistant("So.")]
    samples = samples_of(tokenizer, messages)
    assert trained(tokenizer, samples) == [wanted]
    prompt = tokenizer.require_template().render(messages[:1], add_generation_prompt=True)
    assert samples[0].rendering.text.startswith(prompt)
    assert samples[0].trained[0][0] == len(prompt)


# --- texts that a template treats in ways of its own ----------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gemma4", "one <|channel>thought<channel|> two", "the whole text of message 1"),
        ("deepseekv3", "<think>r</think>a", r"the reasoning \(reasoning_content\) of message 1"),
        ("llama3_1", "Let me look.", "the whole text of message 1"),  # beside a call
        ("deepseek_r1_distill", "Let me look.", "the tool calls of message 1"),
    ],
)
def test_what_a_template_drops_of_a_turn_is_refused(
    name: str, text: str, message: str, make: Make
) -> None:
    answer = assistant(text)
    if "look" in text:
        answer = calling("weather", {"city": "Rome"}, text)
    with pytest.raises(DataError, match=f"does not render {message}"):
        samples_of(make(name), [user("How?"), answer])


def test_results_inside_an_assistant_message_are_refused(make: Make) -> None:
    responses = [{"name": "weather", "response": {"sky": "blue"}}]
    answer = calling("weather", {"city": "Rome"}, tool_responses=responses)
    with pytest.raises(DataError, match="give results as messages of the role tool"):
        samples_of(make("gemma4_v5"), [user("How?"), answer])


def test_a_rule_of_a_template_shows_with_its_own_words(make: Make) -> None:
    with pytest.raises(DataError, match=r"'system', 'user'.*System role not supported"):
        samples_of(make("gemma"), [{"role": "system", "content": "s"}, user("q"), assistant("a")])


# --- stop tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_generation_stops_at_all_that_ends_a_trained_turn(name: str, make: Make) -> None:
    tokenizer, rules = make(name), RULES[name]
    endings = [text for text in (rules.closing, rules.call_closing) if text]
    last = {CONTROL.findall(text)[-1] for text in endings}
    stops = {tokenizer.token_text(token_id) for token_id in tokenizer.stop_ids()}
    assert stops == {*rules.ends, *last}


# --- twins for training ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TWINS)
def test_each_disagreement_with_the_training_twin_has_a_reason(name: str) -> None:
    tables = pytest.importorskip("tests.tokenizers.template_tables")
    _, differ, differ_on_twin = tables.disagreements(name)
    assert [one for one in differ if one.reason not in tables.REASONS] == []
    # where its blocks are in the template they decide, but for the end that they leave out
    assert {one.reason for one in differ_on_twin} <= {"end left out"}


def test_the_tables_of_the_page_are_those_of_the_templates() -> None:
    tables = pytest.importorskip("tests.tokenizers.template_tables")
    page = tables.PAGE.read_text(encoding="utf-8")
    for name, table in tables.written().items():
        assert tables.between(page, name)[1] == table
    for reason, why in tables.REASONS.items():
        assert f"| {reason} | {why} |" in page

"""What is trained of a row: the assistant's texts and their terminators, and nothing else.

The templates are written for these tests in the manner of common ones.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solotune.data import SampleSet
from solotune.errors import ConfigError, DataError
from solotune.tokenizers import CHATML, Tokenizer

Make = Callable[..., Tokenizer]
Load = Callable[..., SampleSet]

# A header in control tokens, trimmed texts, a terminator that is not EOS.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The assistant goes by another name, roles must alternate.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Reasoning in the last turn alone, an empty block where there is none; tool calls.
QWEN3 = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set ns = namespace(content=m.content, reasoning=m.reasoning_content or '') %}
        {%- if not ns.reasoning and '</think>' in ns.content %}
            {%- set head = ns.content.split('</think>')[0] %}
            {%- set ns.reasoning = head.split('<think>')[-1].strip('\n') %}
            {%- set ns.content = ns.content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last %}
            {{- '<think>\n' + ns.reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- ns.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if ns.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# Llama 2's manner: no generation prompt, a space on both sides of the answer, EOS ends it.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' }}{{ m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# No terminator at all.
BARE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen3": QWEN3, "llama2": LLAMA2}
TERMINATORS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "qwen3": "<|im_end|>",
    "llama2": " </s>",  # the space before it is the model's to write, or it could never stop
}
# What inference leaves to the model before the text.
OPENINGS = {"llama2": " "}
# What stands in a generation block of the training twin of a template.
BODIES = {
    "llama3": "{{ m.content | trim + '<|eot_id|>' }}",
    "gemma": "{{ m.content | trim + '<end_of_turn>' }}",
    "llama2": "{{ ' ' }}{{ m.content | trim + ' ' + eos_token }}",
}


@pytest.fixture(scope="module", params=TEMPLATES)
def named(request: pytest.FixtureRequest, make_tokenizer: Make) -> tuple[str, Tokenizer]:
    """Each template's name and a tokenizer with it."""
    return request.param, make_tokenizer(TEMPLATES[request.param])


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages that alternate between user and assistant."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return opening + [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]


def trained_turn(name: str, text: str) -> str:
    """What is trained of an answer."""
    return OPENINGS.get(name, "") + text + TERMINATORS[name]


def text_of(tokenizer: Tokenizer, samples: SampleSet, index: int = 0) -> str:
    """The whole text of a sample."""
    return tokenizer.decode(samples.sample(index)[0].tolist())


def trained_of(tokenizer: Tokenizer, samples: SampleSet, index: int = 0) -> list[str]:
    """The texts of the trained runs of a sample."""
    tokens, trained = samples.sample(index)
    runs, run = [], []
    for token, flag in zip([*tokens.tolist(), 0], [*trained.tolist(), 0], strict=True):
        if flag:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def test_assistant_texts_and_terminators_are_trained_and_nothing_else(
    named: tuple[str, Tokenizer], load_rows: Load
) -> None:
    name, tokenizer = named
    samples = load_rows(tokenizer, {"messages": chat("Hi", "Yes.", "And?", "No.")})
    trained = [run for i in range(len(samples)) for run in trained_of(tokenizer, samples, i)]
    assert trained == [trained_turn(name, text) for text in ("Yes.", "No.")]


def test_a_sample_is_the_rendering_of_the_template(
    named: tuple[str, Tokenizer], load_rows: Load
) -> None:
    _, tokenizer = named
    messages = chat("Hi", " Yes.\n", "And?", "No <|im_end|> way.")
    samples = load_rows(tokenizer, {"messages": messages}, history="as_rendered")
    assert text_of(tokenizer, samples) == tokenizer.require_template().render(messages)


any_text = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cn")), min_size=1, max_size=30
)
control_texts = st.sampled_from(["<|im_end|>", "</s>x", "a <|eot_id|>", "<end_of_turn>", "user"])
texts = st.one_of(any_text, control_texts).filter(lambda text: text == text.strip())
function_fixtures = [HealthCheck.function_scoped_fixture]


@settings(max_examples=40, deadline=None, suppress_health_check=function_fixtures)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_trained_spans_decode_to_the_assistant_texts_in_order(
    pairs: list[tuple[str, str]], named: tuple[str, Tokenizer], load_rows: Load
) -> None:
    name, tokenizer = named
    samples = load_rows(tokenizer, {"messages": chat(*(text for pair in pairs for text in pair))})
    trained = [run for i in range(len(samples)) for run in trained_of(tokenizer, samples, i)]
    assert trained == [trained_turn(name, answer) for _, answer in pairs]


@settings(max_examples=25, deadline=None, suppress_health_check=function_fixtures)
@given(answer=st.text(" \nab", min_size=1, max_size=8).filter(str.strip))
def test_white_space_around_an_answer_is_trained_where_the_template_keeps_it(
    answer: str, named: tuple[str, Tokenizer], load_rows: Load
) -> None:
    name, tokenizer = named
    samples = load_rows(tokenizer, {"messages": chat("q", answer)})
    kept = answer if name in ("chatml", "qwen3") else answer.strip()
    assert trained_of(tokenizer, samples) == [trained_turn(name, kept)]


def twin(name: str) -> str:
    """The template with a generation block around what its assistant says."""
    body = BODIES[name]
    assert body in TEMPLATES[name]
    marked = f"{{% generation %}}{body}{{% endgeneration %}}"
    both = f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{body}{{% endif %}}"
    return TEMPLATES[name].replace(body, both)


@pytest.mark.parametrize("name", BODIES)
def test_masks_agree_with_generation_blocks_around_the_same_text(
    name: str, make_tokenizer: Make, load_rows: Load
) -> None:
    tokenizer, with_blocks = make_tokenizer(TEMPLATES[name]), make_tokenizer(twin(name))
    row = {"messages": chat("Hi", "Yes, 2 <|im_end|>.", "And?", " No.")}
    ours, theirs = load_rows(tokenizer, row), load_rows(with_blocks, row)
    assert text_of(tokenizer, ours) == text_of(with_blocks, theirs)
    assert ours.fingerprint() == theirs.fingerprint()


def test_a_generation_block_without_the_terminator_still_trains_it(
    make_tokenizer: Make, load_rows: Load
) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    samples = load_rows(tokenizer, {"messages": chat("Hi", "Yes.")})
    assert trained_of(tokenizer, samples) == ["Yes.<|im_end|>"]


def test_two_user_turns_in_a_row_are_two_turns(make_tokenizer: Make, load_rows: Load) -> None:
    """Field case 1."""
    conversation = [("human", "Hi"), ("human", "Are you there?"), ("gpt", "Yes.")]
    row = {"conversations": [{"from": role, "value": text} for role, text in conversation]}
    tokenizer = make_tokenizer(CHATML)
    samples = load_rows(tokenizer, row)
    assert text_of(tokenizer, samples) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nAre you there?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    assert trained_of(tokenizer, samples) == ["Yes.<|im_end|>"]


def test_a_template_that_refuses_the_roles_names_row_roles_and_its_own_words(
    make_tokenizer: Make, load_rows: Load
) -> None:
    """Field case 1, where the template wants alternation."""
    messages = [{"role": "user", "content": "Hi"}, *chat("Are you there?", "Yes.")]
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 1: .*'user', 'user', 'assistant'.*roles must alternate"
    ):
        load_rows(make_tokenizer(GEMMA), {"messages": messages})


def test_tool_arguments_keep_their_types_from_row_to_row(
    make_tokenizer: Make, load_rows: Load
) -> None:
    """Field case 4; arguments as JSON text and as objects give the same sample."""
    tokenizer = make_tokenizer(QWEN3)

    def row(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "at", "arguments": arguments}}
        question = {"role": "user", "content": "When?"}
        return {
            "messages": [question, {"role": "assistant", "content": None, "tool_calls": [call]}]
        }

    for arguments in ({"time": "2030-01-01"}, {"time": 1900000000}):
        as_object, as_text = row(arguments), row(json.dumps(arguments))
        samples = load_rows(tokenizer, as_object, as_text)
        expected = (
            '<tool_call>\n{"name": "at", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"
        )
        for index in (0, 1):
            assert expected in text_of(tokenizer, samples, index)
            # the empty think block before the call is the template's
            assert trained_of(tokenizer, samples, index) == [expected + "<|im_end|>"]


@pytest.mark.parametrize("tail", ["<|call|>", ""])
def test_a_call_is_trained_to_its_end_whatever_control_tokens_it_is_written_with(
    tail: str, make_tokenizer: Make, load_rows: Load
) -> None:
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.tool_calls %}"
        "{{ ' to=' + m.tool_calls[0].name + '<|args|>' }}{{ m.tool_calls[0].arguments | tojson }}"
        + tail
        + "{% else %}{{ '<|args|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    specials = ("<s>", "</s>", "<|start|>", "<|args|>", "<|end|>", "<|call|>")
    tokenizer = make_tokenizer(template, specials=specials)
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    result = {"role": "tool", "content": "2"}
    messages = [*chat("q"), call, result, {"role": "assistant", "content": "a"}]
    samples = load_rows(tokenizer, {"messages": messages})
    trained = [run for i in range(len(samples)) for run in trained_of(tokenizer, samples, i)]
    # a token that is not known to end turns is followed by one that does
    assert trained == [' to=f<|args|>{"x": 1}' + tail + "</s>", "<|args|>a<|end|>"]


def test_reasoning_is_trained_where_the_template_writes_it(
    make_tokenizer: Make, load_rows: Load
) -> None:
    """Field case 5; the markup around reasoning is the model's to write."""
    tokenizer = make_tokenizer(QWEN3)
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "c1"}
    apart = load_rows(tokenizer, {"messages": [user, answer | {"reasoning_content": "r1"}]})
    inside = load_rows(
        tokenizer, {"messages": [user, answer | {"content": "<think>\nr1\n</think>\n\nc1"}]}
    )
    assert trained_of(tokenizer, apart) == ["<think>\nr1\n</think>\n\nc1<|im_end|>"]
    assert apart.fingerprint() == inside.fingerprint()


def test_an_empty_think_block_of_the_template_is_not_trained(
    make_tokenizer: Make, load_rows: Load
) -> None:
    tokenizer = make_tokenizer(QWEN3)
    samples = load_rows(tokenizer, {"messages": chat("q", "c1")})
    assert "<think>\n\n</think>\n\nc1" in text_of(tokenizer, samples)
    assert trained_of(tokenizer, samples) == ["c1<|im_end|>"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_the_template_leaves_out_is_an_error(
    key: str, make_tokenizer: Make, load_rows: Load
) -> None:
    """Field case 5."""
    messages = chat("q", "c1")
    messages[1][key] = "r1"
    with pytest.raises(DataError, match=r"line 1: .*does not render the reasoning .*message 1"):
        load_rows(make_tokenizer(CHATML), {"messages": messages})


def test_a_template_that_rewrites_history_gives_each_turn_as_inference_sees_it(
    make_tokenizer: Make, load_rows: Load
) -> None:
    tokenizer = make_tokenizer(QWEN3)
    messages = chat("q1", "a1", "q2", "a2")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "r1", "r2"
    samples = load_rows(tokenizer, {"messages": messages})
    assert len(samples) == 2
    for index, stop in enumerate((2, 4)):
        prompt = tokenizer.require_template().render(
            messages[: stop - 1], add_generation_prompt=True
        )
        assert text_of(tokenizer, samples, index).startswith(prompt)
        turn = f"<think>\nr{index + 1}\n</think>\n\na{index + 1}<|im_end|>"
        assert trained_of(tokenizer, samples, index) == [turn]
        assert text_of(tokenizer, samples, index) == prompt + turn + "\n"


def test_as_rendered_keeps_one_sample_and_counts_the_lost_reasoning(
    make_tokenizer: Make, load_rows: Load
) -> None:
    tokenizer = make_tokenizer(QWEN3)
    messages = chat("q1", "a1", "q2", "a2")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "r1", "r2"
    samples = load_rows(tokenizer, {"messages": messages}, history="as_rendered")
    turns = ["a1<|im_end|>", "<think>\nr2\n</think>\n\na2<|im_end|>"]
    assert trained_of(tokenizer, samples) == turns
    assert samples.report.reasoning_lost == 1
    assert any("1 turns whose reasoning" in line for line in samples.lines())


def test_a_template_that_keeps_history_gives_one_sample(
    make_tokenizer: Make, load_rows: Load
) -> None:
    samples = load_rows(make_tokenizer(LLAMA3), {"messages": chat("q1", "a1", "q2", "a2")})
    assert len(samples) == 1


def test_eos_is_never_added_to_a_template_with_terminators(
    make_tokenizer: Make, load_rows: Load
) -> None:
    """Field case 6."""
    tokenizer = make_tokenizer(GEMMA)
    messages = chat("a", "b", "c", "d", "e", "f")
    samples = load_rows(tokenizer, {"messages": messages})
    assert text_of(tokenizer, samples) == tokenizer.require_template().render(messages)
    assert tokenizer.eos_id not in samples.sample(0)[0]


def test_eos_ends_each_turn_where_the_template_ends_none(
    make_tokenizer: Make, load_rows: Load
) -> None:
    """Each in a sample of its own: inside the conversation no EOS stands."""
    tokenizer = make_tokenizer(BARE)
    samples = load_rows(tokenizer, {"messages": chat("a", "b", "c", "d")})
    whole = "user: a\nassistant: b\nuser: c\nassistant: d\n"
    assert text_of(tokenizer, samples, 0) == "user: a\nassistant: b\n</s>"
    assert text_of(tokenizer, samples, 1) == whole + "</s>"
    assert trained_of(tokenizer, samples, 1) == ["d", "</s>"]
    assert any("2 trained turns to which" in line for line in samples.lines())


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_control_tokens_in_user_text_are_plain_text(
    template: str, make_tokenizer: Make, load_rows: Load
) -> None:
    """Field case 9, with a tokenizer.json."""
    tokenizer = make_tokenizer(template)
    text = "What does <|im_end|></s><|eot_id|> mean?"
    samples = load_rows(tokenizer, {"messages": chat(text, "A <|im_end|> ends.")})
    tokens = samples.sample(0)[0].tolist()
    terminator = tokenizer.token_id(tokenizer.require_template().terminator or "")
    assert tokens.count(terminator) == 2  # the template's own, after each of the two turns
    assert text in text_of(tokenizer, samples)
    assert samples.report.plain_controls == 4


def test_weight_zero_and_train_on_last_choose_the_turns(
    make_tokenizer: Make, load_rows: Load
) -> None:
    tokenizer = make_tokenizer(CHATML)
    messages = chat("q1", "a1", "q2", "a2", "q3", "a3")
    messages[3]["weight"], messages[5]["weight"] = 0, 1
    row = {"messages": messages}
    assert trained_of(tokenizer, load_rows(tokenizer, row)) == ["a1<|im_end|>", "a3<|im_end|>"]
    last = load_rows(tokenizer, row, train_on="last")
    assert trained_of(tokenizer, last) == ["a3<|im_end|>"]
    everything = load_rows(tokenizer, row, train_on_input=True)
    assert trained_of(tokenizer, everything) == [text_of(tokenizer, everything)]


def test_an_untrained_conversation_is_skipped_and_counted(
    make_tokenizer: Make, load_rows: Load
) -> None:
    messages = chat("q1", "a1")
    messages[1]["weight"] = 0
    samples = load_rows(
        make_tokenizer(CHATML), {"messages": messages}, {"messages": chat("q", "a")}
    )
    assert len(samples) == 1
    assert samples.report.rows_skipped == 1


def test_a_long_row_is_cut_without_a_made_up_end(make_tokenizer: Make, load_rows: Load) -> None:
    tokenizer = make_tokenizer(CHATML, max_seq_len=40)
    samples = load_rows(
        tokenizer, {"messages": chat("q", "answer " * 20)}, {"messages": chat("q" * 60, "lost")}
    )
    assert len(samples) == 1
    tokens, _ = samples.sample(0)
    assert len(tokens) == 40
    assert trained_of(tokenizer, samples)[0].startswith("answer")
    assert not {tokenizer.eos_id, tokenizer.token_id("<|im_end|>")} & set(tokens[-5:].tolist())
    assert (samples.report.rows_cut, samples.report.rows_skipped) == (2, 1)


@pytest.mark.parametrize("row", [{"messages": chat("a", "b")}, {"prompt": "a", "completion": "b"}])
def test_a_base_model_without_template_asks_for_one(
    row: dict[str, Any], make_tokenizer: Make, load_rows: Load
) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.chat_template to\s+chatml or to the path"):
        load_rows(make_tokenizer(None), row)


def test_chat_template_kwargs_reach_the_template(make_tokenizer: Make, load_rows: Load) -> None:
    template = "{{ 'fast ' if not think else 'slow ' }}" + CHATML
    tokenizer = make_tokenizer(template, chat_template_kwargs={"think": True})
    samples = load_rows(tokenizer, {"messages": chat("a", "b")})
    assert text_of(tokenizer, samples).startswith("slow <|im_start|>")


def test_a_template_that_changes_an_answer_is_refused_not_guessed(
    make_tokenizer: Make, load_rows: Load
) -> None:
    template = CHATML.replace("message['content']", "message['content'][:5]")
    with pytest.raises(DataError, match=r"does not render the whole text of message 1"):
        load_rows(make_tokenizer(template), {"messages": chat("q", "a long answer")})

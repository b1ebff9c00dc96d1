"""Traced texts act as `str` does and know afterwards where each character came from."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solotune.errors import DataError
from solotune.tokenizers import ChatTemplate
from solotune.tokenizers.traced_text import Leaf, Path, Traced, joined, pieces_of, to_json

short = st.text(" \nab</>", max_size=8)
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    *(("strip", ()), ("lstrip", ("\n",)), ("rstrip", (None,)), ("strip", (" a",))),
    *(("split", ("a",)), ("split", ("</",)), ("split", ()), ("split", ("b", 1))),
    *(("startswith", ("a",)), ("endswith", (">",)), ("startswith", (("a", "b"),))),
    *(("replace", ("a", "b")), ("replace", ("ab", "")), ("lower", ()), ("title", ())),
    *(("__contains__", ("</",)), ("__eq__", ("ab",)), ("__ne__", ("ab",)), ("__len__", ())),
    *(("__add__", (" x",)), ("find", ("b",)), ("count", ("a",)), ("partition", ("a",))),
    *(("__getitem__", (slice(1, 4),)), ("__getitem__", (slice(-3, None),)), ("__hash__", ())),
    *(("__getitem__", (slice(None, None, -1),)), ("removeprefix", ("a",)), ("splitlines", ())),
]


def traced(text: str, source: int, path: Path) -> Traced:
    return Traced.of((Leaf.of(text, source),), path)


@given(parts=st.lists(st.tuples(short, st.booleans()), max_size=4), calls=st.data())
def test_methods_return_what_those_of_str_return(
    parts: list[tuple[str, bool]], calls: st.DataObject
) -> None:
    path = Path()
    text = joined(
        traced(part, n, path) if is_leaf else part for n, (part, is_leaf) in enumerate(parts)
    )
    plain = "".join(part for part, _ in parts)
    for method, args in calls.draw(st.lists(st.sampled_from(CALLS), max_size=4)):
        result, wanted = getattr(text, method)(*args), getattr(plain, method)(*args)
        assert (result, bool(result)) == (wanted, bool(wanted))
        if not isinstance(result, str):
            assert list(result) == wanted if isinstance(wanted, list) else result == wanted
            if not isinstance(wanted, list) or not wanted:
                return
            result, wanted = result[-1], wanted[-1]
        if isinstance(result, Traced):
            assert "".join(pieces_of(result)) == wanted
            for leaf in pieces_of(result):
                if isinstance(leaf, Leaf) and leaf.offset is not None:
                    whole = parts[leaf.source][0]
                    assert whole[leaf.offset : leaf.offset + len(leaf)] == "".join((leaf,))
        text, plain = result, wanted


@given(text=short, other=short)
def test_steps_lead_from_the_source_text_to_the_leaf_where_the_checks_hold(
    text: str, other: str
) -> None:
    def run(start: str, path: Path) -> str:
        said = traced(start, 0, path)
        if "</" in said:
            said = said.split("</")[-1].lstrip("\n")
        return said.strip() or "empty"

    path = Path()
    result = run(text, path)
    assert not path.closed
    replayed = "".join((run(other, Path()),))

    def value(steps: Any) -> str:
        made = other
        for step in steps:
            made = step.take(made)
        return made

    for (_, steps, question, args), answer in path.checks.items():
        if question(value(steps), *args) != answer:
            return  # the other text takes another way
    if not isinstance(result, Traced):
        assert replayed == result
    else:
        (leaf,) = pieces_of(result)
        assert isinstance(leaf, Leaf)
        assert value(leaf.steps) == replayed


def test_json_of_a_traced_value_is_one_leaf_and_that_of_json() -> None:
    value = {"a": [traced('x"y', 3, Path()), 1]}
    text = to_json(value, indent=2)
    assert text == json.dumps({"a": ['x"y', 1]}, indent=2)
    assert isinstance(text, Traced)
    assert [leaf.source for leaf in pieces_of(text) if isinstance(leaf, Leaf)] == [3]


@pytest.mark.parametrize(
    "expression",
    [
        *("'%s' % t", "', '.join([t, t])", "t | format", "t in 'abc'", "t | upper | wordcount"),
    ],
)
def test_a_template_that_can_look_at_a_text_unnoticed_is_run_for_each_conversation(
    expression: str,
) -> None:
    template = ChatTemplate("{% set t = messages[0].content %}{{ " + expression + " }}")
    for text in ("abc", "b", "x y z"):
        asked = [{"role": "user", "content": text}]
        assert template.render_turns(asked).text == template.render(asked)
    assert template._plans == {}


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content._path",
        "messages[0].content._pieces",
        "messages[0].content.path.note(messages[0].content, '{0.__class__}'.format)",
        "tools[0]._origin",
        "tools[0].items.__self__",
    ],
)
def test_a_template_sees_nothing_of_the_tracing(expression: str) -> None:
    template = ChatTemplate("{{ " + expression + " }}{{ messages[0].content }}")
    try:
        text = template.render_turns([{"role": "user", "content": "q"}], tools=[{"name": "f"}]).text
    except DataError as error:
        assert "undefined" in str(error) or "no attribute" in str(error) or "unsafe" in str(error)  # noqa: PT017
    else:
        assert text == "q"


def test_keys_of_tools_and_calls_are_not_taken_for_attributes() -> None:
    template = ChatTemplate(
        "{{ tools[0].path }} {{ messages[0].tool_calls[0].function.arguments.source }}"
    )
    call = {"function": {"name": "f", "arguments": {"source": "there", "path": "x"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert template.render_turns(messages, tools=[{"path": "here"}]).text == "here there"

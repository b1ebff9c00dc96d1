"""Samples of a data set: what is taken, left out and counted."""

from collections.abc import Callable

import pytest

from solotune.data import SampleSet
from solotune.tokenizers import CHATML, Tokenizer

Load = Callable[..., SampleSet]
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML)


def test_max_rows_takes_the_first_rows(load_rows: Load, tokenizer: Tokenizer) -> None:
    samples = load_rows(tokenizer, *({"text": f"row {k}"} for k in range(9)), max_rows=4)
    assert (len(samples), samples.report.rows) == (4, 4)


def test_a_message_that_the_template_drops_is_counted(
    load_rows: Load, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    template = (
        "{% set messages = messages[1:] if messages[0].role == 'system' else messages %}" + CHATML
    )
    messages = [{"role": "system", "content": "secret"}, USER, ASSISTANT]
    samples = load_rows(make_tokenizer(template), {"messages": messages})
    assert any(
        "1 messages whose text the chat template does not show" in x for x in samples.lines()
    )


def test_a_row_keeps_its_side_of_the_split_when_the_template_changes(
    load_rows: Load, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    rows = [{"prompt": "q", "completion": str(k)} for k in range(9)]
    today, tomorrow = (make_tokenizer(date + CHATML) for date in ("1 May ", "2 May "))
    hashes = [load_rows(each, *rows).rows_N.tolist() for each in (today, tomorrow)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 9


def test_bos_stands_once_and_eos_once(
    load_rows: Load, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    """Field case 7: BOS by the post-processor and by the template."""
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, adds_bos=True)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    for text in ("hello", "hello</s>", "<s>hello</s>"):
        tokens, trained = load_rows(tokenizer, {"text": text}).sample(0)
        assert tokens.tolist() == [bos, *b"hello", eos]
        assert trained.tolist() == [0, 1, 1, 1, 1, 1, 1]
    tokens, _ = load_rows(tokenizer, {"prompt": "q", "completion": "a"}).sample(0)
    assert tokens.tolist().count(bos) == 1
    assert tokens[0] == bos
    prompt = tokenizer.encode_chat([{"role": "user", "content": "q"}])
    assert prompt == tokens[: len(prompt)].tolist()
    assert tokenizer.encode("q", add_bos=True) == [bos, *b"q"]

"""What chats begin with is encoded once, and nothing of their tokens changes by it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solotune.data import Row
from solotune.data import shared_start as module
from solotune.data.tokenizing import Rules, Tokenized, tokenize_rows
from solotune.tokenizers import CHATML, Tokenizer, auto

SYSTEM = "You answer in one word, and in no other way."
pieces = st.sampled_from([*"ab \n<|>é", "<|im_end|>", "<|im_start|>"])
texts = st.lists(pieces, min_size=1).map("".join).filter(lambda text: bool(text.strip()))


def chat(question: str, answer: str, system: str = SYSTEM) -> Row:
    return Row("row", {"prompt": question, "completion": answer, "system": system})


def both(tokenizer: Tokenizer, rows: list[Row], rules: Rules) -> tuple[Tokenized, Tokenized]:
    """The samples with as much shared as can be, and with nothing shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WORTH_CHARACTERS", 1)
        shared = tokenize_rows(tokenizer, rows, rules)
        patch.setattr(module, "_WORTH_CHARACTERS", 10**9)
        return shared, tokenize_rows(tokenizer, rows, rules)


def assert_equal(one: Tokenized, other: Tokenized) -> None:
    assert one.lengths_N.tolist() == other.lengths_N.tolist()
    assert np.array_equal(one.tokens_T, other.tokens_T)
    assert np.array_equal(one.trained_T, other.trained_T)
    assert one.report == other.report


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5), st.booleans())
def test_samples_are_the_same_whether_the_start_is_shared_or_not(
    byte_tokenizer: Tokenizer, pairs: list[tuple[str, str]], train_on_input: bool
) -> None:
    rows = [chat(question, answer) for question, answer in pairs]
    assert_equal(*both(byte_tokenizer, rows, Rules(train_on_input=train_on_input)))


@pytest.fixture(scope="session")
def byte_tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML, max_seq_len=150, merges=(("a", "b"), ("Ġ", "a"), ("Ċ", "Ċ")))


def test_the_system_message_of_all_chats_is_encoded_once(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    encode = byte_tokenizer.encode_renderings

    def spy(renderings):
        encoded.extend(rendering.text for rendering in renderings)
        return encode(renderings)

    monkeypatch.setattr(byte_tokenizer, "encode_renderings", spy)
    tokenize_rows(byte_tokenizer, [chat(f"{k}?", "Yes.") for k in range(9)], Rules())
    assert sum(SYSTEM in text for text in encoded) == 1
    encoded.clear()
    rows = [chat(f"{k}?", "Yes.", system=f"{k} {SYSTEM}") for k in range(9)]
    tokenize_rows(byte_tokenizer, rows, Rules())
    assert sum(SYSTEM in text for text in encoded) == 9


def test_nothing_is_shared_where_a_token_takes_white_space_along(
    write_tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    """Phi-3's control tokens take the white space behind them along."""
    folder = write_tokenizer(tmp_path / "plain", template=CHATML)
    assert auto(folder).splits_at_controls
    for number, change in enumerate(
        ({"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True})
    ):
        folder = write_tokenizer(tmp_path / str(number), template=CHATML)
        content = json.loads((folder / "tokenizer.json").read_text())
        for token in content["added_tokens"]:
            token |= change
        if "normalized" in change:
            content["normalizer"] = {"type": "NFC"}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = auto(folder)
        assert not tokenizer.splits_at_controls
        rows = [chat(f" {k}\n", "Yes.") for k in range(3)]
        assert_equal(*both(tokenizer, rows, Rules()))


def test_a_published_tokenizer_gives_the_same_with_a_shared_start(smollm2_dir: Path) -> None:
    tokenizer = auto(smollm2_dir)
    assert tokenizer.splits_at_controls
    rows = [chat(f"  What is {k}?\n", f"\n{k}, naïve 中文 🙂 ") for k in range(20)]
    shared, alone = both(tokenizer, rows, Rules())
    assert_equal(shared, alone)
    assert shared.trained_T.any()

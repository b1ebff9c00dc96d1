"""The first sample as it will be trained: readable, short, and true to its masks."""

from collections.abc import Callable

import numpy as np
import pytest

from solotune.data import SampleSet
from solotune.data.preview import sample_lines
from solotune.tokenizers import CHATML, Tokenizer

Load = Callable[..., SampleSet]
LF = r"\n"


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML)


def test_the_first_sample_is_printed_with_its_trained_text(
    load_rows: Load, tokenizer: Tokenizer
) -> None:
    rows = [{"prompt": f"say {word}", "completion": word} for word in ("héllo\n", "bye")]
    lines = load_rows(tokenizer, *rows).lines()
    start = lines.index("dataset: the first sample:")
    assert lines[start + 1 :] == [
        f'dataset:   context: "<|im_start|>user{LF}say héllo{LF}<|im_end|>{LF}'
        f'<|im_start|>assistant{LF}"',
        f'dataset:   trained: "héllo{LF}<|im_end|>"',
        f'dataset:   context: "{LF}"',
    ]


def test_a_row_without_a_target_is_not_the_one_that_is_shown(
    load_rows: Load, tokenizer: Tokenizer
) -> None:
    lines = load_rows(tokenizer, {"text": ""}, {"text": "good"}).lines()
    assert lines[-1] == 'dataset:   trained: "good</s>"'


def test_long_texts_and_many_turns_are_shortened_and_counted(tokenizer: Tokenizer) -> None:
    tokens = np.frombuffer(b"a" * 5000 + b"b" * 5000, np.uint8).astype(np.int32)
    (line,) = sample_lines(tokenizer, tokens, np.ones(10_000, np.uint8))
    assert line == f'  trained: "{"a" * 60}" ... 9,910 tokens ... "{"b" * 30}"'
    lines = sample_lines(tokenizer, tokens, np.arange(10_000) % 2)
    assert lines[3:6] == ['  trained: "a"', "  ... 9992 more ...", '  context: "b"']
    assert len(lines) == 9


def test_what_a_terminal_would_obey_is_escaped(tokenizer: Tokenizer) -> None:
    text = "\x1b[2J \u202e \\ \t ü 😀"
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    (line,) = sample_lines(tokenizer, tokens, np.zeros(len(tokens), np.uint8))
    assert line == r'  context: "\x1b[2J \u202e \\ \t ü 😀"'

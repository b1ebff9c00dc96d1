"""A text of any length costs what its first tokens cost, and they are those of the whole text."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from solotune import data, tokenizers
from solotune.data import SampleSet
from solotune.data.long_texts import CHARS_A_TOKEN, encode_beginnings
from solotune.tokenizers import CHATML, Rendering, Tokenizer

Load = Callable[..., SampleSet]
WORDS = "the quick brown fox <|im_end|> jümps\n over  ,  1234567 😀 lazy日本語 dogs".split(" ")


def text_of(size: int, seed: int) -> str:
    draw = random.Random(seed)
    words = (draw.choice(WORDS) + draw.choice([" ", " ", "", "\n"]) for _ in range(size // 4))
    return "".join(words)[:size]


@pytest.mark.parametrize("seed", range(4))
def test_the_first_tokens_of_a_real_tokenizer_are_those_of_the_whole(
    smollm2_dir: Path, seed: int
) -> None:
    tokenizer = tokenizers.auto(smollm2_dir)
    text = text_of(400_000, seed)
    rendering = Rendering(text, plain=tokenizer.spelled_controls(text))
    (whole,) = tokenizer.encode_renderings([rendering])
    for max_tokens in (1, 100, 700):
        (part,) = encode_beginnings(tokenizer, [rendering], max_tokens=max_tokens)
        assert max_tokens < len(part.ids) < len(whole.ids)
        assert part.ids[:max_tokens] == whole.ids[:max_tokens]
        spans = [(0, 5), (100, 200), (1000, len(text))]
        wanted, found = whole.mask(spans)[:max_tokens], part.mask(spans)[:max_tokens]
        assert np.array_equal(wanted, found)


def test_a_text_of_few_tokens_is_encoded_to_its_end(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    """Tokens of sixty characters."""
    long = "<|" + "x" * 56 + "|>"
    tokenizer = make_tokenizer(CHATML, specials=("<s>", "</s>", "<|im_start|>", "<|im_end|>", long))
    rendering = Rendering(long * 900 + "end")
    (encoded,) = encode_beginnings(tokenizer, [rendering], max_tokens=900)
    assert len(encoded.ids) == 903


def test_a_row_of_megabytes_takes_no_more_time_than_its_beginning(
    tmp_path: Path, make_tokenizer: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(CHATML, max_seq_len=64)
    given: list[int] = []
    real = tokenizer.encode_renderings

    def counted(renderings: list[Rendering]) -> list:
        given.extend(len(rendering.text) for rendering in renderings)
        return real(renderings)

    monkeypatch.setattr(tokenizer, "encode_renderings", counted)
    path = tmp_path / "a.jsonl"
    for row in ({"text": "a word " * 500_000}, {"prompt": "q", "completion": "a word " * 500_000}):
        path.write_text(json.dumps(row) + "\n")
        samples = data.dataset(tokenizer, source=str(path))
        assert samples.report.rows_cut == 1
        assert len(samples.sample(0)[0]) == 64
    assert max(given) <= 130 * CHARS_A_TOKEN

"""The data set of docstrings."""

from pathlib import Path

from solotune import data, tokenizers


def test_docstrings_give_thousands_of_different_rows_in_two_disjoint_splits(
    tiny_tokenizer_dir: Path,
) -> None:
    tokenizer = tokenizers.auto(tiny_tokenizer_dir)
    train = data.pydoc_dataset(tokenizer)
    validation = data.pydoc_dataset(tokenizer, split="validation")
    together = data.pydoc_dataset(tokenizer, split="all")
    assert len(train) > 3000
    assert 0.03 < len(validation) / len(together) < 0.07
    assert len(train) + len(validation) == len(together)

    def answers(samples: data.SampleSet) -> set[bytes]:
        pairs = (samples.sample(k) for k in range(len(samples)))
        return {tokens[trained == 1].tobytes() for tokens, trained in pairs}

    assert len(answers(train)) == len(train)
    assert not answers(train) & answers(validation)
    assert data.pydoc_dataset(tokenizer).fingerprint() == train.fingerprint()

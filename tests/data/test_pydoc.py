"""The data set of docstrings."""

import logging
import textwrap
from pathlib import Path

import pytest

from solotune import data, tokenizers
from solotune.data.pydoc import _rows


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


def test_what_other_packages_change_in_the_standard_library_changes_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = list(_rows("all"))

    def added(self: object) -> None:
        """A method that transformers, for one, adds to the class of loggers."""

    monkeypatch.setattr(logging.Logger, "added", added, raising=False)
    monkeypatch.setattr(textwrap, "added", added, raising=False)
    monkeypatch.setattr(textwrap, "__all__", [*textwrap.__all__, "added"])
    assert list(_rows("all")) == before

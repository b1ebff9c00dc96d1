"""Fixtures for all tests: a tiny tokenizer folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))

from tiny_tokenizer import write_tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json (260 tokens) and a ChatML template."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))

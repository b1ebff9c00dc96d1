"""Short ways to make a tokenizer with a chat template and to load rows with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solotune import data, tokenizers
from solotune.data import SampleSet
from solotune.tokenizers import Tokenizer

SPECIALS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
)


@pytest.fixture(scope="session")
def make_tokenizer(
    write_tokenizer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Tokenizer]:
    """Builds a tokenizer with the special tokens of all test templates."""

    def make(
        template: str | list | None = None, *, max_seq_len: int = 2048, **options: Any
    ) -> Tokenizer:
        kwargs = options.pop("chat_template_kwargs", None)
        options = {"specials": SPECIALS, "template": template, **options}
        folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), **options)
        return tokenizers.auto(folder, max_seq_len=max_seq_len, chat_template_kwargs=kwargs)

    return make


@pytest.fixture
def load_rows(tmp_path: Path) -> Callable[..., SampleSet]:
    """Writes rows as jsonl and loads them: `load_rows(tokenizer, *rows, **dataset_arguments)`."""

    def load(tokenizer: Tokenizer, *rows: dict[str, Any], **arguments: Any) -> SampleSet:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return data.dataset(tokenizer, source=str(path), **arguments)

    return load


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes a file and returns its path: `write("a.csv", content)`."""

    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return write

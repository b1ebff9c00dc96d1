"""Every key of a data set is on a docs page."""

import inspect
from pathlib import Path

import pytest

from solotune import data

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("builder", [data.dataset, data.mixed])
def test_every_key_is_documented(builder) -> None:
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("data.md", "packing.md"))
    keys = [name for name in inspect.signature(builder).parameters if name != "tokenizer"]
    assert [name for name in keys if f"`{name}`" not in text and f"{name}:" not in text] == []

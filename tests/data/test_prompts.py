"""Prompts: the rows of a training file, without the answers."""

import json
from collections.abc import Callable

import pytest

from solotune.data import read_prompts
from solotune.errors import DataError

Write = Callable[[str, bytes], str]
USER = {"role": "user", "content": "q"}


def test_prompts_keep_their_system_message(write: Write) -> None:
    rows = [{"prompt": "q", "system": "s"}, {"prompt": "q"}, {"messages": [USER], "system": "s"}]
    system = {"role": "system", "content": "s"}
    asked = [prompt.asked for prompt in read_prompts(write("a.json", json.dumps(rows).encode()))]
    assert asked == [[system, USER], "q", [system, USER]]
    bad = write("b.jsonl", b'{"prompt": "q", "system": 3}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: column system holds the number 3"):
        read_prompts(bad)

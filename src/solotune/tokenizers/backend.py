"""The tokenizer that encodes: the `tokenizers` library, with special tokens spelled anew.

A special token is spelled with noncharacters, so that a text which spells it as published matches
nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from solotune.errors import CheckpointError


def build(content: dict[str, Any], guards: Mapping[str, str], file: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json whose special tokens are spelled as `guards` says.

    It has no post-processor: nothing is added to a text, and offsets keep the white space that
    opens a token. Raises CheckpointError where the content, made from `file`, cannot be used.
    """
    model = dict(content["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            guards.get(text, text): token_id for text, token_id in model["vocab"].items()
        }
    else:  # Unigram: [text, score] pairs
        model["vocab"] = [[guards.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = guards.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": guards.get(token["content"], token["content"])}
        for token in content["added_tokens"]
    ]
    respelled = content | {"model": model, "added_tokens": added, "post_processor": None}
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(respelled))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be used: {error}; fetch the file again") from None
    built.no_truncation()
    built.no_padding()
    for token in content["added_tokens"]:
        token_id = built.token_to_id(guards.get(token["content"], token["content"]))
        if token_id != token["id"]:
            raise CheckpointError(
                f"{file}: the token {token['content']!r} gets the id {token_id} and not "
                f"{token['id']}, as ids are missing before it: fetch the file again"
            )
    return built


def first_ids(content: Mapping[str, Any]) -> list[int]:
    """The ids that the post-processor of a tokenizer.json puts before a text."""
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder"))
    empty = nothing | {
        "version": "1.0",
        "added_tokens": [],
        "post_processor": content.get("post_processor"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(empty)).encode("").ids

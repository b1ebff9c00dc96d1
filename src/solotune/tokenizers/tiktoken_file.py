"""tiktoken ranks (Llama 3's `tokenizer.model`, `qwen.tiktoken`) as the content of a tokenizer.json.

A line is a token's bytes in base64, a space and its rank. The file names neither the special tokens
nor the regular expression that splits a text: both are known by the number of ranks.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solotune.errors import CheckpointError
from solotune.tokenizers.byte_level import added_token, byte_level_definition

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Layout:
    """What the makers of a ranks file published beside it; `specials` follow the ranks."""

    pattern: str
    specials: tuple[str, ...]
    bos: str | None
    eos: str
    normalizer: str | None = None


def _llama3() -> Layout:
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(256))
    specials = tuple(named.get(number) or next(reserved) for number in range(256))
    return Layout(_WORDS % "{1,3}", specials, bos=specials[0], eos=specials[1])


def _qwen() -> Layout:
    extra = (f"<|extra_{number}|>" for number in range(205))
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra)
    return Layout(_WORDS % "", specials, bos=None, eos=specials[0], normalizer="NFC")


_LAYOUTS = {128_000: _llama3(), 151_643: _qwen()}  # by the number of ranks


def tiktoken_definition(
    path: Path, declared: Mapping[int, Mapping[str, Any]]
) -> tuple[dict[str, Any], Layout]:
    """The content of a tokenizer.json for a ranks file, and its published layout.

    `declared` are the added tokens that the folder's JSON files name, by id: they come first.
    Raises CheckpointError for a damaged file, and for one whose layout is not known.
    """
    ranked = _read_ranks(path)
    layout = _LAYOUTS.get(len(ranked))
    if layout is None:
        raise CheckpointError(
            f"{path} holds {len(ranked):,} tiktoken ranks, which belong to no known tokenizer "
            f"(Llama 3 has 128,000, Qwen 151,643): put the model's tokenizer.json beside it"
        )
    published = {
        token_id: added_token(token_id, content)
        for token_id, content in enumerate(layout.specials, len(ranked))
    }
    names = {token["content"] for token in declared.values()}
    kept = {i: token for i, token in published.items() if token["content"] not in names}
    added = [token for _, token in sorted({**kept, **declared}.items())]
    content = byte_level_definition(
        ranked, pattern=layout.pattern, added=added, normalizer=layout.normalizer, bos=layout.bos
    )
    return content, layout


def _read_ranks(path: Path) -> list[bytes]:
    ranked: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            token, rank = line.split()
            ranked.append(base64.b64decode(token, validate=True))
            if int(rank) != number:
                raise ValueError
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path}, line {number + 1}: not a token in base64 and the rank {number}: fetch "
                "the file again"
            ) from None
    return ranked

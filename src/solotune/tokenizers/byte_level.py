"""Byte-level BPE: ranked byte strings as the content of a tokenizer.json.

A merge of two neighbours has the rank of what they become together. All splits of a token into two
known ones are listed as its merges; only one of them is ever used, as what happens inside a token
while it is put together does not depend on the text around it.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a file, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTES = dict(enumerate(_byte_alphabet()))  # for str.translate of a Latin-1 text


def byte_level_definition(
    ranked: Sequence[bytes],
    *,
    pattern: str,
    added: Sequence[Mapping[str, Any]],
    first_id: int = 0,
    normalizer: str | None = None,
    bos: str | None = None,
) -> dict[str, Any]:
    """The content of a tokenizer.json for byte strings in the order of their ranks.

    The id of a string is its rank plus `first_id`. Text is split by the regular expression
    `pattern` first; `added` are the entries of `added_tokens`; `bos` is put before every text.
    """
    texts = [token.decode("latin-1").translate(BYTES) for token in ranked]
    known = set(texts)
    merges = [
        [text[:cut], text[cut:]]
        for text in texts
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    vocab = {text: token_id for token_id, text in enumerate(texts, first_id)}
    vocab |= {token["content"]: token["id"] for token in added if token["id"] < first_id}
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    bytes_to_chars = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_to_chars]},
        "post_processor": bos_first(bos, added),
        "decoder": {**bytes_to_chars, "use_regex": True},
        "model": bpe_model(vocab, merges, ignore_merges=True),
    }


def bpe_model(vocab: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """The `model` of a tokenizer.json; `options` replace the defaults."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": dict(vocab),
        "merges": merges,
    }


def bos_first(bos: str | None, added: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `post_processor` of a tokenizer.json that puts `bos` before a text."""
    if bos is None:
        return None
    ids = [token["id"] for token in added if token["content"] == bos]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text_a, text_b = ({"Sequence": {"id": name, "type_id": k}} for k, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text_a],
        "pair": [first, text_a, {"SpecialToken": {"id": bos, "type_id": 1}}, text_b],
        "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
    }


def added_token(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`: a special token unless `flags` say otherwise."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
        **flags,
    }

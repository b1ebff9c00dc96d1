"""A sentencepiece `tokenizer.model` (Llama 2, Mistral) as the content of a tokenizer.json.

The file is a protocol buffer: `ModelProto` of sentencepiece_model.proto in google/sentencepiece.
Of its four kinds of model BPE is read, without normalisation: the score of a piece is the priority
of the merges that make it.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from solotune.errors import CheckpointError
from solotune.tokenizers.byte_level import added_token, bos_first, bpe_model

SPACE = "\u2581"  # stands for a space in pieces
Prefix = Literal["each", "first", "never"]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BPE = 2


@dataclass(frozen=True)
class SentencePieceModel:
    """What a file says; `pieces` are (text, score, type), their position is the id."""

    pieces: tuple[tuple[str, float, int], ...]
    unk: str
    bos: str | None
    eos: str | None
    dummy_prefix: bool
    byte_fallback: bool


def sentencepiece_definition(
    model: SentencePieceModel, declared: Mapping[int, Mapping[str, Any]], *, prefix: Prefix
) -> dict[str, Any]:
    """The content of a tokenizer.json for a sentencepiece model.

    `declared` are the added tokens that the folder's JSON files name, by id: beyond the pieces, or
    other names for control pieces. `prefix`: a space is put before each text between control
    tokens, as sentencepiece does, or only where the whole text begins, or never.
    """
    added = {
        token_id: added_token(token_id, text)
        for token_id, (text, _, kind) in enumerate(model.pieces)
        if kind in (_CONTROL, _UNKNOWN)
    }
    added |= {
        token_id: dict(token)
        for token_id, token in declared.items()
        if token_id in added or token_id >= len(model.pieces)
    }
    vocab = {
        added.get(token_id, {"content": text})["content"]: token_id
        for token_id, (text, _, _) in enumerate(model.pieces)
    }
    words = sorted((text for text, _, kind in model.pieces if kind == _USER_DEFINED), key=len)
    if not model.dummy_prefix:
        prefix = "never"
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replace]
    pre_tokenizers = []
    if prefix == "first":
        pre_tokenizers = [
            {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
        ]
    if words:  # found before all merges, the longest first
        pre_tokenizers.append(
            {
                "type": "Split",
                "pattern": {"Regex": "|".join(map(re.escape, reversed(words)))},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix != "never":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bos = model.bos if model.bos in vocab else None
    tokens = [token for _, token in sorted(added.items())]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": {"type": "Sequence", "normalizers": normalizers[prefix != "each" :]},
        "pre_tokenizer": (
            {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None
        ),
        "post_processor": bos_first(bos, tokens),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(
            vocab,
            _merges(model),
            unk_token=added[vocab[model.unk]]["content"] if model.unk in vocab else None,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(words),  # how a split-off word gets its id
        ),
    }


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """What the file says. Raises CheckpointError where a tokenizer.json cannot say the same."""
    try:
        model = list(_fields(path.read_bytes()))
        pieces = tuple(_piece(dict(_fields(value))) for number, value in model if number == 1)
        trainer, normalizer = (
            dict(_fields(next((value for number, value in model if number == wanted), b"")))
            for wanted in (2, 3)
        )
    except (IndexError, KeyError, TypeError, ValueError, struct.error):
        pieces, trainer, normalizer = (), {}, {}
    if not pieces:
        raise CheckpointError(f"{path} is no sentencepiece model: fetch the file again")
    kinds = {kind for _, _, kind in pieces}
    reasons = {
        "it is not a BPE model": trainer.get(3, 1) != _BPE,
        "it normalises texts": bool(normalizer.get(2)),
        "it removes white space": bool(normalizer.get(4, 1)),
        "it does not mark white space": not normalizer.get(5, 1),
        "white space ends its words": bool(trainer.get(24, 0)),
        "some of its pieces are not used": _UNUSED in kinds,
        "some of its pieces have one score": _has_ties(pieces),
        "some of its pieces hold a character that is none": _has_gaps(pieces),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise CheckpointError(
            f"{path} cannot be read exactly ({reason}): let transformers write a tokenizer.json, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    text = {number: trainer[number].decode() for number in (45, 46, 47) if number in trainer}
    return SentencePieceModel(
        pieces=pieces,
        unk=text.get(45, "<unk>"),
        bos=text.get(46, "<s>"),
        eos=text.get(47, "</s>"),
        dummy_prefix=bool(normalizer.get(3, 1)),
        byte_fallback=_BYTE in kinds,
    )


def _merges(model: SentencePieceModel) -> list[list[str]]:
    """Pairs of pieces in the order in which they are merged: by the score of what they make.

    Pieces of one score are runs of one character (white space), where sentencepiece merges the
    leftmost pair first: a run grows from its left end, which is the longest piece first.
    """
    scores = {text: score for text, score, kind in model.pieces if kind == _NORMAL}
    return [
        [text[:cut], text[cut:]]
        for text in sorted(scores, key=lambda text: (-scores[text], -len(text)))
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]


def _has_ties(pieces: tuple[tuple[str, float, int], ...]) -> bool:
    """Whether merges of one score could meet, other than in runs of one character."""
    by_score: dict[float, list[str]] = {}
    for text, score, kind in pieces:
        if kind == _NORMAL and len(text) > 1:
            by_score.setdefault(score, []).append(text)
    return any(len(texts) > 1 and len(set("".join(texts))) > 1 for texts in by_score.values())


def _has_gaps(pieces: tuple[tuple[str, float, int], ...]) -> bool:
    """Whether a character of a piece could not be merged, as it is no piece itself."""
    normal = [text for text, _, kind in pieces if kind == _NORMAL]
    return not set("".join(normal)) <= set(normal)


def _piece(fields: Mapping[int, Any]) -> tuple[str, float, int]:
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return fields[1].decode(), score, fields.get(3, _NORMAL)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The (number, value) pairs of a protocol buffer message: int, or bytes as they are."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire_type) or (varint() if wire_type == 2 else -1)
        if size < 0 or position + size > len(data):
            raise ValueError
        yield number, data[position : position + size]
        position += size

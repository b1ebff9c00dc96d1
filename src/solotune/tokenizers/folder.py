"""What a folder says about its tokenizer, whichever of the usual files says it.

All kinds become the content of one tokenizer.json, so that special tokens, masks and batches are
handled in one way.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solotune.errors import CheckpointError, UserError
from solotune.tokenizers.byte_level import added_token
from solotune.tokenizers.sentencepiece_file import read_sentencepiece, sentencepiece_definition
from solotune.tokenizers.tekken import BOS, EOS, tekken_definition
from solotune.tokenizers.tiktoken_file import tiktoken_definition

# The first that is there is read; a folder may hold several, made from one another.
KINDS = ("tokenizer.json", "tekken.json", "tokenizer.model", "qwen.tiktoken")
# What nobody writes into a template but as a token; [INST] is text in Llama 2's.
CONTROL = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|<(?:start|end)_of_turn>|</?s>|<[be]os>"
)
_REPAIR = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"


@dataclass(frozen=True)
class Definition:
    """`content` is that of a tokenizer.json, made from `file`; BOS and EOS as published with it."""

    file: Path
    content: dict[str, Any]
    bos: str | None = None
    eos: str | None = None

    @property
    def is_converted(self) -> bool:
        return self.file.name != "tokenizer.json"

    def specials(self) -> dict[str, int]:
        """The special tokens, text to id: those that say so, and those that look like it."""
        return {
            token["content"]: token["id"]
            for token in self.content["added_tokens"]
            if token["special"] or CONTROL.fullmatch(token["content"])
        }

    def ids(self) -> Iterator[int]:
        """The ids of all tokens."""
        vocab = self.content["model"]["vocab"]
        yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        yield from (token["id"] for token in self.content["added_tokens"])

    def with_added(self, texts: Sequence[str]) -> "Definition":
        """The definition with `texts` as special tokens; those it has not get the next ids."""
        tokens = {token["content"]: token for token in self.content["added_tokens"]}
        vocab = self.content["model"]["vocab"]
        known = vocab if isinstance(vocab, dict) else {p[0]: i for i, p in enumerate(vocab)}
        known = known | {text: token["id"] for text, token in tokens.items()}
        next_id = 1 + max(self.ids())
        for text in dict.fromkeys(texts):
            token_id = known.get(text, next_id)
            next_id = max(next_id, token_id + 1)
            tokens[text] = added_token(token_id, text)
        ordered = sorted(tokens.values(), key=lambda token: token["id"])
        content = _numbered(self.content | {"added_tokens": ordered})
        return Definition(self.file, content, self.bos, self.eos)


def read_definition(file: Path, config: Mapping[str, Any]) -> Definition:
    """The definition in `file`, read by what it holds; `config` is its tokenizer_config.json.

    Raises CheckpointError for a file that is damaged, or of a kind that cannot be read exactly.
    """
    if file.suffix == ".json":
        content = read_json(file)
        if "vocab" in content and "config" in content:
            return Definition(file, tekken_definition(file, content), BOS, EOS)
        if not isinstance(content.get("model"), dict) or "vocab" not in content["model"]:
            raise CheckpointError(f"{file} cannot be used: no vocabulary; fetch the file again")
        return Definition(file, {"added_tokens": [], **content})
    declared = _declared_tokens(file.parent, config)
    if _is_text(file):
        content, layout = tiktoken_definition(file, declared)
        return Definition(file, _numbered(content), layout.bos, layout.eos)
    model = read_sentencepiece(file)
    prefix = "each" if config.get("legacy") is not False else "first"
    if config.get("add_prefix_space") is False:
        prefix = "never"
    content = sentencepiece_definition(model, declared, prefix=prefix)
    return Definition(file, _numbered(content), model.bos, model.eos)


def tokenizer_file(folder: Path) -> Path:
    """The file in `folder` to read. Raises CheckpointError with the repair where there is none."""
    for name in KINDS:
        if (folder / name).is_file():
            return folder / name
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        raise CheckpointError(
            f"{folder} holds vocab.json and merges.txt, which do not say how a text is split: let "
            f"transformers write a tokenizer.json, {_REPAIR}"
        )
    raise CheckpointError(
        f"{folder} holds no tokenizer ({', '.join(KINDS)}): set checkpoint_dir or tokenizer.path "
        "to a folder that does"
    )


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    text = read_text(path)
    if text.startswith("version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer: fetch the file itself (git lfs pull)")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): fetch the file again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: fetch the file again")
    return content


def _numbered(content: dict[str, Any]) -> dict[str, Any]:
    """The same with added tokens in the vocabulary where ids are missing before them.

    The library counts added tokens on from the size of the vocabulary, whatever their ids.
    """
    vocab = content["model"]["vocab"]
    if not isinstance(vocab, dict):
        return content
    outside = {t["content"]: t["id"] for t in content["added_tokens"] if t["content"] not in vocab}
    if list(outside.values()) == list(range(len(vocab), len(vocab) + len(outside))):
        return content
    return content | {"model": content["model"] | {"vocab": vocab | outside}}


def _declared_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The added tokens that tokenizer_config.json or added_tokens.json name, by id."""
    decoder = config.get("added_tokens_decoder") or {}
    simple = read_json(folder / "added_tokens.json")
    try:
        declared = {token_id: added_token(token_id, text) for text, token_id in simple.items()}
        for token_id, token in decoder.items():
            flags = {
                key: token[key]
                for key in ("single_word", "lstrip", "rstrip", "special")
                if key in token
            }
            declared[int(token_id)] = added_token(int(token_id), token["content"], **flags)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{folder}: the added tokens in tokenizer_config.json or added_tokens.json are not "
            "texts with their ids: fetch the files again"
        ) from None
    return declared


def _is_text(file: Path) -> bool:
    """Whether a file holds lines of base64, rather than a protocol buffer."""
    start = file.read_bytes()[:64]
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a Git LFS pointer: fetch the file itself (git lfs pull)")
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", start) is not None

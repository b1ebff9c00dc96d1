"""The name of an entry in the cache: a hash of everything that decides the tokens."""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from solotune.data.tokenizing import Rules
from solotune.tokenizers import Tokenizer

_PACKAGES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pyarrow", "datasets")
_NOT_OF_TOKENIZERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
_LARGEST_TOKENIZER = 128 << 20  # bytes of one file


def cache_key(
    tokenizer: Tokenizer, rules: Rules, *, data: Sequence[Any], max_rows: int | None
) -> str:
    """The name of an entry: 32 hexadecimal digits of a hash of all that decides the tokens.

    `data` says which rows there are, as `file_identity` does for a file.
    """
    template = tokenizer.template
    parts: dict[str, Any] = {
        "data": data,
        "rows": max_rows,
        "rules": asdict(rules),
        "tokenizer": [
            type(tokenizer).__qualname__,
            tokenizer.made_with,
            *_tokenizer_files(tokenizer.folder),
        ],
        "template": template and [template.source, template.variables],
        "version": _version(),
    }
    if template is not None and "strftime_now" in template.source:
        parts["day"] = date.today().isoformat()
    return json_hash(parts)


def file_identity(path: Path) -> list[str]:
    """The name of a file and a hash of its content, at about 1 GB/s: its date may lie."""
    return [str(path), file_hash(path).hexdigest()]


def _tokenizer_files(folder: Path) -> list[list[Any]]:
    """The files of a model folder but weights: which a tokenizer reads is its own affair.

    Those that are too large for one stand with size and date.
    """
    found: list[list[Any]] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in _NOT_OF_TOKENIZERS:
            stat = path.stat()
            small = stat.st_size <= _LARGEST_TOKENIZER
            found.append(
                file_identity(path) if small else [str(path), stat.st_size, stat.st_mtime_ns]
            )
    return found


@cache
def _version() -> list[str]:
    """What turns rows into tokens: our source, whatever version it is called, and libraries."""
    digest = hashlib.blake2b()
    for package in ("solotune.data", "solotune.tokenizers"):
        for file in sorted(files(package).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                digest.update(file.read_bytes())
    python = platform.python_version()  # knows the white space and letters of one Unicode version
    return [digest.hexdigest(), python, *(_installed(name) for name in _PACKAGES)]


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def json_hash(value: Any) -> str:
    """32 hexadecimal digits of a value that JSON or `str` can write."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def file_hash(path: Path) -> hashlib.blake2b:
    """The hash of a file's content, read in blocks."""
    with path.open("rb") as file:
        digest: Any = hashlib.file_digest(file, hashlib.blake2b)
    return digest

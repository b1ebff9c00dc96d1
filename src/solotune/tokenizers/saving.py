"""A tokenizer's folder written anew: transformers opens it with the ids that were trained."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solotune.tokenizers.folder import read_json

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
# What a class of one model would build by, beside tokenizer.json.
_OF_CLASSES = ("legacy", "add_prefix_space", "sp_model_kwargs", "auto_map")


def write_folder(
    folder: Path,
    *,
    source: Path,
    content: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
    template: str | None,
) -> None:
    """Copy the tokenizer files of the folder `source` to `folder`, and write what they do not say.

    `content` is that of a new tokenizer.json; `settings`, for a tokenizer.json that is all there is
    to read, go to tokenizer_config.json where it has no such key; `template` is a chosen one.
    """
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    path = folder / "tokenizer_config.json"
    old = read_json(path)
    config = dict(old)
    if content is not None:
        (folder / "tokenizer.json").write_text(
            json.dumps(content, ensure_ascii=False), encoding="utf-8"
        )
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"] = {
                str(token["id"]): {key: token[key] for key in token if key != "id"}
                for token in content["added_tokens"]
            }
        if (folder / "added_tokens.json").is_file():
            added = {token["content"]: token["id"] for token in content["added_tokens"]}
            _write_json(folder / "added_tokens.json", added)
    if settings is not None:
        kept = {key: value for key, value in config.items() if key not in _OF_CLASSES}
        config = {**settings, **kept, "tokenizer_class": "PreTrainedTokenizerFast"}
        config["clean_up_tokenization_spaces"] = False
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
        config.pop("chat_template", None)  # two templates in one folder would contradict
    if config != old:
        _write_json(path, config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

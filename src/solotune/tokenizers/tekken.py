"""Mistral's tekken.json as the content of a tokenizer.json.

Special tokens have the first ids, `vocab` follows up to `default_vocab_size`; the file holds more
ranks than that.
"""

import base64
from pathlib import Path
from typing import Any

from solotune.errors import CheckpointError
from solotune.tokenizers.byte_level import added_token, byte_level_definition

# Files of versions up to v7 do not list them.
_SPECIALS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
BOS, EOS = "<s>", "</s>"


def tekken_definition(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json for a parsed tekken.json; raises CheckpointError."""
    try:
        config = content["config"]
        num_specials = config["default_num_special_tokens"]
        listed = content.get("special_tokens")
        names = (
            dict(enumerate(_SPECIALS))
            if listed is None
            else {token["rank"]: token["token_str"] for token in listed}
        )
        added = [
            added_token(token_id, names.get(token_id, f"<SPECIAL_{token_id}>"))
            for token_id in range(num_specials)
        ]
        vocab = content["vocab"][: config["default_vocab_size"] - num_specials]
        ranked = [base64.b64decode(token["token_bytes"]) for token in vocab]
        if [token["rank"] for token in vocab] != list(range(len(vocab))):
            raise ValueError("ranks are not in order")
        return byte_level_definition(
            ranked, pattern=config["pattern"], added=added, first_id=num_specials, bos=BOS
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no tekken.json ({type(error).__name__}: {error}): fetch the file again"
        ) from None

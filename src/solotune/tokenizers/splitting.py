"""Whether a text may be encoded in pieces."""

import json
from collections.abc import Mapping
from typing import Any


def splits_at_controls(content: Mapping[str, Any]) -> bool:
    """Whether what stands on one side of a special token is encoded as if the other were not there.

    `content` is that of a tokenizer.json. The library looks for special tokens first and encodes
    what lies between by itself; but a token may take the white space around it along, be looked for
    in a text that is normalized as a whole, or a space be put before the first piece alone.
    """
    kept_apart = all(
        not (token["lstrip"] or token["rstrip"] or token["single_word"])
        and (not token["normalized"] or content.get("normalizer") is None)
        for token in content["added_tokens"]
        if token["special"]
    )
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return kept_apart and '"prepend_scheme": "first"' not in steps

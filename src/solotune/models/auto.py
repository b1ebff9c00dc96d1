"""Build the model that a Hugging Face folder describes, from its config.json alone."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solotune.errors import CheckpointError
from solotune.models import llama
from solotune.models.decoder import Decoder

# model_type -> (builder, the fields its file knows)
_FAMILIES: dict[str, tuple[Callable[[dict[str, Any]], Decoder], frozenset[str]]] = {
    "llama": (llama.llama, llama.KNOWN_FIELDS),
}

_log = logging.getLogger(__name__)


def read_config(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a model folder; raises CheckpointError if there is none."""
    path = Path(checkpoint_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: checkpoint_dir must be a Hugging Face model folder"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(f"checkpoint_dir={checkpoint_dir} is a file, not a folder") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, not a JSON object")
    return config


def check_same_model(model: Decoder, checkpoint_dir: str | Path) -> None:
    """Raise CheckpointError where a named builder is not the model of the folder.

    Shapes alone do not tell: Llama 3 and 3.1 differ in their rotary angles only.
    """
    config = read_config(checkpoint_dir)
    if config == model.config or config.get("model_type") != model.config.get("model_type"):
        return  # another model_type: `auto` names it, and loading compares names and shapes
    theirs, ours = llama.described(config), llama.described(model.config)
    for field in dict.fromkeys([*ours, *theirs]):
        if ours.get(field) != theirs.get(field):
            raise CheckpointError(
                f"model: {field} is {ours.get(field)!r} and in {checkpoint_dir}/config.json "
                f"{theirs.get(field)!r}: name that model's builder, or use solotune.models.auto"
            )


def auto(checkpoint_dir: str | Path) -> Decoder:
    """Return the decoder for a folder's config.json, unfilled.

    Raises CheckpointError for an unsupported model_type (the supported ones are listed), a missing
    field, or a field that would change the result and is not supported. A field that is not known
    at all is named in a log line: it is kept in the saved config.json and has no effect here.
    """
    config = read_config(checkpoint_dir)
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"{checkpoint_dir}/config.json: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    build, known = _FAMILIES[model_type]
    if unknown := sorted(set(config) - known):
        _log.warning("config.json: no effect here: %s", ", ".join(unknown))
    try:
        return build(config)
    except KeyError as missing:
        raise CheckpointError(f"{checkpoint_dir}/config.json lacks the field {missing}") from None

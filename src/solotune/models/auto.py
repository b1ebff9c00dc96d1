"""Build the model that a Hugging Face folder describes, from its config.json alone."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from solotune.errors import CheckpointError
from solotune.models import (
    gemma2,
    gemma3,
    llama,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from solotune.models.decoder import Decoder
from solotune.models.fields import Fields
from solotune.models.settings import Settings


class Family(NamedTuple):
    """How a model_type is built, what the forward pass takes from its config, what it may hold."""

    build: Callable[[dict[str, Any]], Decoder]
    settings: Callable[[dict[str, Any]], Settings]
    fields: Fields
    architecture: str  # the class of transformers that its folders name


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.llama, llama.settings, llama.FIELDS, "LlamaForCausalLM"),
    "mistral": Family(
        mistral.mistral, mistral.mistral_settings, mistral.MISTRAL_FIELDS, "MistralForCausalLM"
    ),
    "ministral": Family(
        mistral.ministral,
        mistral.ministral_settings,
        mistral.MINISTRAL_FIELDS,
        "MinistralForCausalLM",
    ),
    "ministral3": Family(
        mistral.ministral3,
        mistral.ministral3_settings,
        mistral.MINISTRAL3_FIELDS,
        "Ministral3ForCausalLM",
    ),
    "qwen2": Family(qwen2.qwen2, qwen2.settings, qwen2.FIELDS, "Qwen2ForCausalLM"),
    "qwen3": Family(qwen3.qwen3, qwen3.settings, qwen3.FIELDS, "Qwen3ForCausalLM"),
    "gemma2": Family(gemma2.gemma2, gemma2.settings, gemma2.FIELDS, "Gemma2ForCausalLM"),
    "gemma3_text": Family(gemma3.gemma3, gemma3.settings, gemma3.FIELDS, "Gemma3ForCausalLM"),
    "phi3": Family(phi3.phi3, phi3.settings, phi3.FIELDS, "Phi3ForCausalLM"),
    "smollm3": Family(smollm3.smollm3, smollm3.settings, smollm3.FIELDS, "SmolLM3ForCausalLM"),
    "olmo2": Family(olmo2.olmo2, olmo2.settings, olmo2.FIELDS, "Olmo2ForCausalLM"),
    "olmo3": Family(olmo3.olmo3, olmo3.settings, olmo3.FIELDS, "Olmo3ForCausalLM"),
}
# What a multimodal folder's text tower is, where its text_config does not say.
_TEXT_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# What stands beside text_config and is meant for the text tower too.
_INHERITED = (
    "bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version "
    "quantization_config tie_word_embeddings"
).split()

_log = logging.getLogger(__name__)


def read_config(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a model folder; raises CheckpointError if there is none.

    Of a multimodal folder, which holds a `text_config`, it is the text tower's: what is trained
    and saved is a model for text.
    """
    path = Path(checkpoint_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (path.parent / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{checkpoint_dir} holds an adapter, not a model: `tune merge` makes it one; to "
                "train the adapter on, name its base as checkpoint_dir and it as adapter.source"
            ) from None
        raise CheckpointError(
            f"{path} does not exist: checkpoint_dir must be a Hugging Face model folder"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(f"checkpoint_dir={checkpoint_dir} is a file, not a folder") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, not a JSON object")
    return _text_config(config) if isinstance(config.get("text_config"), dict) else config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text tower's config as a folder of its own would hold it."""
    text = dict(config["text_config"])
    outer_type = config.get("model_type")
    model_type = text.setdefault("model_type", _TEXT_TYPES.get(str(outer_type), outer_type))
    if family := FAMILIES.get(model_type):
        text["architectures"] = [family.architecture]
    for field in _INHERITED:
        if text.get(field) is None and config.get(field) is not None:
            text[field] = config[field]
    return text


def check_same_model(model: Decoder, checkpoint_dir: str | Path) -> None:
    """Raise CheckpointError where a named builder is not the model of the folder.

    Shapes alone do not tell: Llama 3 and 3.1 differ in their rotary angles only.
    """
    config = read_config(checkpoint_dir)
    family = FAMILIES.get(str(config.get("model_type")))
    if config == model.config or config.get("model_type") != model.config.get("model_type"):
        return  # another model_type: `auto` names it, and loading compares names and shapes
    if family is None:
        return
    theirs, ours = described(family.settings(config)), described(family.settings(model.config))
    for field in dict.fromkeys([*ours, *theirs]):
        if field == "vocab_size":
            continue  # shapes tell, and a model may have got more tokens than the folder has
        if ours.get(field) != theirs.get(field):
            raise CheckpointError(
                f"model: {field} is {ours.get(field)!r} and in {checkpoint_dir}/config.json "
                f"{theirs.get(field)!r}: name that model's builder, or use solotune.models.auto"
            )


def described(settings: Settings) -> dict[str, Any]:
    """Return the settings in one level, the rotary bases' under their own names."""
    values = asdict(settings)
    for number, rope in enumerate(values.pop("ropes")):
        values |= {field if number == 0 else f"{field}_{number}": v for field, v in rope.items()}
    return values


def auto(checkpoint_dir: str | Path) -> Decoder:
    """Return the decoder for a folder's config.json, unfilled; of a multimodal one, its text tower.

    Raises CheckpointError for an unsupported model_type (the supported ones are listed), a missing
    field, or a field that would change the result and is not supported. A field that is not known
    at all is named in a log line: it is kept in the saved config.json and has no effect here.
    """
    config = read_config(checkpoint_dir)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{checkpoint_dir}/config.json: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    if unknown := sorted(set(config) - family.fields.known):
        _log.warning("config.json: no effect here: %s", ", ".join(unknown))
    try:
        return family.build(config)
    except KeyError as missing:
        raise CheckpointError(f"{checkpoint_dir}/config.json lacks the field {missing}") from None

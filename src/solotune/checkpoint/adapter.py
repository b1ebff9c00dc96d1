"""An adapter into a model from PEFT's format, and out of one; the base weights are not touched."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from solotune.adapters import (
    Addition,
    LoRA,
    adapt_layer,
    adaptable_layers,
    adapted_layers,
    adapter_parameters,
    inject,
)
from solotune.checkpoint.adapter_config import FILE, HEAD, written_config
from solotune.checkpoint.folders import model_folder
from solotune.checkpoint.safetensors_file import SourceTensor, write_file
from solotune.checkpoint.save import write_json
from solotune.checkpoint.stored_adapter import (
    FINGERPRINT,
    PREFIX,
    WEIGHTS,
    StoredAdapter,
    check_base_layer,
    check_fit,
    finite,
    read_adapter,
)
from solotune.errors import CheckpointError, ConfigError
from solotune.models.decoder import Decoder
from solotune.models.embedding import Embedding

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MULTIMODAL = "model.language_model."  # where a multimodal model has its text tower's layers


def adapter_settings(adapter: LoRA) -> LoRA:
    """Return the settings that the adapter of a run really has.

    With `source`, rank, alpha, layers and kind are those of the adapter there. Raises ConfigError
    where a setting says otherwise: it would have no effect.
    """
    if adapter.source is None:
        return adapter
    stored = read_adapter(model_folder(adapter.source, key="adapter.source"))
    found, defaults = stored.settings(like=adapter), LoRA()
    for key in ("rank", "alpha", "dora", "rslora", "targets", "layers_to_transform"):
        asked, there = getattr(adapter, key), getattr(found, key)
        if asked not in (getattr(defaults, key), there):
            raise ConfigError(
                f"adapter.{key}={asked} has no effect beside adapter.source, whose adapter has "
                f"{_short(there)}: leave it out"
            )
    return found


def add_adapter(model: Decoder, adapter: LoRA) -> LoRA:
    """Freeze the model and inject the adapter, on meta; return the settings that it really has."""
    found = adapter_settings(adapter)
    if adapter.source is None:
        inject(model, adapter)
        return found
    stored = read_adapter(model_folder(adapter.source, key="adapter.source"))
    if found.dora and found.dropout and HEAD in stored.layers:
        raise ConfigError(
            "adapter.dropout with DoRA cannot adapt lm_head, which the adapter in adapter.source "
            "does: set adapter.dropout=0"
        )
    inject_stored(model, stored, dtype=DTYPES[adapter.dtype], dropout=adapter.dropout)
    return found


def inject_stored(
    model: Decoder, adapter: StoredAdapter, *, dtype: torch.dtype, dropout: float = 0.0
) -> list[str]:
    """Freeze the model and add to its layers, on meta, what the stored adapter has; return them.

    As `solotune.adapters.inject`, but each layer has its own rank and scaling.
    """
    check_fit(adapter, model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in adapter.layers:
        addition = Addition(
            rank=adapter.rank(name),
            scaling=adapter.scaling(name),
            dropout=dropout,
            dora=adapter.config.dora,
            dtype=dtype,
        )
        adapt_layer(model, name, addition)
    return list(adapter.layers)


@torch.no_grad()
def load_adapter(model: Decoder, adapter: StoredAdapter) -> None:
    """Fill the adapter parameters of an injected model, whose base weights are loaded.

    Raises CheckpointError where the folder's adapter is another one than the model's.
    """
    check_fit(adapter, model)
    wanted = adapter_parameters(model)
    stored = {
        f"{layer}.{part}": tensor
        for layer, parts in adapter.layers.items()
        for part, tensor in parts.items()
    }
    if differing := sorted(wanted.keys() ^ stored.keys()):
        raise CheckpointError(
            f"{adapter.folder}: {differing[0]} is only in "
            f"{'this run' if differing[0] in wanted else 'the folder'}: set adapter as it was"
        )
    for name, layer in adapted_layers(model).items():
        if not math.isclose(layer.scaling, adapter.scaling(name)):
            raise CheckpointError(
                f"{adapter.folder}: {name} was scaled by {adapter.scaling(name):g} and is by "
                f"{layer.scaling:g} in this run: set adapter.alpha and adapter.rslora as they were"
            )
    for name, parameter in wanted.items():
        if tuple(parameter.shape) != stored[name].shape:
            raise CheckpointError(
                f"{adapter.folder}: {name} has the shape {list(stored[name].shape)} and in this "
                f"run {list(parameter.shape)}: set adapter as it was"
            )
        numbers = finite(stored[name]).to(model.device, parameter.dtype)
        if parameter.is_meta:
            filled = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, filled)  # whoever holds the parameter keeps it
        else:
            parameter.copy_(numbers)
    for name, tensor in adapter.base_layers.items():
        weight = model.embed_tokens.weight if name != HEAD else model.output_weight
        check_base_layer(adapter, name, tensor, weight)


def adapter_sources(model: Decoder, *, multimodal: bool) -> list[SourceTensor]:
    """Return what to write of an adapted model: the adapter's parameters alone, as they are held.

    `multimodal`: the base folder has a vision tower, and transformers other names for the layers.
    """
    return [
        SourceTensor(
            f"{PREFIX}{_hf_name(name, multimodal)}",
            parameter.dtype,
            tuple(parameter.shape),
            lambda parameter=parameter: parameter,
        )
        for name, parameter in adapter_parameters(model).items()
    ]


def write_adapter(
    folder: Path,
    model: Decoder,
    sources: Sequence[SourceTensor],
    *,
    lora: LoRA,
    base: str,
    base_fingerprint: str,
    multimodal: bool,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors of `sources`; raises OSError.

    `base` is what the file calls the base model.
    """
    write_file(folder / WEIGHTS, sources, metadata={FINGERPRINT: base_fingerprint})
    layers = {}
    for name, layer in adapted_layers(model).items():
        down = layer.lora_embedding_A if isinstance(layer, Embedding) else layer.lora_A.weight
        layers[_hf_name(name, multimodal)] = (down.size(0), layer.scaling)
    config = written_config(
        layers,
        # The vision tower has layers of the same short names, which this model does not know.
        candidates=() if multimodal else [_hf_name(n, False) for n in adaptable_layers(model)],
        base=base,
        lora=lora,
    )
    write_json(folder / FILE, config)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_multimodal(folder: Path) -> bool:
    """Whether a model folder has more than a text tower."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return isinstance(config.get("text_config"), dict)


def _hf_name(name: str, multimodal: bool) -> str:
    if name.partition(".")[0] == HEAD:
        return name
    return f"{MULTIMODAL if multimodal else 'model.'}{name}"

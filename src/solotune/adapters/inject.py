"""Put an adapter into a built model, whatever its family.

The order of a run: build on meta, quantise where asked for, inject, load the base weights, then
initialise the adapter or load one.
"""

import hashlib
import math
import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from solotune.adapters.lora import ALL_LINEAR, LoRA
from solotune.adapters.lora_layers import (
    Addition,
    LoRAEmbedding,
    LoRALinear,
    adapted_class,
)
from solotune.config.suggest import suggest
from solotune.errors import ConfigError
from solotune.models.decoder import Decoder
from solotune.models.embedding import Embedding
from solotune.models.linear import Linear

AdaptedLayer = LoRALinear | LoRAEmbedding
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_BLOCK = re.compile(r"layers\.(\d+)\.")


def inject(model: Decoder, adapter: LoRA) -> list[str]:
    """Freeze the model and add the adapter on meta to its target layers; return their names.

    Base parameters keep their names; the adapter's are PEFT's after the model's prefix. Raises
    ConfigError where a target fits no layer, or the rank is above a layer's width.
    """
    names = target_names(model, adapter)
    if adapter.dora and adapter.dropout and "lm_head" in names:
        raise ConfigError(
            "adapter.dropout with adapter.dora cannot adapt lm_head: leave it out of "
            "adapter.targets, or set one of the two off"
        )
    layers = adaptable_layers(model)
    width, narrowest = min((min(_widths(layers[name])), name) for name in names)
    if adapter.rank > width:
        raise ConfigError(
            f"adapter.rank={adapter.rank} exceeds the width {width} of {narrowest}: use at most "
            f"{width}, or leave {narrowest.rpartition('.')[2]} out of adapter.targets"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    addition = Addition(
        rank=adapter.rank,
        scaling=adapter.scaling,
        dropout=adapter.dropout,
        dora=adapter.dora,
        dtype=_DTYPES[adapter.dtype],
    )
    for name in names:
        adapt_layer(model, name, addition)
    return names


def adapt_layer(model: Decoder, name: str, addition: Addition) -> None:
    """Add an adapter on meta to one layer, whose own weights stay."""
    if name == "lm_head" and model.lm_head is None:
        model.add_tied_output()
    layer = model.get_submodule(name)
    layer.__class__ = adapted_class(type(layer))
    assert isinstance(layer, AdaptedLayer)
    layer.add_adapter(name, addition)


def initialize(model: Decoder, seed: int) -> None:
    """Give the adapter memory on the model's device, and its first values: it changes nothing yet.

    As PEFT has them, A uniform and B zero; of the embedding A zero and B normal. The numbers depend
    on the seed and the parameter's name alone. The base weights must be loaded: DoRA measures them.
    """
    for name, parameter in adapter_parameters(model).items():
        numbers = torch.zeros(parameter.shape)
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(parameter.size(1))  # kaiming_uniform with a = sqrt(5)
            numbers.uniform_(-bound, bound, generator=_generator(seed, name))
        elif name.endswith("lora_embedding_B"):
            numbers.normal_(generator=_generator(seed, name))
        filled = nn.Parameter(numbers.to(model.device, parameter.dtype))
        torch.utils.swap_tensors(parameter, filled)  # whoever holds the parameter keeps it
    for layer in adapted_layers(model).values():
        layer.reset_magnitude()


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def merged_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight of an adapted layer with the adapter in it, new and in fp32."""
    assert isinstance(layer, AdaptedLayer)
    return layer.merged_weight()


def adapter_lines(model: nn.Module, adapter: LoRA, *, of: int) -> list[str]:
    """Return the fact to print about an adapter over a base of `of` parameters."""
    layers = adapted_layers(model)
    short = Counter(name.rpartition(".")[2] for name in layers)
    where = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in short.items())
    trained = sum(p.numel() for p in adapter_parameters(model).values())
    kind = f"{'DoRA' if adapter.dora else 'rsLoRA' if adapter.rslora else 'LoRA'}"
    return [
        f"{kind} of rank {adapter.rank}: {trained:,} parameters are trained, "
        f"{trained / of:.2%} of the base's {of:,}; on {where}"
    ]


def check_no_new_tokens(tokenizer: Any) -> None:
    """Raise ConfigError where a tokenizer has tokens that the model has no rows for.

    An adapter cannot train rows, and its folder cannot hold them.
    """
    if tokenizer.new_ids:
        raise ConfigError(
            "tokenizer.added_tokens: an adapter cannot train rows for new tokens: train them first "
            "(full_finetune_single_device with trainable='embed_tokens|lm_head'), and name the "
            "final/ of that run as checkpoint_dir"
        )


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers that have an adapter, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, AdaptedLayer)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by name, as PEFT's files have it after the model's prefix."""
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an adapter's."""
    return ".lora_" in name


def adaptable_layers(model: Decoder) -> dict[str, Linear | Embedding]:
    """Return every layer that can have an adapter, by name; `lm_head` also where it is tied."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, Linear | Embedding)}
    return found if "lm_head" in found else found | {"lm_head": model.embed_tokens}


def target_names(model: Decoder, adapter: LoRA) -> list[str]:
    """Return the names of the layers that the adapter is for, in the model's order.

    Raises ConfigError where a target, or a number of a block, fits none.
    """
    names = list(adaptable_layers(model))
    wanted = adapter.layers_to_transform
    blocks = {wanted} if isinstance(wanted, int) else None if wanted is None else set(wanted)
    for number in sorted(blocks or ()):
        if not 0 <= number < len(model.blocks):
            raise ConfigError(
                f"adapter.layers_to_transform: there is no block {number}: use numbers from 0 to "
                f"{len(model.blocks) - 1}"
            )
    targets = adapter.targets if isinstance(adapter.targets, list) else [adapter.targets]
    is_pattern = isinstance(adapter.targets, str) and adapter.targets != ALL_LINEAR
    chosen: set[str] = set()
    for target in targets:
        fits = [n for n in names if _fits(model, n, target, is_pattern) and _is_in(n, blocks)]
        if not fits:
            raise ConfigError(_no_layer(target, names, is_pattern=is_pattern))
        chosen.update(fits)
    return [name for name in names if name in chosen]


def _fits(model: Decoder, name: str, target: str, is_pattern: bool) -> bool:
    if target == ALL_LINEAR:
        return _BLOCK.match(name) is not None
    full = model.to_hf_key(f"{name}.weight").removesuffix(".weight")
    if is_pattern:
        try:
            return any(re.fullmatch(target, each) for each in (name, full))
        except re.error as error:
            raise ConfigError(
                f"adapter.targets={target}: no regular expression ({error})"
            ) from None
    return target == full or f".{name}".endswith(f".{target}")


def _is_in(name: str, blocks: set[int] | None) -> bool:
    match = _BLOCK.match(name)
    return blocks is None or match is None or int(match[1]) in blocks


def _no_layer(target: str, names: list[str], *, is_pattern: bool) -> str:
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    what = f"adapter.targets: {target} fits no linear layer"
    if target in short:
        if is_pattern:
            return f"{what}: a text is a pattern of whole names: use adapter.targets=[{target}]"
        return f"{what} of the blocks that adapter.layers_to_transform leaves"
    return f"{what}{suggest(target, short) or '; there are ' + ', '.join(short)}"


def _widths(layer: Linear | Embedding) -> tuple[int, int]:
    if isinstance(layer, Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return layer.in_features, layer.out_features

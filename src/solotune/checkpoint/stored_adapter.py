"""An adapter folder in PEFT's format, read but for its numbers and checked against a model.

The tensors of a layer are `base_model.model.<its name in transformers>.` and, for a linear layer,
`lora_A.weight` (R, I), `lora_B.weight` (O, R); for the embedding `lora_embedding_A` (R, V),
`lora_embedding_B` (D, R); with DoRA `lora_magnitude_vector` (O,) or (D,).

Shapes: I in, O out, R rank, V vocabulary, D width.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from solotune.adapters import LoRA, adaptable_layers
from solotune.checkpoint.adapter_config import (
    HEAD,
    AdapterConfig,
    is_adapter_folder,
    read_adapter_config,
)
from solotune.checkpoint.base_model import FOUR_BIT, find_base, fingerprint
from solotune.checkpoint.bin_file import read_bin
from solotune.checkpoint.safetensors_file import StoredTensor, read_header, read_metadata
from solotune.checkpoint.stored import TEXT_TOWER
from solotune.errors import CheckpointError
from solotune.models.decoder import Decoder
from solotune.models.embedding import Embedding
from solotune.models.linear import Linear
from solotune.tokenizers.folder import KINDS

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "base_fingerprint"  # of the base model, among the texts of the weights file
_BASE_LAYER = "base_layer.weight"
_KEY = re.compile(
    rf"{re.escape(PREFIX)}(?P<layer>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|"
    rf"lora_embedding_A|lora_embedding_B|lora_magnitude_vector|{re.escape(_BASE_LAYER)})"
    r"(?:(?<=lora_magnitude_vector)\.weight)?"
)


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter folder that was read but for its numbers.

    `layers` are its tensors by our name of the layer (`layers.0.self_attn.q_proj`, `lm_head`) and
    the end of their own (`lora_A.weight`); `base_layers` are copies of frozen weights, which PEFT
    stores beside an adapted embedding or head.
    """

    config: AdapterConfig
    layers: Mapping[str, Mapping[str, StoredTensor]]
    names: Mapping[str, str]  # of the layers, in transformers
    base_layers: Mapping[str, StoredTensor]
    trained_on: str | None  # fingerprint of the base's weights

    @property
    def folder(self) -> Path:
        return self.config.folder

    def rank(self, layer: str) -> int:
        return self.config.rank_of(self.names[layer])

    def scaling(self, layer: str) -> float:
        return self.config.scaling(self.names[layer])

    def settings(self, *, like: LoRA) -> LoRA:
        """Return its settings as a run has them; dtype and dropout are those of `like`."""
        return LoRA(
            rank=self.config.rank,
            alpha=self.config.alpha,
            targets=list(self.layers),
            dropout=like.dropout,
            dora=self.config.dora,
            rslora=self.config.rslora,
            dtype=like.dtype,
            source=like.source,
        )

    def base_folder(self, base_dir: str | Path | None = None) -> Path:
        """Return the folder of the base model that it names, or `base_dir`.

        Raises CheckpointError where that is not found, or was not trained over.
        """
        folder = find_base(self.config.base, self.folder, base_dir=base_dir)
        check_base(self, folder)
        return folder

    def tokenizer_folder(self, base: Path) -> Path:
        """Return its own folder where that holds a tokenizer, else `base`."""
        return self.folder if has_tokenizer(self.folder) else base


def open_adapter(folder: Path) -> StoredAdapter | None:
    """Return the adapter in a folder, None where it holds a model instead."""
    return read_adapter(folder) if is_adapter_folder(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a file of tokens, of any kind that is read."""
    return any((folder / name).is_file() for name in KINDS)


def read_adapter(folder: Path) -> StoredAdapter:
    """Return the adapter in a folder; raises CheckpointError where its files are damaged."""
    config = read_adapter_config(folder)
    path = folder / WEIGHTS
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        path = folder / "adapter_model.bin"
        stored, metadata = read_bin(path), {}
    else:
        stored, metadata = read_header(path), read_metadata(path)
    layers: dict[str, dict[str, StoredTensor]] = {}
    names: dict[str, str] = {}
    base_layers: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        match = _KEY.fullmatch(key)
        layer = _our_name(match["layer"]) if match else ""
        is_base_layer = match is not None and match["part"] == _BASE_LAYER
        if match is None or (is_base_layer and layer not in (HEAD, "embed_tokens")):
            raise CheckpointError(
                f"{path} holds {key}, which is no part of a LoRA adapter of a linear layer or an "
                "embedding: only those are supported"
            )
        if is_base_layer:
            base_layers[layer] = tensor
        else:
            names[layer] = match["layer"]
            layers.setdefault(layer, {})[match["part"]] = tensor
    if not layers:
        raise CheckpointError(f"{path} holds no adapter: copy it again")
    return StoredAdapter(config, layers, names, base_layers, metadata.get(FINGERPRINT))


def check_fit(adapter: StoredAdapter, model: Decoder) -> None:
    """Raise CheckpointError unless the adapter's tensors are those that `model` and config ask for.

    The model may be on meta, and adapted already.
    """
    config, path = adapter.config, adapter.folder / WEIGHTS
    adaptable = adaptable_layers(model)
    if unknown := [name for name in adapter.layers if name not in adaptable]:
        raise CheckpointError(
            f"{path} adapts {adapter.names[unknown[0]]}, which the base model does not have: it "
            f"is an adapter of another model{_named(config.base)}"
        )
    prefix = _prefix(adapter.names)
    for name in adaptable:
        full = adapter.names.get(name) or (name if name == HEAD else prefix + name)
        if config.adapts(full) != (name in adapter.layers):
            fault = "lacks" if name not in adapter.layers else "holds"
            raise CheckpointError(
                f"{path} {fault} the tensors of {full}, which adapter_config.json "
                f"{'names' if fault == 'lacks' else 'does not name'} in target_modules: the two do "
                "not belong together"
            )
    for name, parts in adapter.layers.items():
        wanted = _wanted(adaptable[name], name, rank=adapter.rank(name), dora=config.dora)
        for part in [*wanted, *parts]:
            full = f"{adapter.names[name]}.{part}"
            if part not in parts:
                raise CheckpointError(f"{path} lacks {full}: the file is damaged, copy it again")
            if part not in wanted:
                why = "use_dora is false" if "magnitude" in part else "its layer is of another kind"
                raise CheckpointError(f"{path} holds {full}, though {why}: copy it again")
            tensor = parts[part]
            if tensor.shape != wanted[part]:
                raise CheckpointError(
                    f"{path}: {full} has the shape {list(tensor.shape)} where the base model and "
                    f"r={adapter.rank(name)} ask for {list(wanted[part])}: it is an adapter of "
                    f"another model{_named(config.base)}, or adapter_config.json was edited"
                )
            if not tensor.dtype.is_floating_point:
                raise CheckpointError(f"{path}: {full} is stored as {tensor.dtype}, not as floats")


def check_base(
    adapter: StoredAdapter, folder: Path, *, found: str | None = None, exact: bool = False
) -> None:
    """Raise CheckpointError where the adapter was trained on other weights than those in `folder`.

    `found` is the folder's fingerprint, if it is known. An adapter without one cannot be compared,
    and unless `exact` one that was trained on a folder in 4 bits goes with the original.
    """
    if adapter.trained_on is None:
        return
    found = found or fingerprint(folder)
    kinds = [text.startswith(FOUR_BIT) for text in (found, adapter.trained_on)]
    if found == adapter.trained_on or (kinds[0] != kinds[1] and not exact):
        return
    raise CheckpointError(
        f"{adapter.folder} was trained on other weights than those in {folder}: name the model "
        f"that it was trained on ({adapter.config.base})"
    )


def check_base_layer(
    adapter: StoredAdapter, name: str, stored: StoredTensor, weight: Tensor | StoredTensor
) -> None:
    """Raise CheckpointError unless a weight that PEFT stored with the adapter is the base's own."""
    equal = stored.shape == tuple(weight.shape)
    start = 0
    for piece in stored.pieces(2**24) if equal else ():
        theirs = piece.read()
        stop = start + len(theirs)
        ours = (
            weight.rows(start, stop).read()
            if isinstance(weight, StoredTensor)
            else (weight.detach()[start:stop].cpu())
        )
        narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
        equal = equal and torch.equal(ours.to(narrow), theirs.to(narrow))
        start = stop
    if not equal:
        raise CheckpointError(
            f"{adapter.folder / WEIGHTS} holds a {name} that differs from the base model's: it was "
            "resized or trained beside the adapter, which is not supported; merge it with peft"
        )


def _wanted(
    layer: Linear | Embedding, name: str, *, rank: int, dora: bool
) -> dict[str, tuple[int, ...]]:
    if isinstance(layer, Embedding) and name != HEAD:
        vocab_size, width = layer.num_embeddings, layer.embedding_dim
        shapes = {"lora_embedding_A": (rank, vocab_size), "lora_embedding_B": (width, rank)}
        return shapes | ({"lora_magnitude_vector": (width,)} if dora else {})
    if isinstance(layer, Embedding):  # a tied head, not yet adapted
        out_features, in_features = layer.num_embeddings, layer.embedding_dim
    else:
        out_features, in_features = layer.out_features, layer.in_features
    shapes = {"lora_A.weight": (rank, in_features), "lora_B.weight": (out_features, rank)}
    return shapes | ({"lora_magnitude_vector": (out_features,)} if dora else {})


def finite(tensor: StoredTensor) -> Tensor:
    """Return a tensor's numbers; raises CheckpointError where one is NaN or infinite."""
    numbers = tensor.read()
    if not bool(numbers.isfinite().all()):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} holds numbers that are not finite: the adapter is "
            "broken, use an earlier one"
        )
    return numbers


def _our_name(name: str) -> str:
    """Return the name of a layer without what transformers puts before it."""
    return (
        TEXT_TOWER.sub("", name, count=1)
        if TEXT_TOWER.match(name)
        else (name.removeprefix("model."))
    )


def _prefix(names: Mapping[str, str]) -> str:
    """Return what stands before the layers' names in the file."""
    return next((full.removesuffix(name) for name, full in names.items() if name != HEAD), "model.")


def _named(base: str | None) -> str:
    return f" ({base})" if base else ""

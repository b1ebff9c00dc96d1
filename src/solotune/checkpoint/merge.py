"""An adapter merged into its base model: a model folder of its own, written piece by piece.

Every tensor goes through host memory some rows at a time, in fp32 where the adapter changes it, and
lands in a file of the same name, in the dtype that the base has on disk. So the peak is the adapter
and a few pieces, whatever the model.

Shapes: I in, O out, R rank, V vocabulary, D width.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from solotune.checkpoint.adapter_config import HEAD
from solotune.checkpoint.base_model import is_base
from solotune.checkpoint.folders import model_folder, new_folder
from solotune.checkpoint.load import WEIGHT_DTYPES
from solotune.checkpoint.safetensors_file import SourceTensor, StoredTensor, write_file
from solotune.checkpoint.save import read_json, with_terminators, write_json
from solotune.checkpoint.stored import OUTPUT_KEY, stored_weights, text_tower
from solotune.checkpoint.stored_adapter import (
    StoredAdapter,
    check_base,
    check_base_layer,
    check_fit,
    finite,
    has_tokenizer,
    read_adapter,
)
from solotune.errors import CheckpointError
from solotune.models.auto import auto
from solotune.models.decoder import Decoder
from solotune.tokenizers.folder import KINDS

PIECE_BYTES = 4 * 2**20  # of a tensor in fp32
SMALL_FILES_BYTES = 32 * 2**20
_TEXTS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_OF_TOKENIZER = (
    *KINDS,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json"),
)
GIB = 2**30


@dataclass(frozen=True)
class MergeReport:
    """What was merged, and what a person should know of it."""

    out: Path
    num_layers: int  # adapted
    num_tensors: int
    num_bytes: int
    notes: list[str]

    def lines(self) -> list[str]:
        """Return the facts to print."""
        size = f"{self.num_bytes / GIB:.2f} GiB"
        return [
            f"{self.num_layers} adapted layers merged; {self.num_tensors} tensors, {size}",
            *(f"note: {note}" for note in self.notes),
        ]


def merge(base: str | Path, adapter: str | Path, out: str | Path) -> MergeReport:
    """Write to the folder `out` the model in `base` with the adapter in its weights.

    Raises CheckpointError, with nothing written, where the two do not belong together.
    """
    base, out = model_folder(base, key="BASE"), Path(out)
    stored = read_adapter(model_folder(adapter, key="ADAPTER"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not empty: name a new folder")
    with torch.device("meta"):
        model = auto(base)
    plan = _Plan(base, stored, model)
    num_bytes = sum(source.num_bytes for shard in plan.shards.values() for source in shard)
    check_space(out.parent, num_bytes + SMALL_FILES_BYTES)
    weight_map = {}
    with new_folder(out) as folder:
        for name, shard in plan.shards.items():
            write_file(folder / name, shard)
            weight_map |= {source.name: name for source in shard}
        if len(plan.shards) > 1:
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            write_json(folder / "model.safetensors.index.json", index)
        _copy_small_files(base, stored.folder, folder)
        _write_configs(base, stored.folder, folder, unties=plan.unties)
    return MergeReport(out, len(stored.layers), len(weight_map), num_bytes, plan.notes)


class _Plan:
    """The files to write, by name, and how each of their tensors is made; nothing is read yet."""

    def __init__(self, base: Path, adapter: StoredAdapter, model: Decoder) -> None:
        stored = stored_weights(base)
        _check_unquantised(base, stored)
        check_fit(adapter, model)
        check_base(adapter, base)
        self.notes = []
        named = adapter.config.base
        if named is not None and not is_base(named, base):
            self.notes.append(f"the adapter names {named} as its base, and was merged into {base}")
        if adapter.trained_on is None:
            self.notes.append(
                "the adapter does not tell which weights it was trained on; its names and shapes "
                "fit these"
            )
        by_key, _ = text_tower(stored)
        key_of = {tensor.name: key for key, tensor in by_key.items()}
        layers = {model.to_hf_key(f"{layer}.weight"): layer for layer in adapter.layers}
        embedding_key = model.to_hf_key("embed_tokens.weight")
        if missing := [key for key in {embedding_key, *layers} - {OUTPUT_KEY} if key not in by_key]:
            raise CheckpointError(f"{base} lacks {missing[0]}: its weights are incomplete")
        embedding = by_key[embedding_key]
        for layer, tensor in adapter.base_layers.items():
            weight = by_key.get(OUTPUT_KEY, embedding) if layer == HEAD else embedding
            check_base_layer(adapter, layer, tensor, weight)

        def source(name: str, tensor: StoredTensor, key: str | None) -> SourceTensor:
            layer = layers.get(key or "")
            pieces = partial(merged_pieces, adapter, layer) if layer else copied_pieces
            return SourceTensor(name, tensor.dtype, tensor.shape, partial(pieces, tensor))

        self.shards: dict[str, list[SourceTensor]] = {}
        for name, tensor in stored.items():
            shard = self.shards.setdefault(_file_name(tensor.path), [])
            shard.append(source(name, tensor, key_of.get(name)))
        self.unties = model.tied and bool(layers.keys() & {OUTPUT_KEY, embedding_key})
        if self.unties:
            if OUTPUT_KEY not in by_key:
                shard = self.shards[_file_name(embedding.path)]
                shard.append(source(OUTPUT_KEY, embedding, OUTPUT_KEY))
            self.notes.append(
                "embedding and output weight are no longer one: both are stored, and "
                "tie_word_embeddings is false in config.json"
            )


def copied_pieces(weight: StoredTensor) -> Iterator[Tensor]:
    """Yield a tensor some rows at a time, as it is."""
    return (piece.read() for piece in weight.pieces(PIECE_BYTES))


def merged_pieces(adapter: StoredAdapter, layer: str, weight: StoredTensor) -> Iterator[Tensor]:
    """Yield some rows at a time of a weight with the adapter in it, in fp32."""
    parts = {part: finite(tensor).float() for part, tensor in adapter.layers[layer].items()}
    scaling = adapter.scaling(layer)
    magnitude = parts.get("lora_magnitude_vector")
    is_embedding = "lora_embedding_A" in parts
    if is_embedding:
        up_VR, down_RD = parts["lora_embedding_A"].T, parts["lora_embedding_B"].T
    else:
        up_VR, down_RD = parts["lora_B.weight"], parts["lora_A.weight"]

    def sums() -> Iterator[Tensor]:
        start = 0
        narrow_bytes = PIECE_BYTES * weight.dtype.itemsize // 4
        for piece in weight.pieces(narrow_bytes):
            rows = piece.read().float()
            up = up_VR[start : start + len(rows)]
            start += len(rows)
            yield rows.addmm_(up, down_RD, alpha=scaling)

    scale_D: Tensor | None = None
    if magnitude is not None and is_embedding:  # its columns have the trained lengths
        square_D = torch.zeros(weight.shape[1], dtype=torch.float64)
        for piece in sums():
            square_D += piece.double().square_().sum(0)
        scale_D = magnitude / square_D.sqrt_().float()
    start = 0
    for rows in sums():
        stop = start + len(rows)
        if scale_D is not None:
            rows.mul_(scale_D)
        elif magnitude is not None:
            length = torch.linalg.vector_norm(rows, dim=1)
            rows.mul_((magnitude[start:stop] / length).unsqueeze(1))
        start = stop
        if not bool(rows.to(weight.dtype).isfinite().all()):
            raise CheckpointError(
                f"{weight.name} with the adapter in it does not fit in {weight.dtype}: the adapter "
                "is broken, or the base should be merged in another dtype"
            )
        yield rows


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError where the disk of `folder` has less room."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"the merged model needs {num_bytes / GIB:.2f} GiB and {folder} has "
            f"{free / GIB:.2f} GiB free: make room, or name a folder on another disk"
        )


def _check_unquantised(base: Path, stored: Mapping[str, StoredTensor]) -> None:
    narrow = [tensor for tensor in stored.values() if tensor.dtype not in WEIGHT_DTYPES]
    if narrow or read_json(base / "config.json").get("quantization_config"):
        raise CheckpointError(
            f"{base} holds quantised weights, which cannot take an adapter in: name as BASE the "
            "unquantised model that they were made from"
        )


def _file_name(path: Path) -> str:
    """Return the name of a weights file as safetensors."""
    if path.suffix != ".bin":
        return path.name
    return path.name.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def _copy_small_files(base: Path, adapter: Path, folder: Path) -> None:
    """Copy what stands beside the weights; a tokenizer beside the adapter takes the other's place.

    Only plain texts: no code goes from one folder to the next.
    """
    own_tokenizer = has_tokenizer(adapter)
    for path in sorted(base.iterdir()):
        is_text = path.suffix in _TEXTS or path.name.startswith(("LICENSE", "NOTICE"))
        replaced = path.name.endswith(".index.json") or (own_tokenizer and _is_tokenizer(path))
        if is_text and not replaced and path.is_file():
            shutil.copyfile(path, folder / path.name)
    for path in sorted(adapter.iterdir()) if own_tokenizer else ():
        if _is_tokenizer(path) and path.is_file():
            shutil.copyfile(path, folder / path.name)


def _is_tokenizer(path: Path) -> bool:
    return path.name in _OF_TOKENIZER


def _write_configs(base: Path, adapter: Path, folder: Path, *, unties: bool) -> None:
    """Write config.json and generation_config.json anew where something in them must change."""
    old = read_json(base / "config.json")
    new = dict(old)
    if unties:
        new["tie_word_embeddings"] = False
        if isinstance(new.get("text_config"), dict):
            new["text_config"] = new["text_config"] | {"tie_word_embeddings": False}
    trained = adapter / "generation_config.json"
    if trained.is_file():  # it ends at the terminators that were trained
        generation = read_json(trained)
        write_json(folder / trained.name, generation)
        ids = generation.get("eos_token_id")
        new = with_terminators(new, ids if isinstance(ids, list) else [] if ids is None else [ids])
    if new != old:
        write_json(folder / "config.json", new)

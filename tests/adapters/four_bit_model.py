"""Tiny Llama models with 4-bit blocks; norms and biases are trained."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from solotune.adapters import quantize_linears
from solotune.checkpoint import load_weights, stored_four_bit
from solotune.checkpoint.load import LoadReport
from solotune.models import Decoder, auto
from solotune.training import set_dtype
from tests.models.tiny import tiny


def write_folder(folder: Path, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """Write a model folder; `fields` replace those of the config."""
    model = tiny(**fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    weights = {model.to_hf_key(name): p.detach().to(dtype) for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", to: Any = "nf4"
) -> tuple[Decoder, LoadReport]:
    """Return the folder's model with 4-bit blocks, as a recipe loads it."""
    with torch.device("meta"):
        model = auto(folder)
    set_dtype(model, dtype)
    quantize_linears(model, to, stored=stored_four_bit(folder))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point() and parameter.dim() == 1)
    return model, load_weights(model, folder, device=device)


def dense_twin(model: Decoder, folder: Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return an unquantised model that has the dequantised weights of `model`."""
    with torch.device("meta"):
        twin = auto(folder)
    load_weights(set_dtype(twin, dtype), folder, device="cpu")
    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "layout"):
                twin.get_submodule(name).weight.copy_(module.dense_weight())  # type: ignore[operator]
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return twin

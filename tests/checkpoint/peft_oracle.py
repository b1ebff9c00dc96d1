"""Adapters made by PEFT over a model folder, and what PEFT answers with them.

Shapes: B rows, S tokens, V vocabulary.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solotune.checkpoint import load_weights
from solotune.checkpoint.adapter import inject_stored, load_adapter
from solotune.checkpoint.stored_adapter import read_adapter
from solotune.models import auto
from solotune.models.decoder import Decoder

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tokens() -> Tensor:
    """Return tokens_BS that every test model knows."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (2, 24), generator=generator)


def hf_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_adapter(base: Path, folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Save an adapter of `base` with PEFT, all its numbers random, so that each one counts."""
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT has advice about tied weights and embeddings
        settings = {"r": 4, "lora_alpha": 12, "target_modules": LINEARS} | settings
        model = peft.get_peft_model(hf_model(base), peft.LoraConfig(**settings))
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.data.mul_(0.5 + noise)
            elif "lora_" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
    return folder


def peft_logits(base: Path, adapter: Path, *, merged: bool = False) -> Tensor:
    """Return what PEFT computes with an adapter folder, logits_BSV."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(hf_model(base), adapter).eval()
        if merged:
            model = model.merge_and_unload()
    with torch.no_grad():
        return model(tokens()).logits


def adapted_model(base: Path, adapter: Path) -> Decoder:
    """Return our model in fp32 with an adapter folder in it."""
    stored = read_adapter(adapter)
    with torch.device("meta"):
        model = auto(base)
    inject_stored(model, stored, dtype=torch.float32)
    load_weights(model, base, device="cpu")
    load_adapter(model, stored)
    return model.eval()


def our_logits(model: Decoder) -> Tensor:
    tokens_BS = tokens()
    positions_BS = torch.arange(tokens_BS.size(1)).expand_as(tokens_BS)
    with torch.no_grad():
        hidden = model.hidden_states(model.embed(tokens_BS), model.context(positions_BS, None))
        return model.logits(hidden)


def distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    return float((first - second).abs().max() / second.abs().max())

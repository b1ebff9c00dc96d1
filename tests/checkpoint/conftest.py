"""A two-layer Llama folder, and a model built from one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from solotune.models import auto
from solotune.models.decoder import Decoder

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 256,
    "eos_token_id": 257,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
    "x_note": 1,
}


def build(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return the folder's model on meta: matrices in `dtype`, the rest in fp32."""
    with torch.device("meta"):
        model = auto(folder)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    return model


def random_weights(folder: Path, *, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return weights under Hugging Face names for the config.json in `folder`."""
    generator = torch.Generator().manual_seed(seed)
    model = build(folder)
    return {
        model.to_hf_key(name): (0.1 * torch.randn(p.shape, generator=generator)).to(dtype)
        for name, p in model.named_parameters()
    }


@pytest.fixture
def make_folder(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., Path]:
    """Return a function that writes a model folder: config fields as keywords."""

    def make(name: str = "model", *, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_tokenizer_dir, folder)
        (folder / "config.json").write_text(json.dumps(CONFIG | fields))
        weights = random_weights(folder, dtype=dtype)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make

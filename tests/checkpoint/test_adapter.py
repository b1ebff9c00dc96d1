"""Adapters of PEFT give its logits here, and ours give the same in PEFT.

Shapes: B rows, S tokens, V vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from solotune.adapters import LoRA, adapter_parameters, initialize, inject
from solotune.checkpoint import load_weights
from solotune.checkpoint.adapter import adapter_sources, write_adapter
from solotune.checkpoint.base_model import fingerprint
from solotune.checkpoint.merge import merge
from solotune.models import auto

from .peft_oracle import (
    adapted_model,
    distance,
    hf_model,
    make_adapter,
    our_logits,
    peft_logits,
    tokens,
    transformers,
)

Make = Callable[..., Path]

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "some layers": {"layers_to_transform": [1]},
    "one layer": {"layers_to_transform": 0, "target_modules": ["q_proj"]},
    "pattern": {"target_modules": r".*\.0\..*(q|down)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.0.self_attn.v_proj": 3}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "both ends, dora": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "eva": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_gives_its_logits(
    make_folder: Make, tmp_path: Path, kind: str, tied: bool
) -> None:
    if tied and "target_modules" not in KINDS[kind]:
        pytest.skip("nothing that is tied is adapted")
    base = make_folder(dtype=torch.float32, tie_word_embeddings=tied)
    adapter = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    wanted = peft_logits(base, adapter)
    assert distance(our_logits(adapted_model(base, adapter)), wanted) < 1e-5


def weights(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def write_ours(
    base: Path, folder: Path, lora: LoRA, *, scale: float = 0.3, multimodal: bool = False
) -> Path:
    """Write an adapter with random numbers, as a run would."""
    with torch.device("meta"):
        model = auto(base)
    inject(model, lora)
    load_weights(model, base, device="cpu")
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(model).items():
        if "magnitude" not in name:
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    write_adapter(
        folder,
        model,
        adapter_sources(model, multimodal=multimodal),
        lora=lora,
        base=str(base),
        base_fingerprint=fingerprint(base),
        multimodal=multimodal,
    )
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"targets": "all-linear"},
        {"targets": ["q_proj", "v_proj"], "rslora": True},
        {"targets": "all-linear", "dora": True, "layers_to_transform": [1]},
        {"targets": ["embed_tokens", "lm_head", "q_proj"]},
        {"targets": ["embed_tokens", "down_proj"], "layers_to_transform": 0},
        {"targets": r"layers\.0\.mlp\..*|layers\.1\.self_attn\.o_proj"},
    ],
)
def test_an_adapter_of_ours_opens_in_peft(
    make_folder: Make, tmp_path: Path, settings: dict[str, Any], tied: bool
) -> None:
    base = make_folder(dtype=torch.float32, tie_word_embeddings=tied)
    adapter = write_ours(base, tmp_path / "adapter", LoRA(rank=6, alpha=9, **settings))
    ours = our_logits(adapted_model(base, adapter))
    assert distance(ours, peft_logits(base, adapter)) < 1e-5


@pytest.mark.slow
def test_smollm2_with_an_adapter_gives_the_logits_of_peft(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    lora = LoRA(rank=8, targets=["q_proj", "v_proj", "lm_head"], dora=True)
    adapter = write_ours(smollm2_dir, tmp_path / "adapter", lora, scale=0.02)
    ours = our_logits(adapted_model(smollm2_dir, adapter))
    assert distance(ours, peft_logits(smollm2_dir, adapter)) < 1e-4  # 30 layers in fp32


def test_an_adapter_of_a_text_tower_opens_over_the_multimodal_model(tmp_path: Path) -> None:
    """Gemma 3: other names in transformers, and a scaled embedding."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 260,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=sizes, vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    base = tmp_path / "base"
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(base)
    lora = LoRA(rank=4, alpha=8, targets=["all-linear", "embed_tokens"])
    adapter = write_ours(base, tmp_path / "adapter", lora, multimodal=True)
    names = load_file(adapter / "adapter_model.safetensors")
    assert all(".model.language_model." in name for name in names)
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert all("language_model" in target for target in targets), (
        "the vision tower has a q_proj too"
    )
    ours = our_logits(adapted_model(base, adapter))
    assert distance(ours, peft_logits(base, adapter)) < 1e-5
    merge(base, adapter, tmp_path / "merged")
    with torch.no_grad():
        merged = hf_model(tmp_path / "merged")(tokens()).logits
    assert distance(merged, ours) < 1e-5
    old, new = weights(base), weights(tmp_path / "merged")
    assert new.keys() - old.keys() == {"lm_head.weight"}
    assert all(torch.equal(new[n], old[n]) for n in old if "vision" in n)

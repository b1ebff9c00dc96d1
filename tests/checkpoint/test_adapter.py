"""Adapters of PEFT give its logits here, and ours give the same in PEFT.

Shapes: B rows, S tokens, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solotune.adapters import LoRA, adapter_parameters, initialize, inject
from solotune.checkpoint import load_weights
from solotune.checkpoint.adapter import adapter_sources, write_adapter
from solotune.checkpoint.base_model import fingerprint
from solotune.models import auto

from .peft_oracle import (
    adapted_model,
    distance,
    make_adapter,
    our_logits,
    peft_logits,
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


def write_ours(base: Path, folder: Path, lora: LoRA, *, scale: float = 0.3) -> Path:
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
        adapter_sources(model, multimodal=False),
        lora=lora,
        base=str(base),
        base_fingerprint=fingerprint(base),
        multimodal=False,
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

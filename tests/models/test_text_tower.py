"""Multimodal folders: their text tower is read, trained and saved as a model for text.

Shapes: B batch, S tokens, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from solotune.checkpoint import Checkpointer, load_weights
from solotune.errors import CheckpointError
from solotune.models import auto, read_config
from solotune.tokenizers import auto as load_tokenizer

from .families import tiny_config
from .oracle import logits_of
from .tiny import logits, make_batch

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def multimodal(kind: str, folder: Path, **text: Any) -> Any:
    """Save a tiny model of transformers with a vision tower; return it."""
    torch.manual_seed(0)
    if kind == "gemma3":
        config_class: Any = Gemma3Config
        config = config_class(
            text_config=tiny_config("gemma3_text") | text,
            vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
            mm_tokens_per_image=4,
            image_token_index=255,
            boi_token_index=253,
            eoi_token_index=254,
            eos_token_id=[1, 106],
        )
        theirs: Any = Gemma3ForConditionalGeneration(config)
    else:
        config = Mistral3Config(
            text_config=tiny_config(kind) | text,
            vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
            tie_word_embeddings=text.get("tie_word_embeddings", False),
        )
        theirs = Mistral3ForConditionalGeneration(config)
    theirs = theirs.float().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(5)
    theirs.save_pretrained(folder)
    return theirs


def rename(folder: Path, spelling: str) -> None:
    """Give the weights the names of one of three generations of transformers."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    renamed = {}
    for name, tensor in weights.items():
        plain = name.removeprefix("model.")
        for old in ("language_model.model.", "language_model."):
            if plain.startswith(old):
                plain = "text." + plain.removeprefix(old)
                break
        inner = plain.removeprefix("text.")
        match spelling:
            case "model.language_model.layers":
                new = f"model.language_model.{inner}" if plain != inner else f"model.{plain}"
                new = "lm_head.weight" if inner == "lm_head.weight" else new
            case "language_model.model.layers":
                new = f"language_model.model.{inner}" if plain != inner else plain
                new = "language_model.lm_head.weight" if inner == "lm_head.weight" else new
            case _:
                raise AssertionError(spelling)
        renamed[new] = tensor.clone()
    save_file(renamed, path, metadata={"format": "pt"})


SPELLINGS = ["model.language_model.layers", "language_model.model.layers"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("kind", "text", "model_type"),
    [
        ("gemma3", {}, "gemma3_text"),
        ("mistral", {"tie_word_embeddings": False}, "mistral"),
        ("ministral3", {"tie_word_embeddings": True}, "ministral3"),
        ("ministral3", {"tie_word_embeddings": False}, "ministral3"),
    ],
    ids=["gemma3", "mistral3 with mistral", "ministral 3, tied", "ministral 3, untied"],
)
def test_the_text_tower_is_trained_and_saved_as_a_model_for_text(
    kind: str,
    text: dict[str, Any],
    model_type: str,
    spelling: str,
    tiny_tokenizer_dir: Path,
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    theirs = multimodal(kind, source, **text)
    rename(source, spelling)
    with torch.device("meta"):
        ours = auto(source)
    report = load_weights(ours, source, device="cpu")
    assert report.left_out.keys() == {"vision_tower", "multi_modal_projector"}
    assert "left out: " in report.lines()[2]
    batch = make_batch((45,), vocab=250)
    wanted_SV = logits_of(theirs, batch.tokens_BS[0])
    assert wanted_SV.std() > 0.3
    torch.testing.assert_close(logits(ours, batch)[0], wanted_SV, atol=1e-4, rtol=0)

    checkpointer = Checkpointer(source, tmp_path / "run")
    saved = checkpointer.save(
        1,
        model=ours,
        optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
        progress={},
        dtype=torch.float32,
        tokenizer=load_tokenizer(tiny_tokenizer_dir),
    )
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == model_type
    reopened: Any = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    again, info = reopened
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits_of(again, batch.tokens_BS[0]), wanted_SV, atol=1e-4, rtol=0)
    with torch.device("meta"):
        resumed = auto(source)
    assert load_weights(resumed, saved, device="cpu").left_out == {}


def test_ids_and_quantisation_beside_text_config_are_the_text_towers(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        "vision_config": {},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    text = read_config(tmp_path)
    assert text["model_type"] == "gemma3_text"
    assert text["architectures"] == ["Gemma3ForCausalLM"]
    assert text["eos_token_id"] == [1, 106]
    with torch.device("meta"):
        assert auto(tmp_path).tied
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config=.* is not supported"):
        auto(tmp_path)

"""The decoder computes and learns what transformers' Llama does.

Shapes: B batch, S tokens, V vocabulary.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from solotune.checkpoint import load_weights
from solotune.data.batch import collate
from solotune.models import auto
from solotune.tokenizers import auto as load_tokenizer

from .oracle import by_segment, check_packed_logits, logits_of, oracle, ten_losses
from .reference import float64_logits
from .tiny import logits, make_batch, segments_of, tiny

# Longer than the 32 positions that the scalings start from; the second row has filler.
ROWS = ((33, 7, 56), (70, 1, 12))

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear, named by type": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3 in rope_parameters": {
        "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
        "rope_theta": None,
    },
    "yarn": {"rope_scaling": YARN},
    "yarn, not truncated": {"rope_scaling": YARN | {"truncate": False}},
    "yarn, mscale": {"rope_scaling": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}},
    "yarn, attention_factor": {"rope_scaling": YARN | {"attention_factor": 1.3}},
    "yarn, original length from the model": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "max_position_embeddings": 32,
    },
    "other theta in rope_parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "rope_theta": None,
    },
}
SHAPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "a key head a query head": {"num_key_value_heads": 4},
    "no num_key_value_heads": {"num_key_value_heads": None},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 8},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
}


@pytest.mark.parametrize("fields", (SCALED | SHAPED).values(), ids=SCALED | SHAPED)
def test_packed_logits_equal_unpacked_ones_and_those_of_transformers_without_padding(
    fields: dict[str, Any],
) -> None:
    model = tiny(**fields)
    check_packed_logits(model, make_batch(*ROWS), spread=(1, 5))


@pytest.mark.parametrize("fields", SCALED.values(), ids=SCALED)
def test_a_rope_scaling_changes_the_logits(fields: dict[str, Any]) -> None:
    # Otherwise the comparison above would show nothing.
    batch = make_batch(*ROWS)
    assert (logits(tiny(**fields), batch) - logits(tiny(), batch)).abs().max() > 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_ten_adamw_steps_follow_the_losses_of_transformers(tied: bool) -> None:
    ours = tiny(tie_word_embeddings=tied, attention_bias=True)
    batches = [make_batch(*ROWS, seed=1), make_batch((40, 9), seed=2)]
    our_losses, their_losses = ten_losses(ours, oracle(ours), batches)
    assert their_losses[-1] < their_losses[0] - 1
    torch.testing.assert_close(our_losses, their_losses, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_smollm2_is_as_near_to_float64_as_transformers(smollm2_dir: Path) -> None:
    with torch.device("meta"):
        ours = auto(smollm2_dir)
    load_weights(ours, smollm2_dir, device="cpu")
    weights = dict(ours.named_parameters())
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    tokenizer = load_tokenizer(smollm2_dir)
    texts = [tokenizer.encode(module.__doc__ or "")[:256] for module in (json, random)]
    row = [(np.array(tokens), np.ones(len(tokens), bool)) for tokens in texts]
    batch = collate([row], row_length=512, max_segments=2)

    our_distance = their_distance = 0.0
    for tokens_S, ours_SV in zip(
        segments_of(batch), by_segment(batch, logits(ours, batch)), strict=True
    ):
        exact_SV = float64_logits(ours.config, weights, tokens_S)
        theirs_SV = logits_of(theirs, tokens_S)
        our_distance = max(our_distance, float((ours_SV - exact_SV).abs().max()))
        their_distance = max(their_distance, float((theirs_SV - exact_SV).abs().max()))
    print(f"largest distance to float64: {our_distance:.2e}, transformers {their_distance:.2e}")
    assert their_distance < 1e-3  # otherwise the reference is another model
    assert our_distance <= 1.5 * their_distance


def test_the_float64_reference_is_the_tiny_model() -> None:
    for fields in ({}, {"tie_word_embeddings": True}):
        model = tiny(**fields)
        batch = make_batch((50,))
        exact_SV = float64_logits(model.config, dict(model.named_parameters()), batch.tokens_BS[0])
        torch.testing.assert_close(logits(model, batch)[0].double(), exact_SV, atol=1e-4, rtol=0)

"""A Llama forward pass in float64 throughout, angles and norms included: the truth for both sides.

Written from the papers, with a dense mask and none of the library's modules.
Shapes: S tokens, D width, H heads, K head width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def float64_logits(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens_S: Tensor
) -> Tensor:
    """Return logits_SV of one sequence; `weights` by the decoder's parameter names."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = weights["layers.0.self_attn.q_proj.weight"].size(0) // heads
    frequency_K = config["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
    angles_SK = torch.arange(len(tokens_S)).double().outer(frequency_K).repeat(1, 2)
    cos_SK, sin_SK = angles_SK.cos(), angles_SK.sin()

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[name + ".weight"].double().T

    def norm(name: str, x: Tensor) -> Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
        return scaled * weights[name + ".weight"].double()

    def rotated(x_HSK: Tensor) -> Tensor:
        first, second = x_HSK.chunk(2, -1)
        return x_HSK * cos_SK + torch.cat((-second, first), -1) * sin_SK

    def attention(prefix: str, x_SD: Tensor) -> Tensor:
        q, k, v = (
            linear(f"{prefix}.{name}_proj", x_SD).unflatten(-1, (-1, width)).transpose(0, 1)
            for name in "qkv"
        )
        k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
        scores_HSS = rotated(q) @ rotated(k).transpose(1, 2) / width**0.5
        future_SS = torch.ones(len(x_SD), len(x_SD), dtype=torch.bool).triu(1)
        p_HSS = scores_HSS.masked_fill(future_SS, -torch.inf).softmax(-1)
        return linear(f"{prefix}.o_proj", (p_HSS @ v).transpose(0, 1).flatten(1))

    x_SD = weights["embed_tokens.weight"][tokens_S].double()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        x_SD = x_SD + attention(f"{prefix}.self_attn", norm(f"{prefix}.input_layernorm", x_SD))
        y_SD = norm(f"{prefix}.post_attention_layernorm", x_SD)
        gate, up = (linear(f"{prefix}.mlp.{name}_proj", y_SD) for name in ("gate", "up"))
        x_SD = x_SD + linear(f"{prefix}.mlp.down_proj", torch.nn.functional.silu(gate) * up)
    output = "embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(output, norm("norm", x_SD))

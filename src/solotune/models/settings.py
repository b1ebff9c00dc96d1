"""What a decoder's forward pass takes from config.json, in one spelling for all families."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from solotune.errors import CheckpointError
from solotune.models.feed_forward import Activation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes and switches; two that are equal make the same model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    ropes: tuple[dict[str, Any], ...]  # settings of each rotary base
    rope_of_layer: tuple[int | None, ...]  # which of them turns a layer; None: none does
    window_of_layer: tuple[int | None, ...]  # tokens that a query sees; None: all before it
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    norm_over: Literal["head", "heads"] | None = None  # of queries and keys
    norm_offset: float = 0.0  # 1: a norm's scale is 1 + its weight
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # one matrix for q, k, v, and one for gate and up
    activation: Activation = "silu"
    embedding_scale: float = 1.0


def settings_of(
    values: Mapping[str, Any],
    *,
    ropes: tuple[dict[str, Any], ...],
    rope_of_layer: tuple[int | None, ...] | None = None,
    window_of_layer: tuple[int | None, ...] | None = None,
    **switches: Any,
) -> Settings:
    """Return the settings for what `Fields.read` returned; by default all layers are alike."""
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    kv_heads = values["num_key_value_heads"] or heads
    head_dim = values["head_dim"] or values["hidden_size"] // heads
    if head_dim < 2 or head_dim % 2 or heads % kv_heads:
        raise CheckpointError(
            f"config.json: a head_dim of {head_dim} and {heads} heads over {kv_heads} key/value "
            "heads is no model: head_dim is even, and heads a multiple of key/value heads"
        )
    return Settings(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values["rms_norm_eps"],
        tie_word_embeddings=values["tie_word_embeddings"],
        ropes=ropes,
        rope_of_layer=rope_of_layer or (0,) * layers,
        window_of_layer=window_of_layer or (None,) * layers,
        **switches,
    )

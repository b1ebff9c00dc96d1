"""Gemma 2: norms before and after, every other layer slides, soft caps on scores and logits.

Its norms scale by 1 + weight, and its embeddings by the root of the width.
"""

from typing import Any

from solotune.models.blocks import SandwichNormBlock, build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope, windows
from solotune.models.settings import Settings, settings_of

DEFAULTS = (
    SIZES
    | ROPE
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
    }
)
NEUTRAL = {"hidden_activation": ("gelu_pytorch_tanh",)}
FIELDS = Fields(
    "gemma2",
    defaults=DEFAULTS | {"attn_logit_softcapping": 50.0},
    neutral=NEUTRAL,
    inert="hidden_act",
)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    return settings_of(
        values,
        ropes=(one_rope(values),),
        window_of_layer=windows(values, lambda layer: layer % 2 == 0),
        attention_soft_cap=values["attn_logit_softcapping"],
        **switches(values),
    )


def switches(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that Gemma 2 and 3 share."""
    return {
        "attention_scale": values["query_pre_attn_scalar"] ** -0.5,
        "logit_soft_cap": values["final_logit_softcapping"],
        "attention_bias": values["attention_bias"],
        "output_bias": values["attention_bias"],
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": values["hidden_size"] ** 0.5,
    }


def gemma2(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `gemma2` describes."""
    return build_decoder(config, settings(config), SandwichNormBlock)


# --- published sizes --------------------------------------------------------------------------


def _published(
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 256,
    query_scalar: int = 256,
) -> Decoder:
    return gemma2(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": 256000,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "query_pre_attn_scalar": query_scalar,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    )


def gemma2_2b() -> Decoder:
    return _published(26, 2304, 9216, 8, 4)


def gemma2_9b() -> Decoder:
    return _published(42, 3584, 14336, 16, 8)


def gemma2_27b() -> Decoder:
    return _published(46, 4608, 36864, 32, 16, head_dim=128, query_scalar=144)

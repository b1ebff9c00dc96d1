"""Tiny configs of every family, with every switch that its config.json can turn."""

from typing import Any

from solotune.models import Decoder
from solotune.models.auto import FAMILIES

from .tiny import fill_

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0 + 0.02 * k for k in range(8)],
    "long_factor": [1.0 + 0.5 * k for k in range(8)],
}
LONG = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}
HALF_LONG = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": LONGROPE["short_factor"][:4],
        "long_factor": LONGROPE["long_factor"][:4],
    },
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}
# model_type -> name -> what replaces COMMON; ABSENT takes a field out.
ABSENT: Any = object()
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"plain": {}, "yarn, tied": {"rope_scaling": YARN, "tie_word_embeddings": True}},
    "mistral": {
        "no window": {"sliding_window": None},
        "a window": {"sliding_window": 8, "tie_word_embeddings": True},
        "absent: a window of 4096, 8 key heads": {
            "num_key_value_heads": ABSENT,
            "num_attention_heads": 8,
            "rms_norm_eps": ABSENT,
        },
        "wide heads": {"head_dim": 32, "sliding_window": None},
        "linear": {"rope_scaling": LINEAR, "rope_theta": 500.0, "sliding_window": 20},
    },
    "ministral": {
        "layer_types": {
            "layer_types": [FULL, SLIDING] * 2,
            "sliding_window": 8,
            "head_dim": 16,
        },
        "all slide": {"sliding_window": 8, "head_dim": 32},
        "none slides, tied": {
            "layer_types": [FULL] * 4,
            "tie_word_embeddings": True,
            "head_dim": 16,
        },
    },
    "ministral3": {
        "yarn and query temperature": {
            "rope_parameters": YARN | {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.5},
            "head_dim": 16,
        },
        "absent: yarn of the default": {"rms_norm_eps": ABSENT, "head_dim": ABSENT},
        "a window, tied": {"sliding_window": 8, "tie_word_embeddings": True, "head_dim": 32},
    },
    "qwen2": {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "upper layers slide": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
        "layer_types": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
        },
        "a window that is off": {"sliding_window": 8, "max_window_layers": 0},
        "yarn": {"rope_scaling": YARN, "rope_theta": 1e6},
        "wide heads, as many key heads": {"head_dim": 32, "num_key_value_heads": 4},
    },
    "qwen3": {
        "plain": {"head_dim": 16},
        "absent: heads of 128": {"rms_norm_eps": ABSENT},
        "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32},
        "upper layers slide": {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        "yarn": {"head_dim": 16, "rope_scaling": YARN},
    },
    "gemma2": {
        "plain": {"sliding_window": 8, "head_dim": 16},
        "untied, biases": {
            "sliding_window": 8,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        "low caps": {
            "sliding_window": 8,
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 16,
        },
        "no caps": {
            "sliding_window": 8,
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 24,
        },
        "layer_types": {
            "sliding_window": 8,
            "head_dim": 16,
            "layer_types": [FULL, FULL, SLIDING, FULL],
            "rope_theta": 500.0,
        },
        "absent: heads of 256, a window of 4096": {"rms_norm_eps": ABSENT},
    },
    "gemma3_text": {
        "plain": {"sliding_window": 8, "head_dim": 16, "num_hidden_layers": 7},
        "pattern, linear, local base": {
            "sliding_window": 8,
            "head_dim": 16,
            "sliding_window_pattern": 2,
            "rope_scaling": LINEAR,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
        },
        "rope_parameters by layer type": {
            "sliding_window": 8,
            "head_dim": 16,
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
            "rope_parameters": {
                FULL: LINEAR | {"rope_theta": 2000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        "untied, biases, a cap": {
            "sliding_window": 8,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 20,
        },
        "absent: 8 heads of 256": {
            "num_attention_heads": ABSENT,
            "num_key_value_heads": ABSENT,
            "rms_norm_eps": ABSENT,
            "max_position_embeddings": ABSENT,
        },
    },
    "phi3": {
        "plain": {},
        "a window, tied, null key heads": {
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "num_key_value_heads": None,
        },
        "longrope": LONG,
        "longrope called su": LONG
        | {"rope_scaling": LONGROPE | {"type": "su", "original_max_position_embeddings": 32}},
        "longrope with attention_factor": LONG
        | {"rope_scaling": LONGROPE | {"attention_factor": 1.3}},
        "half of each head, longrope": HALF_LONG,
        "half of each head": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
    },
    "smollm3": {
        "every fourth layer does not turn": {},
        "untied, biases": {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layer_interval": 2,
        },
        "those that do not turn slide": {
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
        "layer_types": {
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
            "use_sliding_window": True,
            "sliding_window": 8,
            "rope_theta": 500.0,
        },
        "absent: 4 key heads": {"num_key_value_heads": ABSENT, "rms_norm_eps": ABSENT},
        "yarn": {"rope_scaling": YARN},
    },
    "olmo2": {
        "plain": {},
        "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
        "null key heads, linear": {"num_key_value_heads": None, "rope_scaling": LINEAR},
        "absent": {"rms_norm_eps": ABSENT},
    },
    "olmo3": {
        "three of four slide": {"sliding_window": 8},
        "yarn of the full layers": {"sliding_window": 8, "rope_scaling": YARN},
        "layer_types, tied, biases": {
            "sliding_window": 8,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
        "rope_parameters by layer type": {
            "sliding_window": 8,
            "rope_parameters": {
                FULL: YARN | {"rope_theta": 2000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        "absent: a window of 4096": {"rms_norm_eps": ABSENT},
    },
}
# What stands for a default has another effect than the first config's only where that differs.
WITHOUT_EFFECT = ("absent", "a window that is off", "longrope called su")
CASES = [(family, name) for family, variants in VARIANTS.items() for name in variants]


def tiny_config(family: str, name: str = "") -> dict[str, Any]:
    """Return a config.json of a family; without a name, its first."""
    variants = VARIANTS[family]
    fields = COMMON | variants[name or next(iter(variants))]
    fields = {field: value for field, value in fields.items() if value is not ABSENT}
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **fields,
    }


def tiny_family(family: str, name: str = "", *, seed: int = 0) -> Decoder:
    """Return a filled fp32 model of a family; without a name, of its first config."""
    return fill_(FAMILIES[family].build(tiny_config(family, name)), seed=seed)

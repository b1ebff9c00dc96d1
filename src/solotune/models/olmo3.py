"""OLMo 3: OLMo 2, three of four layers with a sliding window; a rope scaling is of the others."""

from typing import Any

from solotune.models import olmo2
from solotune.models.blocks import PostNormBlock, build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import Fields, windows
from solotune.models.gemma3 import ropes_by_layer_type
from solotune.models.settings import Settings, settings_of

FIELDS = Fields("olmo3", defaults=olmo2.DEFAULTS | {"sliding_window": 4096, "layer_types": None})


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    window_of_layer = windows(values, lambda layer: (layer + 1) % 4 != 0)
    theta = values["rope_theta"] or 500000.0
    return settings_of(
        values,
        ropes=ropes_by_layer_type(values, local_theta=theta, theta=theta),
        rope_of_layer=tuple(int(window is None) for window in window_of_layer),
        window_of_layer=window_of_layer,
        **olmo2.switches(values),
    )


def olmo3(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `olmo3` describes."""
    return build_decoder(config, settings(config), PostNormBlock)


# --- published sizes --------------------------------------------------------------------------


def _published(layers: int, width: int, feed_forward: int, heads: int, kv_heads: int) -> Decoder:
    return olmo3(
        {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 100278,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "sliding_window": 4096,
            "max_position_embeddings": 65536,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
    )


def olmo3_7b() -> Decoder:
    return _published(32, 4096, 11008, 32, 32)


def olmo3_32b() -> Decoder:
    return _published(64, 5120, 27648, 40, 8)

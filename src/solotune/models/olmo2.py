"""OLMo 2: norms behind attention and feed-forward, and over all heads' queries and keys."""

from typing import Any

from solotune.models.blocks import PostNormBlock, build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope
from solotune.models.settings import Settings, settings_of

DEFAULTS = (
    SIZES
    | ROPE
    | {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
)
FIELDS = Fields("olmo2", defaults=DEFAULTS)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    return settings_of(values, ropes=(one_rope(values),), **switches(values))


def switches(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that OLMo 2 and 3 share."""
    return {
        "attention_bias": values["attention_bias"],
        "output_bias": values["attention_bias"],
        "norm_over": "heads",
    }


def olmo2(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `olmo2` describes."""
    return build_decoder(config, settings(config), PostNormBlock)


# --- published sizes --------------------------------------------------------------------------


def _published(layers: int, width: int, feed_forward: int, heads: int, kv_heads: int) -> Decoder:
    return olmo2(
        {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 100352,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
    )


def olmo2_1b() -> Decoder:
    return _published(16, 2048, 8192, 16, 16)


def olmo2_7b() -> Decoder:
    return _published(32, 4096, 11008, 32, 32)


def olmo2_13b() -> Decoder:
    return _published(40, 5120, 13824, 40, 40)


def olmo2_32b() -> Decoder:
    return _published(64, 5120, 27648, 40, 8)

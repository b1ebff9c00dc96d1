"""Mistral, Ministral and Ministral 3: Llama's block, with a sliding window in some.

A Mistral config without `sliding_window` means 4096; null means none. Ministral 3 sharpens queries
far behind the original length (`llama_4_scaling_beta`).
"""

from typing import Any

from solotune.models.blocks import build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope, windows
from solotune.models.settings import Settings, settings_of

_DEFAULTS = (
    SIZES
    | ROPE
    | {
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    }
)
MISTRAL_FIELDS = Fields("mistral", defaults=_DEFAULTS)
MINISTRAL_FIELDS = Fields("ministral", defaults=_DEFAULTS | {"layer_types": None})
MINISTRAL3_FIELDS = Fields(
    "ministral3",
    defaults=_DEFAULTS
    | {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "sliding_window": None,
    },
)
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral_settings(config: dict[str, Any]) -> Settings:
    return _settings(MISTRAL_FIELDS.read(config))


def ministral_settings(config: dict[str, Any]) -> Settings:
    return _settings(MINISTRAL_FIELDS.read(config))


def ministral3_settings(config: dict[str, Any]) -> Settings:
    values = MINISTRAL3_FIELDS.read(config)
    if values["rope_parameters"] is None and values["rope_scaling"] is None:
        values["rope_parameters"] = _MINISTRAL3_ROPE
    return _settings(values, more="llama_4_scaling_beta original_max_position_embeddings")


def _settings(values: dict[str, Any], *, more: str = "") -> Settings:
    slides = values["sliding_window"] is not None
    return settings_of(
        values,
        ropes=(one_rope(values, more=more),),
        window_of_layer=windows(values, lambda layer: slides),
    )


def mistral(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `mistral` describes."""
    return build_decoder(config, mistral_settings(config))


def ministral(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `ministral` describes."""
    return build_decoder(config, ministral_settings(config))


def ministral3(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `ministral3` describes."""
    return build_decoder(config, ministral3_settings(config))


# --- published sizes --------------------------------------------------------------------------


def _published(
    layers: int,
    width: int,
    feed_forward: int,
    *,
    vocab: int = 32000,
    theta: float = 1e6,
    window: int | None = None,
    context: int = 32768,
) -> Decoder:
    return mistral(
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": theta,
            "sliding_window": window,
            "max_position_embeddings": context,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
    )


def mistral_7b_v0_1() -> Decoder:
    return _published(32, 4096, 14336, theta=10000.0, window=4096)


def mistral_7b_v0_2() -> Decoder:
    return _published(32, 4096, 14336)


def mistral_7b_v0_3() -> Decoder:
    return _published(32, 4096, 14336, vocab=32768)


def mistral_nemo_12b() -> Decoder:
    return _published(40, 5120, 14336, vocab=131072, context=131072)


def mistral_small_24b() -> Decoder:
    return _published(40, 5120, 32768, vocab=131072, theta=1e8)


def ministral_8b() -> Decoder:
    return _published(36, 4096, 12288, vocab=131072, theta=1e8, window=32768)


def _published_ministral3(
    layers: int, width: int, feed_forward: int, *, tied: bool = False
) -> Decoder:
    return ministral3(
        {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _MINISTRAL3_ROPE,
            "sliding_window": None,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
        }
    )


def ministral3_3b() -> Decoder:
    return _published_ministral3(26, 3072, 9216, tied=True)


def ministral3_8b() -> Decoder:
    return _published_ministral3(34, 4096, 14336)


def ministral3_14b() -> Decoder:
    return _published_ministral3(40, 5120, 16384)

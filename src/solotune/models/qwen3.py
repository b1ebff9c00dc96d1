"""Qwen 3: Llama's block with a norm over each head's query and key."""

from typing import Any

from solotune.models import qwen2
from solotune.models.blocks import build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import Fields, one_rope
from solotune.models.settings import Settings, settings_of

FIELDS = Fields("qwen3", defaults=qwen2.DEFAULTS | {"head_dim": 128, "attention_bias": False})


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    return settings_of(
        values,
        ropes=(one_rope(values),),
        window_of_layer=qwen2.upper_windows(values),
        attention_bias=values["attention_bias"],
        output_bias=values["attention_bias"],
        norm_over="head",
    )


def qwen3(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `qwen3` describes."""
    return build_decoder(config, settings(config))


# --- published sizes --------------------------------------------------------------------------


def _published(
    layers: int, width: int, feed_forward: int, heads: int, *, tied: bool = False
) -> Decoder:
    return qwen3(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "use_sliding_window": False,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
        }
    )


def qwen3_0_6b() -> Decoder:
    return _published(28, 1024, 3072, 16, tied=True)


def qwen3_1_7b() -> Decoder:
    return _published(28, 2048, 6144, 16, tied=True)


def qwen3_4b() -> Decoder:
    return _published(36, 2560, 9728, 32, tied=True)


def qwen3_8b() -> Decoder:
    return _published(36, 4096, 12288, 32)


def qwen3_14b() -> Decoder:
    return _published(40, 5120, 17408, 40)


def qwen3_32b() -> Decoder:
    return _published(64, 5120, 25600, 64)

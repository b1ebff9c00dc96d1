"""Qwen 2 and 2.5: Llama's block with biases on queries, keys and values.

With `use_sliding_window`, the layers from `max_window_layers` on slide.
"""

from typing import Any

from solotune.models.blocks import build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope, windows
from solotune.models.settings import Settings, settings_of

DEFAULTS = (
    SIZES
    | ROPE
    | {
        "num_key_value_heads": 32,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }
)
FIELDS = Fields("qwen2", defaults=DEFAULTS)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    return settings_of(
        values,
        ropes=(one_rope(values),),
        window_of_layer=upper_windows(values),
        attention_bias=True,
    )


def upper_windows(values: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window: where switched on, of the upper layers."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    return windows(
        values | {"sliding_window": window},
        lambda layer: window is not None and layer >= values["max_window_layers"],
    )


def qwen2(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `qwen2` describes."""
    return build_decoder(config, settings(config))


# --- published sizes --------------------------------------------------------------------------


def _published(
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 152064,
    eps: float = 1e-6,
    tied: bool = False,
) -> Decoder:
    return qwen2(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "rms_norm_eps": eps,
            "rope_theta": 1e6,
            "use_sliding_window": False,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
        }
    )


def qwen2_5_0_5b() -> Decoder:
    return _published(24, 896, 4864, 14, 2, vocab=151936, tied=True)


def qwen2_5_1_5b() -> Decoder:
    return _published(28, 1536, 8960, 12, 2, vocab=151936, tied=True)


def qwen2_5_3b() -> Decoder:
    return _published(36, 2048, 11008, 16, 2, vocab=151936, tied=True)


def qwen2_5_7b() -> Decoder:
    return _published(28, 3584, 18944, 28, 4)


def qwen2_5_14b() -> Decoder:
    return _published(48, 5120, 13824, 40, 8, eps=1e-5)


def qwen2_5_32b() -> Decoder:
    return _published(64, 5120, 27648, 40, 8, eps=1e-5)


def qwen2_5_72b() -> Decoder:
    return _published(80, 8192, 29568, 64, 8, eps=1e-5)

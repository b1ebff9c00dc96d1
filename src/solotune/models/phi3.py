"""Phi-3, 3.5, 4 and Phi-4-mini: Llama's block with q, k, v in one matrix, and gate and up in one.

The long versions turn by other frequencies in sequences beyond the original length (LongRoPE);
Phi-4-mini turns three quarters of each head.
"""

from typing import Any

from solotune.models.blocks import build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope, windows
from solotune.models.settings import Settings, settings_of

FIELDS = Fields(
    "phi3",
    defaults=SIZES
    | ROPE
    | {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": None,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    inert="full_attn_mod interpolate_factor",
)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    for name in ("rope_scaling", "rope_parameters"):
        if values[name]:
            values[name] = values[name] | {"rope_type": _rope_type(values[name])}
    slides = values["sliding_window"] is not None
    return settings_of(
        values,
        ropes=(
            one_rope(
                values,
                original_positions=values["original_max_position_embeddings"],
                rotated_share=values["partial_rotary_factor"],
            ),
        ),
        window_of_layer=windows(values, lambda layer: slides),
        fused=True,
    )


def _rope_type(scaling: dict[str, Any]) -> str:
    """Return the scaling's type; the first folders call LongRoPE `su`, and some `yarn`."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return "longrope" if kind in ("su", "yarn") else kind


def phi3(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `phi3` describes."""
    return build_decoder(config, settings(config))


# --- published sizes, without the long versions' own factors ------------------------------------


def _published(
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 32064,
    theta: float = 10000.0,
    window: int | None = None,
    context: int = 4096,
) -> Decoder:
    return phi3(
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": theta,
            "sliding_window": window,
            "max_position_embeddings": context,
            "original_max_position_embeddings": context,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
    )


def phi3_mini_4k() -> Decoder:
    return _published(32, 3072, 8192, 32, 32, window=2047)


def phi3_medium_4k() -> Decoder:
    return _published(40, 5120, 17920, 40, 10, window=2047)


def phi4() -> Decoder:
    return _published(40, 5120, 17920, 40, 10, vocab=100352, theta=250000.0, context=16384)

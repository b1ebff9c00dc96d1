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


# --- published sizes --------------------------------------------------------------------------


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
    **more: Any,
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
            **more,
        }
    )


def phi3_mini_4k() -> Decoder:
    return _published(32, 3072, 8192, 32, 32, window=2047)


def phi3_medium_4k() -> Decoder:
    return _published(40, 5120, 17920, 40, 10, window=2047)


def phi4() -> Decoder:
    return _published(40, 5120, 17920, 40, 10, vocab=100352, theta=250000.0, context=16384)


_PHI4_MINI_LONG_FACTOR = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip


def phi4_mini() -> Decoder:
    return _published(
        32, 3072, 8192, 24, 8, vocab=200064, window=262144, context=131072,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": _PHI4_MINI_LONG_FACTOR,
        },
    )  # fmt: skip

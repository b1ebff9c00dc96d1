"""Gemma 3 text: Gemma 2 with norms over queries and keys in place of soft caps on scores.

Five of six layers slide, and turn by a rotary base of their own; a scaling is of the others.
"""

from typing import Any

from solotune.models import gemma2
from solotune.models.blocks import SandwichNormBlock, build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import Fields, windows
from solotune.models.rope import rope_settings
from solotune.models.settings import Settings, settings_of

FIELDS = Fields(
    "gemma3_text",
    defaults=gemma2.DEFAULTS
    | {
        "vocab_size": 262208,  # the published folders leave out what is this
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": None,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    neutral=gemma2.NEUTRAL,
    inert="hidden_act _sliding_window_pattern",
)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    window_of_layer = windows(
        values, lambda layer: (layer + 1) % values["sliding_window_pattern"] != 0
    )
    return settings_of(
        values,
        ropes=ropes_by_layer_type(
            values, local_theta=values["rope_local_base_freq"] or 10000.0, theta=1e6
        ),
        rope_of_layer=tuple(int(window is None) for window in window_of_layer),
        window_of_layer=window_of_layer,
        norm_over="head",
        **gemma2.switches(values),
    )


def ropes_by_layer_type(
    values: dict[str, Any], *, local_theta: float, theta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope settings of sliding layers, and of full ones.

    Newer folders hold one dictionary for each in `rope_parameters`; in older ones `rope_scaling` is
    of the full layers. The thetas are the defaults; config.json's `rope_theta` is the full layers'.
    """
    given = values["rope_parameters"] or {}
    of_full = given.get("full_attention") or {}
    if isinstance(of_full, dict):
        of_full = of_full | (values["rope_scaling"] or {})
    length = {"max_positions": values["max_position_embeddings"]}
    return (
        rope_settings(given.get("sliding_attention"), theta=local_theta, **length),
        rope_settings(of_full, theta=values["rope_theta"] or theta, **length),
    )


def gemma3(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `gemma3_text` describes."""
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
    window: int = 1024,
    vocab: int = 262208,
    scaling: dict[str, Any] | None = None,
    context: int = 131072,
) -> Decoder:
    return gemma3(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": scaling,
            "query_pre_attn_scalar": query_scalar,
            "sliding_window": window,
            "sliding_window_pattern": 6,
            "max_position_embeddings": context,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    )


_LINEAR = {"rope_type": "linear", "factor": 8.0}


def gemma3_270m() -> Decoder:
    return _published(18, 640, 2048, 4, 1, window=512, vocab=262144, context=32768)


def gemma3_1b() -> Decoder:
    return _published(26, 1152, 6912, 4, 1, window=512, vocab=262144, context=32768)


def gemma3_4b() -> Decoder:
    return _published(34, 2560, 10240, 8, 4, scaling=_LINEAR)


def gemma3_12b() -> Decoder:
    return _published(48, 3840, 15360, 16, 8, scaling=_LINEAR)


def gemma3_27b() -> Decoder:
    return _published(62, 5376, 21504, 32, 16, head_dim=128, query_scalar=168, scaling=_LINEAR)

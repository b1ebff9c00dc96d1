"""SmolLM3: Llama's block; every fourth layer does not turn its queries and keys (NoPE)."""

from typing import Any

from solotune.errors import CheckpointError
from solotune.models.blocks import build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope, windows
from solotune.models.settings import Settings, settings_of

FIELDS = Fields(
    "smollm3",
    defaults=SIZES
    | ROPE
    | {
        "num_key_value_heads": 4,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    inert="pretraining_tp",
)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    turned = _turned_layers(values)
    window = values["sliding_window"] if values["use_sliding_window"] else None
    return settings_of(
        values,
        ropes=(one_rope(values, theta=2e6),),
        rope_of_layer=tuple(0 if is_turned else None for is_turned in turned),
        window_of_layer=windows(
            values | {"sliding_window": window},
            lambda layer: window is not None and not turned[layer],
        ),
        attention_bias=values["attention_bias"],
        output_bias=values["attention_bias"],
        mlp_bias=values["mlp_bias"],
    )


def _turned_layers(values: dict[str, Any]) -> list[bool]:
    """Return which layers turn; `no_rope_layers` holds a 1 for those that do."""
    layers, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    flags = values["no_rope_layers"]
    if flags is None:
        flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(flags) < layers or not set(flags) <= {0, 1}:
        raise CheckpointError(
            f"config.json: no_rope_layers={flags!r} is not a 0 or 1 for each of {layers} layers: "
            "fetch the file again"
        )
    return [bool(flag) for flag in flags[:layers]]


def smollm3(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `smollm3` describes."""
    return build_decoder(config, settings(config))


# --- published sizes --------------------------------------------------------------------------


def smollm3_3b() -> Decoder:
    return smollm3(
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "num_hidden_layers": 36,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "max_position_embeddings": 65536,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        }
    )

"""Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2: pre-norm blocks, grouped queries, gated feed-forward."""

from typing import Any

from solotune.models.blocks import build_decoder
from solotune.models.decoder import Decoder
from solotune.models.fields import ROPE, SIZES, Fields, one_rope
from solotune.models.settings import Settings, settings_of

FIELDS = Fields(
    "llama",
    defaults=SIZES
    | ROPE
    | {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
)


def settings(config: dict[str, Any]) -> Settings:
    values = FIELDS.read(config)
    return settings_of(
        values,
        ropes=(one_rope(values),),
        attention_bias=values["attention_bias"],
        output_bias=values["attention_bias"],
        mlp_bias=values["mlp_bias"],
    )


def llama(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `llama` describes."""
    return build_decoder(config, settings(config))


# --- published sizes --------------------------------------------------------------------------

_LLAMA3_1_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_2_SCALING = _LLAMA3_1_SCALING | {"factor": 32.0}


def _published(
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 128256,
    theta: float = 500000.0,
    scaling: dict[str, Any] | None = None,
    context: int = 131072,
    tied: bool = False,
) -> Decoder:
    return llama(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": context,
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
        }
    )


def llama2_7b() -> Decoder:
    return _published(32, 4096, 11008, 32, 32, vocab=32000, theta=10000.0, context=4096)


def llama2_13b() -> Decoder:
    return _published(40, 5120, 13824, 40, 40, vocab=32000, theta=10000.0, context=4096)


def llama2_70b() -> Decoder:
    return _published(80, 8192, 28672, 64, 8, vocab=32000, theta=10000.0, context=4096)


def llama3_8b() -> Decoder:
    return _published(32, 4096, 14336, 32, 8, context=8192)


def llama3_70b() -> Decoder:
    return _published(80, 8192, 28672, 64, 8, context=8192)


def llama3_1_8b() -> Decoder:
    return _published(32, 4096, 14336, 32, 8, scaling=_LLAMA3_1_SCALING)


def llama3_1_70b() -> Decoder:
    return _published(80, 8192, 28672, 64, 8, scaling=_LLAMA3_1_SCALING)


def llama3_1_405b() -> Decoder:
    return _published(126, 16384, 53248, 128, 8, scaling=_LLAMA3_1_SCALING)


def llama3_2_1b() -> Decoder:
    return _published(16, 2048, 8192, 32, 8, scaling=_LLAMA3_2_SCALING, tied=True)


def llama3_2_3b() -> Decoder:
    return _published(28, 3072, 8192, 24, 8, scaling=_LLAMA3_2_SCALING, tied=True)


def llama3_3_70b() -> Decoder:
    return _published(80, 8192, 28672, 64, 8, scaling=_LLAMA3_1_SCALING)


def smollm2_135m() -> Decoder:
    return _published(30, 576, 1536, 9, 3, vocab=49152, theta=1e5, context=8192, tied=True)


def smollm2_360m() -> Decoder:
    return _published(32, 960, 2560, 15, 5, vocab=49152, theta=1e5, context=8192, tied=True)


def smollm2_1_7b() -> Decoder:
    return _published(24, 2048, 8192, 32, 32, vocab=49152, theta=130000.0, context=8192, tied=True)

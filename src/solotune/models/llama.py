"""Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2: pre-norm blocks, grouped queries, gated feed-forward.

Shapes: B batch, S tokens, D width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from solotune.errors import CheckpointError
from solotune.models.attention import Attention, Context
from solotune.models.decoder import Block, Decoder
from solotune.models.feed_forward import GatedFeedForward
from solotune.models.norm import RMSNorm
from solotune.models.rope import Rotary, rope_settings

# What config.json may hold without a say in the forward pass of a training step.
INERT_FIELDS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache initializer_range "
    "bos_token_id eos_token_id pad_token_id max_position_embeddings _name_or_path "
    "is_llama_config rope_interleaved transformers.js_config return_dict output_hidden_states "
    "output_attentions".split()
)
_READ_FIELDS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters "
    "tie_word_embeddings attention_bias mlp_bias".split()
)
# Fields that would change the result, with the values under which they do not.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "pretraining_tp": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    # of derived families whose folders still say `llama`
    "use_sliding_window": (False, None),
    "qk_norm": (False, None),
    "use_qk_norm": (False, None),
    "num_experts": (0, 1, None),
    "num_local_experts": (0, 1, None),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "logits_scaling": (1, 1.0, None),
    "logit_scale": (1, 1.0, None),
    "original_max_position_embeddings": (None,),  # belongs into the rope scaling
}
KNOWN_FIELDS = INERT_FIELDS | _READ_FIELDS | frozenset(_NEUTRAL_VALUES)


# What a field must be for the model to be built; None is no value where there is a default.
_FIELD_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a whole number above 0",
        lambda value: type(value) is int and value > 0,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads",
    ),
    (
        "a whole number above 0 or null",
        lambda value: value is None or (type(value) is int and value > 0),
        "num_key_value_heads head_dim",
    ),
    ("a number above 0", lambda value: type(value) in (int, float) and value > 0, "rms_norm_eps"),
    (
        "a number above 0 or null",
        lambda value: value is None or (type(value) in (int, float) and value > 0),
        "rope_theta",
    ),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "tie_word_embeddings attention_bias mlp_bias",
    ),
    (
        "an object or null",
        lambda value: value is None or isinstance(value, dict),
        "rope_scaling rope_parameters",
    ),
)


class LlamaBlock(Block):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(
            width,
            num_heads=config["num_attention_heads"],
            num_kv_heads=_kv_heads(config),
            head_dim=_head_dim(config),
            index=index,
            bias=config.get("attention_bias", False),
        )
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedFeedForward(
            width, config["intermediate_size"], bias=config.get("mlp_bias", False)
        )

    def layer(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), context)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


def llama(config: dict[str, Any]) -> Decoder:
    """Build the model that a parsed config.json of model_type `llama` describes.

    Raises CheckpointError for a field whose value would change the result and is not supported.
    """
    for kind, fits, fields in _FIELD_KINDS:
        for field in fields.split():
            if field in config and not fits(config[field]):
                raise CheckpointError(
                    f"config.json: {field}={config[field]!r} is not {kind}: fetch the file again"
                )
    for field, neutral in _NEUTRAL_VALUES.items():
        if field in config and config[field] not in neutral:
            raise CheckpointError(
                f"config.json: {field}={config[field]!r} is not supported for llama models"
                f" (supported: {', '.join(map(repr, neutral))})"
            )
    head_dim, heads, kv_heads = _head_dim(config), config["num_attention_heads"], _kv_heads(config)
    if head_dim % 2 or heads % kv_heads:
        raise CheckpointError(
            f"config.json: a head_dim of {head_dim} and {heads} heads over {kv_heads} key/value "
            "heads is no model: head_dim is even, and heads a multiple of key/value heads"
        )
    return Decoder(
        [LlamaBlock(config, index) for index in range(config["num_hidden_layers"])],
        norm=RMSNorm(config["hidden_size"], config.get("rms_norm_eps", 1e-6)),
        rotary=Rotary(head_dim, rope_settings(config)),
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        tied=config.get("tie_word_embeddings", False),
        cache_heads=kv_heads,
        head_dim=head_dim,
        config=config,
    )


def described(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward pass takes from a config, however it is spelled."""
    return {
        "num_hidden_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "head_dim": _head_dim(config),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        **rope_settings(config),
    }


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_heads(config: dict[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


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

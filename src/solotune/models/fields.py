"""Fields of config.json: which a family reads, and which must have a value that changes nothing.

A config says what the model was trained as. A field that would change the result and is not
followed stops the run; one that nobody here knows is named in the log by `auto`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from solotune.errors import CheckpointError
from solotune.models.rope import rope_settings

REQUIRED: Any = object()

# Of every family: these have no default, unless the family's folders leave them out.
SIZES = dict.fromkeys(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split(),
    REQUIRED,
)
ROPE = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}

# What config.json may hold without a say in the forward pass of a training step.
_INERT = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache initializer_range "
    "bos_token_id eos_token_id pad_token_id _name_or_path is_llama_config rope_interleaved "
    "transformers.js_config return_dict output_hidden_states output_attentions auto_map "
    "max_window_layers cache_implementation quantization_config".split()
)
_NO = (None, False)
_ZERO = (None, 0)
_ONE = (None, 1)
# Fields of some family or other that would change the result, with the values that do not. A
# family that reads one of them takes it out of this table.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": (None, "silu"),
    "attention_dropout": _ZERO,
    "resid_pdrop": _ZERO,
    "embd_pdrop": _ZERO,
    "pretraining_tp": _ONE,
    "attention_bias": _NO,
    "mlp_bias": _NO,
    "lm_head_bias": _NO,
    "sliding_window": (None,),
    "use_sliding_window": _NO,
    "layer_types": (None,),
    "no_rope_layers": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "partial_rotary_factor": _ONE,
    "rope_local_base_freq": (None,),
    "original_max_position_embeddings": (None,),  # belongs into the rope scaling
    "use_bidirectional_attention": _NO,
    "qk_norm": _NO,
    "use_qk_norm": _NO,
    "use_mrope": _NO,
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "attention_multiplier": (None,),
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "logits_scaling": _ONE,
    "logit_scale": _ONE,
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


# What a field must be for the model to be built.
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a whole number above 0",
        lambda value: type(value) is int and value > 0,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "no_rope_layer_interval sliding_window_pattern",
    ),
    (
        "a whole number above 0 or null",
        lambda value: value is None or (type(value) is int and value > 0),
        "num_key_value_heads head_dim sliding_window max_position_embeddings "
        "original_max_position_embeddings",
    ),
    ("a whole number", lambda value: type(value) is int, "max_window_layers"),
    (
        "a number above 0",
        lambda value: _is_number(value) and value > 0,
        "rms_norm_eps query_pre_attn_scalar",
    ),
    (
        "a number above 0 or null",
        lambda value: value is None or (_is_number(value) and value > 0),
        "rope_theta rope_local_base_freq partial_rotary_factor attn_logit_softcapping "
        "final_logit_softcapping",
    ),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "tie_word_embeddings attention_bias mlp_bias use_sliding_window",
    ),
    (
        "an object or null",
        lambda value: value is None or isinstance(value, dict),
        "rope_scaling rope_parameters",
    ),
    (
        "a list or null",
        lambda value: value is None or isinstance(value, list),
        "layer_types no_rope_layers",
    ),
)
_KIND_OF = {field: kind for kind in _KINDS for field in kind[2].split()}


class Fields:
    """What one family knows of config.json.

    `defaults` are the fields it reads, with the values that transformers' config class has for
    them where config.json does not; `neutral` are further fields and the values under which they
    change nothing; `inert` are names that change nothing whatever they hold.
    """

    def __init__(
        self,
        family: str,
        *,
        defaults: Mapping[str, Any],
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
        inert: str = "",
    ) -> None:
        self.family = family
        self.defaults = dict(defaults)
        ignored = frozenset(inert.split())
        neutral = _NEUTRAL | dict(neutral or {})
        self.neutral = {
            field: values
            for field, values in neutral.items()
            if field not in self.defaults and field not in ignored
        }
        self.known = _INERT | ignored | self.defaults.keys() | self.neutral.keys()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that the family reads, defaults filled in.

        Raises CheckpointError for a value that is none or would change the result unfollowed, and
        KeyError for a missing field.
        """
        for field in self.defaults:
            kind, fits, _ = _KIND_OF[field]
            if field in config and not fits(config[field]):
                raise CheckpointError(
                    f"config.json: {field}={config[field]!r} is not {kind}: fetch the file again"
                )
        _check_quantization(config.get("quantization_config"), family=self.family)
        for field, neutral in self.neutral.items():
            if field in config and config[field] not in neutral:
                raise CheckpointError(
                    f"config.json: {field}={config[field]!r} is not supported for {self.family} "
                    f"models (supported: {', '.join(map(repr, neutral))})"
                )
        values = {field: config.get(field, default) for field, default in self.defaults.items()}
        for field, value in values.items():
            if value is REQUIRED:
                raise KeyError(field)
        return values


def _check_quantization(quantization: Any, *, family: str) -> None:
    """Raise for weights that are not as they were trained, but for bitsandbytes' 4 bits.

    Which of these a folder holds, and who may train over them, is seen where they are loaded.
    """
    if quantization is None:
        return
    fields = quantization if isinstance(quantization, dict) else {}
    method = fields.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes" and fields.get("load_in_4bit") is True:
        return
    eight = {"load_in_8bit": True} if fields.get("load_in_8bit") else {}
    shown = {"quant_method": method} | eight
    raise CheckpointError(
        f"config.json: quantization_config={shown} is not supported for {family} models "
        "(supported: bitsandbytes with load_in_4bit): use the unquantised checkpoint; "
        "quantize_base=nf4 puts it into 4 bits while it loads"
    )


def one_rope(values: Mapping[str, Any], *, theta: float = 10000.0, **beside: Any) -> dict[str, Any]:
    """Return the rope settings of a family with one rotary base, however they are spelled.

    Newer folders hold `rope_parameters`; older ones `rope_theta` beside `rope_scaling`. `theta` is
    the family's default, `beside` is passed on to `rope_settings`.
    """
    settings = rope_settings(
        values["rope_scaling"] or values["rope_parameters"],
        theta=values["rope_theta"] or theta,
        max_positions=values["max_position_embeddings"],
        **beside,
    )
    if "partial_rotary_factor" in settings and "rotated_share" not in beside:
        raise CheckpointError(
            f"config.json: partial_rotary_factor={settings['partial_rotary_factor']} is not "
            "supported, only 1"
        )
    return settings


def windows(values: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for all that is before a token.

    By `layer_types`, and where config.json has none, by `slides(layer)`.
    """
    layers, window = values["num_hidden_layers"], values["sliding_window"]
    types = values.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides(k) else "full_attention" for k in range(layers)]
    if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"config.json: layer_types={types!r} is not supported: it names sliding_attention or "
            f"full_attention for each of {layers} layers"
        )
    if window is None and "sliding_attention" in types:
        raise CheckpointError(
            "config.json: layer_types names sliding_attention, and sliding_window is null: fetch "
            "the file again"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)

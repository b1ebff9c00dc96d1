"""A Hugging Face folder from a GGUF file, for demonstrations without a download of the original.

    python -m solotune.checkpoint.gguf IN.gguf OUT_FOLDER

Reads the `llama` architecture with the SmolLM tokenizer. The weights become bf16 copies of what the
file holds: precision that quantisation took away does not come back.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from solotune.checkpoint.folders import new_folder
from solotune.checkpoint.safetensors_file import SourceTensor, write_file
from solotune.checkpoint.save import write_json
from solotune.errors import CheckpointError, UserError

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

# What GGUF calls `tokenizer.ggml.pre`: the split before byte-pair merging.
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}

UNQUANTISED = {"F32", "F16", "BF16"}
CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`


def convert(gguf_path: str | Path, out_folder: str | Path) -> Path:
    """Write a Hugging Face folder with the model of a GGUF file and return its path.

    Prints what the weights are worth if they were quantised. Raises CheckpointError for a file that
    is not a GGUF file or holds a model or tokenizer that cannot be converted exactly.
    """
    source = _Source(Path(gguf_path))
    config = _config(source)
    tokenizer, tokenizer_config = _tokenizer(source)
    tensors = [_source_tensor(source, tensor) for tensor in source.reader.tensors]
    missing = _expected_names(config) - {tensor.name for tensor in tensors}
    if missing:
        raise CheckpointError(f"{source.path} lacks {min(missing)}: download or copy it again")

    quantised = Counter(tensor.tensor_type.name for tensor in source.reader.tensors)
    if set(quantised) - UNQUANTISED:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in quantised.most_common())
        print(
            f"warning: {source.path.name} holds quantised weights ({kinds} tensors). A model made "
            "from them is a demonstration; for real work start from the original checkpoint."
        )
    with new_folder(Path(out_folder)) as folder:
        write_file(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", config)
        token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(
            folder / "generation_config.json",
            {key: config[key] for key in token_ids if config[key] is not None},
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        template = source.get("tokenizer.chat_template")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Path(out_folder)


class _Source:
    """The key-value part and the tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(
                "reading GGUF files needs the package gguf: pip install gguf"
            ) from error
        self.path = path
        self.dequantize: Callable[..., np.ndarray] = gguf.dequantize
        try:
            self.reader = gguf.GGUFReader(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist: name a .gguf file") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, IndexError, KeyError) as error:  # what the reader lets through
            raise CheckpointError(f"{path} is not a complete GGUF file: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no key {key}: it cannot be converted")
        return value


def _config(source: _Source) -> dict[str, Any]:
    architecture = source.require("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{source.path} holds the architecture {architecture!r}: only 'llama' is converted"
        )
    for key in ("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count"):
        if source.get(key) not in (None, 0, "none"):
            raise CheckpointError(
                f"{source.path} sets {key}, which is not converted: use the original checkpoint"
            )
    hidden_size = source.require("llama.embedding_length")
    num_heads = source.require("llama.attention.head_count")
    num_kv_heads = source.get("llama.attention.head_count_kv", num_heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id"),
        "head_dim": source.get("llama.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": hidden_size**-0.5,
        "intermediate_size": source.require("llama.feed_forward_length"),
        "max_position_embeddings": source.require("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": source.require("llama.block_count"),
        "num_key_value_heads": num_kv_heads,
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": _shortest(source.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _shortest(source.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": all(t.name != "output.weight" for t in source.reader.tensors),
        # The old name of `dtype`: every version of transformers reads it.
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(source.require("tokenizer.ggml.tokens")),
    }


def _tokenizer(source: _Source) -> tuple[Tokenizer, dict[str, Any]]:
    model, pre = source.require("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source.path} has the tokenizer {model!r} with the split {pre!r}: only 'gpt2' with "
            f"{', '.join(map(repr, PRE_TOKENIZERS))} is converted exactly"
        )
    for key in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"):
        if source.get(key, False):
            raise CheckpointError(
                f"{source.path} sets {key}, which is not converted: use the original checkpoint"
            )
    tokens: list[str] = source.require("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, source.require("tokenizer.ggml.token_type"), strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])

    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: source.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return tokenizer, {
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.require("llama.context_length"),
        # Any more specific class builds its own split instead of the one in tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _source_tensor(source: _Source, tensor: Any) -> SourceTensor:
    name = _hf_name(source.path, tensor.name)
    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the last axis first
    heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])

    def weight() -> Tensor:
        values = source.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)
        if heads is not None:
            num_heads = source.get(f"llama.attention.{heads}")
            weight = _undo_rotary_order(weight, num_heads=num_heads)
        return weight

    return SourceTensor(name, torch.bfloat16, shape, weight)


def _undo_rotary_order(weight: Tensor, *, num_heads: int) -> Tensor:
    """Return a projection with the two rows of a rotated pair half a head apart.

    So Hugging Face's rotary embedding wants it; in llama GGUF files the two are neighbours.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # head, pair, member of the pair
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_name(path: Path, name: str) -> str:
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        if rest in BLOCK_TENSOR_NAMES:
            return f"model.layers.{layer}.{BLOCK_TENSOR_NAMES[rest]}"
    raise CheckpointError(f"{path} holds the tensor {name}, which the llama layout does not have")


def _expected_names(config: dict[str, Any]) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{name}" for name in BLOCK_TENSOR_NAMES.values()}
    return names


def _shortest(value: float) -> float:
    """Return 1e-05 for the float32 that a file shows as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m solotune.checkpoint.gguf IN.gguf OUT_FOLDER", file=sys.stderr)
        return 2
    try:
        print(convert(sys.argv[1], sys.argv[2]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

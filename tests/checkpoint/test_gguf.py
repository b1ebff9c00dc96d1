"""The converted folder is what transformers reads from the same GGUF file."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from solotune.checkpoint import load_weights
from solotune.checkpoint.gguf import convert, main
from solotune.errors import CheckpointError
from solotune.tokenizers import auto as auto_tokenizer

from .conftest import build

WIDTH, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 128, 2
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "Hello, I'll count: 007 and 12345.\n\n\tdone  ",
    "Привет, мир 2024",
    "你好，世界 １２３",  # noqa: RUF001
    "مرحبا ١٢٣ नमस्ते १२३",
    "½ Ⅷ ünïcödé é",
    "👩‍👩‍👧 emoji\u00a0\u200b\r\n",
    "<|im_start|>user\nhi<|im_end|>",
)


def write_gguf(path: Path, *, omit: str = "", **changes: Any) -> Path:
    """Write a two-layer llama GGUF file, its matrices in Q4_1."""
    tokens = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
    settings = {"architecture": "llama", "pre": "smollm", "add_bos": False} | changes
    writer = gguf.GGUFWriter(path, settings["architecture"])
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(settings["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(settings["add_bos"])
    writer.add_chat_template("{{ messages }}")

    rng = np.random.default_rng(0)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{i}.attn_k.weight": (kv_width, WIDTH),
            f"blk.{i}.attn_v.weight": (kv_width, WIDTH),
            f"blk.{i}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_gate.weight": (FEED_FORWARD, WIDTH),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, FEED_FORWARD),
        }
    shapes.pop(omit, None)
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.filterwarnings("ignore::Warning")  # transformers' own, while it reads the file
def test_weights_are_those_that_transformers_reads(gguf_path: Path, tmp_path: Path) -> None:
    folder = convert(gguf_path, tmp_path / "model")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    for field in ("rope_parameters", "head_dim", "num_key_value_heads"):
        assert getattr(ours.config, field) == getattr(theirs.config, field)


@pytest.mark.filterwarnings("ignore::Warning")
def test_token_ids_are_those_of_transformers_with_the_split_of_smollm(
    gguf_path: Path, tmp_path: Path
) -> None:
    folder = convert(gguf_path, tmp_path / "model")
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    # Left alone, transformers forgets that SmolLM splits off each digit of any script.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == text
    assert ours("<|im_end|>").input_ids == [2]
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    assert ours.chat_template == "{{ messages }}"


def test_converted_folder_loads_here(gguf_path: Path, tmp_path: Path) -> None:
    folder = convert(gguf_path, tmp_path / "model")
    model = build(folder)
    load_weights(model, folder, device="cpu")
    assert model.tied
    assert auto_tokenizer(folder).decode([1, 2]) == "<|im_start|><|im_end|>"


def test_config_names_every_field_and_the_shortest_decimals(
    gguf_path: Path, tmp_path: Path
) -> None:
    folder = convert(gguf_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is True
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_digits_of_every_script_are_split_off(gguf_path: Path, tmp_path: Path) -> None:
    folder = convert(gguf_path, tmp_path / "model")
    split = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert split is not None
    pieces = [piece for piece, _ in split.pre_tokenize_str("a 12 ١٢")]
    assert len(pieces) == 7  # a, space, 1, 2, space, ١, ٢


def test_quantised_weights_are_called_a_demonstration(
    gguf_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(gguf_path, tmp_path / "model")
    printed = capsys.readouterr().out
    assert "(15 x Q4_1, 5 x F32 tensors)" in printed
    assert "demonstration" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2': only 'llama'"),
        ({"pre": "llama-bpe"}, "split 'llama-bpe': only 'gpt2' with 'smollm'"),
        ({"add_bos": True}, "sets tokenizer.ggml.add_bos_token"),
        ({"omit": "blk.1.ffn_up.weight"}, "lacks model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(CheckpointError, match=message):
        convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("kept_bytes", [0, 3, 100, 5000, -40])
def test_damaged_file_is_one_sentence(
    gguf_path: Path,
    tmp_path: Path,
    kept_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:kept_bytes])
    monkeypatch.setattr(sys, "argv", ["gguf", str(gguf_path), str(tmp_path / "model")])
    assert main() == 1
    assert capsys.readouterr().err.startswith(f"error: {gguf_path} is not a complete GGUF file")
    assert not (tmp_path / "model").exists()


def test_without_the_gguf_package_the_repair_is_named(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="needs the package gguf: pip install gguf"):
        convert(gguf_path, tmp_path / "model")

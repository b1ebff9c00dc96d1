"""Folders in 4 bits by transformers and bitsandbytes load as they are; others say why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from solotune.adapters import four_bit_linears, quantize_linears
from solotune.checkpoint import load_weights, stored_four_bit
from solotune.errors import CheckpointError
from solotune.models import auto
from tests.models.tiny import logits, make_batch

from .four_bit_model import load, write_folder

# Multiples of 64: bitsandbytes' CPU kernels for inference take no others.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 260}
UP = "model.layers.0.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"


def write_four_bit(
    tmp_path: Path, *, kind: str = "nf4", double: bool = True, storage: str = "uint8"
) -> tuple[Path, Any]:
    """Write a folder in 4 bits; return it and the model of transformers."""
    source = write_folder(tmp_path / "source", **SIZES)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=settings
    )
    theirs.save_pretrained(tmp_path / "four_bit")
    return tmp_path / "four_bit", theirs.train()  # not the rounded kernels for inference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_four_bit(tmp_path)[0]


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({k: t.clone() for k, t in tensors.items()}, folder / "model.safetensors")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "double", "storage"),
    [
        ("nf4", True, "uint8"),
        ("nf4", False, "uint8"),
        ("fp4", True, "uint8"),
        ("nf4", True, "bfloat16"),
    ],
)
def test_a_folder_in_4_bits_has_the_logits_of_transformers(
    tmp_path: Path, kind: str, double: bool, storage: str
) -> None:
    folder, theirs = write_four_bit(tmp_path, kind=kind, double=double, storage=storage)
    model, report = load(folder, to=None)
    assert {m.layout.kind for m in four_bit_linears(model).values()} == {kind}
    assert {m.layout.double for m in four_bit_linears(model).values()} == {double}
    batch = make_batch((30,), vocab=260)
    with torch.no_grad():
        wanted = theirs(batch.tokens_BS).logits
    torch.testing.assert_close(logits(model, batch), wanted, rtol=1e-4, atol=1e-5)
    assert report.dtype_on_disk[kind] == report.dtype_loaded[kind] == report.four_bit_parameters


def test_bytes_are_those_that_quantising_while_loading_makes(tmp_path: Path, folder: Path) -> None:
    stored, quantised = load(folder)[0], load(tmp_path / "source")[0]
    for name, parameter in quantised.named_parameters():
        assert torch.equal(stored.get_parameter(name), parameter), name


def test_a_layer_that_the_folder_left_dense_stays_dense(folder: Path) -> None:
    weights = weights_of(folder)
    dense = torch.zeros(192, 64)
    kept = {key: t for key, t in weights.items() if not key.startswith(UP)}
    rewrite(folder, kept | {UP: dense})
    model, _ = load(folder)
    assert "layers.0.mlp.up_proj.weight" not in four_bit_linears(model)
    assert torch.equal(model.get_parameter("layers.0.mlp.up_proj.weight"), dense)


def test_full_fine_tuning_of_a_folder_in_4_bits_is_refused_with_the_repair(folder: Path) -> None:
    with torch.device("meta"):
        model = auto(folder)
    with pytest.raises(
        CheckpointError, match=r"in 4 bits, .*use the unquantised checkpoint, or lora"
    ):
        load_weights(model, folder, device="cpu")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("nested_blocksize", 128, "nested_blocksize is not 256"),
        ("shape", [64], "quant_state lacks or misspells"),
        ("blocksize", 0, "in blocks of 0"),
        ("shape", [64, 64], "bytes and not"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(
    folder: Path, field: str, value: Any, named: str
) -> None:
    weights = weights_of(folder)
    state = json.loads(bytes(weights[STATE].tolist())) | {field: value}
    weights[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    rewrite(folder, weights)
    with pytest.raises(CheckpointError, match=rf"{UP}.* cannot be read .*{named}"):
        stored_four_bit(folder)


def test_a_missing_part_and_foreign_values_are_refused(folder: Path) -> None:
    weights = weights_of(folder)
    model_of = dict(weights)
    weights[f"{UP}.quant_map"] = weights[f"{UP}.quant_map"] * 2
    rewrite(folder, weights)
    with pytest.raises(CheckpointError, match=r"quant_map.*its values are not bitsandbytes' own"):
        load(folder)
    del model_of[f"{UP}.absmax"]
    rewrite(folder, model_of)
    with pytest.raises(CheckpointError, match=f"stored without {UP}.absmax"):
        load(folder)


def test_sizes_of_another_config_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with torch.device("meta"):
        model = auto(folder)
    with pytest.raises(CheckpointError, match="the two do not belong together"):
        quantize_linears(model, stored=stored_four_bit(folder))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors"])
def test_other_quantised_checkpoints_are_refused_in_one_sentence(
    tmp_path: Path, method: str
) -> None:
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=f"'{method}'.* use the unquantised checkpoint; .*nf4"
    ):
        auto(folder)


def test_eight_bits_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"load_in_8bit.*supported: bitsandbytes with load_in"
    ):
        auto(folder)

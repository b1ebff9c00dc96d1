"""A merged folder is the adapted model, and nothing else of the base changed.

Shapes: V vocabulary, D width.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from solotune.checkpoint import load_weights
from solotune.checkpoint.merge import merge
from solotune.models import auto

from .peft_oracle import (
    adapted_model,
    distance,
    hf_model,
    make_adapter,
    our_logits,
    peft_logits,
    tokens,
)

Make = Callable[..., Path]

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"o_proj": 3}},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "both ends, dora": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True},
}


def shard(folder: Path) -> None:
    """Cut the weights of a folder in two files with an index, as large models have them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, held in files.items():
        part = {name: tensors[name] for name in held}
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def headers(folder: Path) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Return dtype and shape of every tensor by file and name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found[path.name] = {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()}
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_logits_are_those_of_the_adapted_model(
    make_folder: Make, tmp_path: Path, kind: str, tied: bool
) -> None:
    base = make_folder(dtype=torch.float32, torch_dtype="float32", tie_word_embeddings=tied)
    adapter = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    before = contents(base), contents(adapter)
    wanted = our_logits(adapted_model(base, adapter))
    merge(base, adapter, tmp_path / "merged")
    assert (contents(base), contents(adapter)) == before
    model = auto(tmp_path / "merged").to("meta")
    load_weights(model, tmp_path / "merged", device="cpu")
    assert distance(our_logits(model), wanted) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            theirs = hf_model(tmp_path / "merged")(tokens()).logits
    assert distance(theirs, wanted) < 1e-5
    if not tied:  # PEFT adds to both of two tied weights
        assert distance(theirs, peft_logits(base, adapter, merged=True)) < 1e-5


def test_a_bf16_model_stays_one_in_the_same_files(make_folder: Make, tmp_path: Path) -> None:
    """Field cases 17 and 18."""
    base = make_folder(dtype=torch.bfloat16)
    shard(base)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    report = merge(base, adapter, tmp_path / "merged")
    assert report.num_layers == 2
    assert headers(tmp_path / "merged") == headers(base)
    assert (tmp_path / "merged/config.json").read_bytes() == (base / "config.json").read_bytes()
    ours, theirs = (
        {
            name: t
            for file in sorted(folder.glob("*.safetensors"))
            for name, t in load_file(file).items()
        }
        for folder in (tmp_path / "merged", base)
    )
    changed = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert changed == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    stored = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    delta = 3 * stored[f"{prefix}B.weight"].double() @ stored[f"{prefix}A.weight"].double()
    exact = theirs[changed[0]].double() + delta
    rounding = (ours[changed[0]].double() - exact).abs() / exact.abs()
    assert rounding.max() <= 2**-8 * 1.001, "added in fp32, rounded once"
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in theirs.values())
    assert hf_model(tmp_path / "merged").config.dtype == torch.float32  # asked for

"""A merged folder is the adapted model, and nothing else of the base changed.

Shapes: V vocabulary, D width.
"""

import json
import os
import shutil
import subprocess
import sys
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
from solotune.checkpoint import merge as merge_module
from solotune.checkpoint.base_model import fingerprint
from solotune.checkpoint.merge import merge
from solotune.errors import CheckpointError
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
    make_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tied: bool
) -> None:
    monkeypatch.setattr(merge_module, "PIECE_BYTES", 5000)  # many pieces, the last ones shorter
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


def test_head_and_embedding_that_part_are_stored_and_said(
    make_folder: Make, tmp_path: Path
) -> None:
    base = make_folder(tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    report = merge(base, adapter, tmp_path / "merged")
    assert any("tie_word_embeddings is false" in line for line in report.lines())
    old, new = (json.loads((f / "config.json").read_text()) for f in (base, tmp_path / "merged"))
    assert new == old | {"tie_word_embeddings": False}
    merged, stored = weights(tmp_path / "merged"), weights(base)
    assert torch.equal(merged["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert merged.keys() - stored.keys() == {"lm_head.weight"}


def test_tokenizer_and_terminators_of_the_adapter_take_their_place(
    make_folder: Make, tmp_path: Path, write_tokenizer
) -> None:
    base = make_folder()
    (base / "LICENSE").write_text("free")
    (base / "run_me.py").write_text("print('no')")
    (base / "added_tokens.json").write_text("{}")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merge(base, adapter, tmp_path / "plain")
    assert (tmp_path / "plain/added_tokens.json").is_file()
    write_tokenizer(adapter, template="{{ messages }}")
    (adapter / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
    merge(base, adapter, tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {
        *("LICENSE", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    settings = json.loads((tmp_path / "merged/tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert json.loads((tmp_path / "merged/config.json").read_text())["eos_token_id"] == [257, 259]


def test_weights_in_bin_files_become_safetensors(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder(dtype=torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merge(base, adapter, tmp_path / "wanted")
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    merge(base, adapter, tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("*.bin"))
    wanted, found = weights(tmp_path / "wanted"), weights(tmp_path / "merged")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def refusal(base: Path, adapter: Path, out: Path) -> str:
    """Return the sentence with which a merge ends that leaves nothing behind."""
    around = sorted(out.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        merge(base, adapter, out)
    assert sorted(out.parent.rglob("*")) == around
    return str(caught.value)


def test_a_wrong_base_is_refused(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    adapter = make_adapter(base, tmp_path / "adapter")
    out = tmp_path / "out"
    wide = make_folder("wide", intermediate_size=256)
    assert "has the shape [4, 128] where the base model and r=4 ask for [4, 256]" in refusal(
        wide, adapter, out
    )
    short = make_folder("short", num_hidden_layers=1)
    assert "adapts model.layers.1.mlp.down_proj, which the base model does not have" in refusal(
        short, adapter, out
    )
    deep = make_folder("deep", num_hidden_layers=3)
    assert "lacks the tensors of model.layers.2.self_attn.q_proj" in refusal(deep, adapter, out)
    assert "holds an adapter, not a model" in refusal(adapter, adapter, out)
    assert f"{base} holds no adapter_config.json" in refusal(base, base, out)


def test_other_weights_of_the_same_shape_are_told_apart(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    mark = {"format": "pt", "base_fingerprint": fingerprint(base)}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata=mark)
    merge(base, adapter, tmp_path / "merged")
    copy = shutil.copytree(base, tmp_path / "copy")
    shard(copy)
    wide = {n: t.float() for n, t in load_file(copy / "model-00001-of-00002.safetensors").items()}
    save_file(wide, copy / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    report = merge(copy, adapter, tmp_path / "from copy")
    assert report.notes == [f"the adapter names {base} as its base, and was merged into {copy}"]
    tuned = weights(base)
    tuned["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tuned, copy / "model.safetensors", metadata={"format": "pt"})
    assert "was trained on other weights than those in" in refusal(copy, adapter, tmp_path / "no")


def test_quantised_weights_take_no_adapter_in(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    four_bit = shutil.copytree(base, tmp_path / "4bit")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (four_bit / "config.json").write_text(json.dumps(config))
    assert refusal(four_bit, adapter, tmp_path / "out").endswith(
        "4bit holds quantised weights, which cannot take an adapter in: name as BASE the "
        "unquantised model that they were made from"
    )


def test_a_folder_that_holds_something_is_not_written_to(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    assert "adapter is not empty" in refusal(base, adapter, adapter)
    (tmp_path / "empty").mkdir()
    merge(base, adapter, tmp_path / "empty")


def test_numbers_that_are_not_finite_end_the_merge(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"][3, 2] = torch.nan
    save_file(tensors, adapter / "adapter_model.safetensors")
    said = refusal(base, adapter, tmp_path / "out")
    assert "layers.1.self_attn.v_proj.lora_B.weight holds numbers that are not finite" in said


def test_a_weight_trained_beside_the_adapter_is_refused(make_folder: Make, tmp_path: Path) -> None:
    """PEFT stores the frozen embedding beside an adapted one; it must be the base's."""
    base = make_folder()
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.base_layer.weight"][300, 1] += 1
    save_file(tensors, adapter / "adapter_model.safetensors")
    said = refusal(base, adapter, tmp_path / "out")
    assert "holds a embed_tokens that differs from the base model's" in said


MEASURE = """
import json, sys, threading, time
from pathlib import Path
import torch
from solotune.checkpoint.merge import merge
from solotune.models import auto

def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

with torch.device("meta"):
    auto(sys.argv[1])  # what torch imports on the first call is no part of the merge
before = peak = anonymous_bytes()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
merge(*sys.argv[1:])
done = True
thread.join()
print(json.dumps({"rise": peak - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("dora", [False, True])
def test_merging_needs_less_memory_than_one_tensor(
    make_folder: Make, tmp_path: Path, dora: bool
) -> None:
    """Two tensors of 33 MB become new, 66 MB each in fp32; a piece has 4 MB."""
    vocab_size, width = 32000, 512
    base = make_folder(vocab_size=vocab_size, hidden_size=width, tie_word_embeddings=True)
    shapes = {
        "lm_head.lora_A.weight": (8, width),
        "lm_head.lora_B.weight": (vocab_size, 8),
        "model.embed_tokens.lora_embedding_A": (8, vocab_size),
        "model.embed_tokens.lora_embedding_B": (width, 8),
    }
    if dora:
        shapes |= {
            "lm_head.lora_magnitude_vector": (vocab_size,),
            "model.embed_tokens.lora_magnitude_vector": (width,),
        }
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {f"base_model.model.{name}": torch.rand(shape) for name, shape in shapes.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["lm_head", "embed_tokens"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": dora}))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(base), str(adapter), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert json.loads(result.stdout)["rise"] < 33e6

"""Writing model folders: what other tools find in them."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from solotune.checkpoint import Checkpointer
from solotune.checkpoint.safetensors_file import DTYPES, SourceTensor, read_header, write_file
from solotune.checkpoint.save import (
    saved_config,
    weight_sources,
    with_terminators,
    write_weights,
)
from solotune.models.decoder import Decoder
from solotune.tokenizers import auto as auto_tokenizer

from .conftest import build

Make = Callable[..., Path]


def save_once(folder: Path, output_dir: Path, *, eos_ids: list[int]) -> tuple[Decoder, Path]:
    """Load `folder`, move every weight, save; return the model and the step folder."""
    checkpointer = Checkpointer(folder, output_dir)
    model = build(folder)
    checkpointer.load_weights(model, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tokenizer = auto_tokenizer(folder)
    tokenizer.stop_ids = lambda: eos_ids
    saved = checkpointer.save(
        1,
        model=model,
        optimizer=optimizer,
        progress={"step": 1},
        dtype=torch.bfloat16,
        tokenizer=tokenizer,
    )
    return model, saved


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length])


def test_saved_folder_opens_in_transformers_without_a_warning(
    make_folder: Make, tmp_path: Path
) -> None:
    folder = make_folder(tie_word_embeddings=True)
    model, saved = save_once(folder, tmp_path / "run", eos_ids=[259])
    script = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
model, facts = AutoModelForCausalLM.from_pretrained({str(saved)!r}, output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained({str(saved)!r})
assert not any(facts.values()), facts
print(model.dtype, model.generation_config.eos_token_id, tokenizer.chat_template[:8])
print(float(model.model.layers[1].mlp.up_proj.weight.detach().double().sum()))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "[transformers]" not in result.stderr  # the mark of its own warnings
    first, total = result.stdout.splitlines()
    assert first == "torch.bfloat16 [257, 259] {% for m"
    ours = dict(model.named_parameters())["layers.1.mlp.up_proj.weight"]
    assert float(total) == float(ours.detach().double().sum())


def test_saved_weights_are_all_in_the_dtype_asked_for(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    model, saved = save_once(folder, tmp_path / "run", eos_ids=[257])
    weights = load_file(saved / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[model.to_hf_key(name)], parameter.bfloat16())
    before = (folder / "model.safetensors").stat().st_size
    assert (saved / "model.safetensors").stat().st_size == pytest.approx(before, rel=0.01)


def test_only_changed_config_fields_differ(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    _, saved = save_once(folder, tmp_path / "run", eos_ids=[259])
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((saved / "config.json").read_text())
    assert after == before | {"eos_token_id": [257, 259]}
    assert list(after) == list(before)
    assert after["x_note"] == 1
    assert after["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("names", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_dtype_is_saved_under_the_name_that_is_there(names: tuple[str, ...]) -> None:
    config = dict.fromkeys(names, "float32") | {"x": 1}
    saved = saved_config(config, dtype=torch.bfloat16, eos_ids=[])
    assert saved == dict.fromkeys(names, "bfloat16") | {"x": 1}


@pytest.mark.parametrize(
    ("before", "trained", "after"),
    [
        (2, [2], 2),
        (2, [7, 2], [2, 7]),
        ([2, 5], [5], [2, 5]),
        ([2, 5], [9], [2, 5, 9]),
        (None, [9], 9),
        (None, [9, 10], [9, 10]),
    ],
)
def test_trained_terminators_are_added_to_the_end_of_sequence_ids(
    before: object, trained: list[int], after: object
) -> None:
    config = with_terminators({"eos_token_id": before, "top_p": 0.9}, trained)
    assert config == {"eos_token_id": after, "top_p": 0.9}


def test_generation_config_keeps_its_fields(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    fields = {"eos_token_id": 257, "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    _, saved = save_once(folder, tmp_path / "run", eos_ids=[259])
    after = json.loads((saved / "generation_config.json").read_text())
    assert after == fields | {"eos_token_id": [257, 259]}


def test_shared_storage_is_saved_once_and_views_contiguous(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    named = {"embed.weight": weight, "head.weight": weight, "turned.weight": weight.T}
    write_weights(tmp_path, weight_sources(named.items(), dtype=torch.float32))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {"embed.weight", "turned.weight"}
    assert torch.equal(saved["turned.weight"], weight.T)


def test_shards_stay_below_their_size_and_say_pt(tmp_path: Path) -> None:
    named = {f"layers.{i}.weight": torch.full((10, 10), float(i)) for i in range(7)}
    named["large.weight"] = torch.ones(1000)
    write_weights(tmp_path, weight_sources(named.items(), dtype=torch.float32), shard_bytes=3 * 400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 400 + 4000
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)
    ]
    found: dict[str, Tensor] = {}
    for path in shards:
        assert header(path)["__metadata__"] == {"format": "pt"}
        with safe_open(path, framework="pt") as file:
            assert {index["weight_map"][name] for name in file.keys()} == {path.name}  # noqa: SIM118
        found |= load_file(path)
    assert set(found) == set(named)
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


def test_every_dtype_and_odd_size_survives(tmp_path: Path) -> None:
    """The package's own reader checks alignment and that no byte is left over."""
    named = {}
    for code, dtype in DTYPES.items():
        named[f"{code} ä"] = torch.arange(3).to(torch.float32).to(dtype)
        named[f"{code} scalar"] = torch.ones(()).to(dtype)
        named[f"{code} empty"] = torch.ones(0, 4).to(dtype)
    path = tmp_path / "all.safetensors"
    write_file(
        path,
        [SourceTensor(n, t.dtype, tuple(t.shape), lambda t=t: t) for n, t in named.items()],
    )
    theirs, ours = load_file(path), read_header(path)
    assert set(theirs) == set(ours) == set(named)
    for name, tensor in named.items():
        for read in (theirs[name], ours[name].read()):
            assert read.dtype == tensor.dtype
            assert read.shape == tensor.shape
            assert torch.equal(read.float(), tensor.float())


MEASURE_SAVE = """
import sys, threading, time
from pathlib import Path
import torch
from solotune.checkpoint.save import weight_sources, write_weights

def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

named = {str(i): torch.ones(2048, 4096, dtype=torch.bfloat16) for i in range(12)}
before = peak = anonymous_bytes()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
dtype = getattr(torch, sys.argv[2])
write_weights(Path(sys.argv[1]), weight_sources(named.items(), dtype=dtype))
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("dtype", "tensors"), [("bfloat16", 0), ("float32", 1)])
def test_saving_needs_one_cast_tensor(tmp_path: Path, dtype: str, tensors: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE_SAVE, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    slack = 4 * 2**20
    assert int(result.stdout) < tensors * 2048 * 4096 * 4 + slack

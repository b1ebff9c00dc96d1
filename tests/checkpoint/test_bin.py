"""Folders whose weights are in .bin files: read as safetensors are, and nothing in them runs."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from solotune.checkpoint import load_weights
from solotune.checkpoint.bin_file import read_bin
from solotune.errors import CheckpointError

from .conftest import build

Make = Callable[..., Path]


def to_bin(folder: Path, *, shards: int = 1, **options: Any) -> dict[str, Tensor]:
    """Replace model.safetensors by .bin files; return the weights."""
    single = folder / "model.safetensors"
    weights = safetensors.torch.load(single.read_bytes())
    single.unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin", **options)
        return weights
    names, weight_map = sorted(weights), {}
    for number in range(shards):
        shard = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = names[number::shards]
        torch.save({name: weights[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return weights


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_bin_files_are_read_as_safetensors_are(
    make_folder: Make, shards: int, stored: torch.dtype
) -> None:
    folder = make_folder(dtype=stored)
    weights = to_bin(folder, shards=shards)
    model = build(folder)
    report = load_weights(model, folder, device="cpu")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[model.to_hf_key(name)].to(parameter.dtype)), name
    assert list(report.dtype_on_disk) == [str(stored).removeprefix("torch.")]


def test_safetensors_are_read_where_a_folder_holds_both(make_folder: Make) -> None:
    folder = make_folder()
    torch.save({"nothing": torch.ones(1)}, folder / "pytorch_model.bin")
    load_weights(build(folder), folder, device="cpu")


def test_tied_weights_that_share_memory_and_views_are_read(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=True)
    weights = to_bin(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].T.contiguous().T  # another layout, the same values
    torch.save(weights, folder / "pytorch_model.bin")
    model = build(folder)
    load_weights(model, folder, device="cpu")
    assert torch.equal(dict(model.named_parameters())["layers.0.mlp.up_proj.weight"], weights[name])


class RunsWhenRead:
    """What a pickle can do to whoever trusts it."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_code_in_a_bin_file_does_not_run(make_folder: Make, tmp_path: Path) -> None:
    folder, made = make_folder(), tmp_path / "made"
    weights: dict[str, Any] = dict(to_bin(folder))
    torch.save(weights | {"x": RunsWhenRead(made)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .* weights_only=True"):
        load_weights(build(folder), folder, device="cpu")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(RunsWhenRead(made)))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .* weights_only=True"):
        load_weights(build(folder), folder, device="cpu")
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no file of tensors"),
        (b"PK\x03\x04 cut off", "no file of tensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no file of tensors"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_bin(path)


def test_what_is_no_tensor_by_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save([torch.ones(2)], path)
    with pytest.raises(CheckpointError, match="holds a list"):
        read_bin(path)
    torch.save({"step": 3}, path)
    with pytest.raises(CheckpointError, match="'step' is no plain tensor but int"):
        read_bin(path)
    torch.save({"x": torch.ones(2, 2).to_sparse()}, path)
    with pytest.raises(CheckpointError, match=r"'x' is no plain tensor but torch\.sparse_coo"):
        read_bin(path)
    torch.save({"x": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="no file of tensors"):
        read_bin(path)


def test_shards_cannot_leave_their_folder(make_folder: Make) -> None:
    folder = make_folder()
    to_bin(folder, shards=2)
    index = folder / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../x.bin"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="leaves its folder"):
        load_weights(build(folder), folder, device="cpu")


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_values_stay_in_the_file_until_they_are_copied(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({str(k): torch.full((2**22,), float(k)) for k in range(4)}, path)  # 16 MiB each
    before = anonymous_bytes()
    tensors = read_bin(path)
    target = torch.empty(2**22)
    for k, tensor in enumerate(tensors.values()):
        tensor.read_into(target)
        assert target[-1] == k
    assert anonymous_bytes() - before < 24 * 2**20  # the target, and slack

"""Reading weights: what is read, what is refused, what it costs."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from solotune.checkpoint import load_weights, model_folder
from solotune.checkpoint.safetensors_file import read_header
from solotune.errors import CheckpointError
from solotune.models.decoder import Decoder

from .conftest import build

Make = Callable[..., Path]


def load(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    model = build(folder, dtype=dtype)
    load_weights(model, folder, device="cpu")
    return model


def weights_of(folder: Path) -> dict[str, Tensor]:
    # Not `load_file`: it maps the file, and some tests write to it.
    return safetensors.torch.load((folder / "model.safetensors").read_bytes())


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two shards; return the index's weight map."""
    weights = weights_of(folder)
    names = sorted(weights)
    weight_map = {}
    for number, part in enumerate((names[:7], names[7:]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_loaded(model: Decoder, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        stored = weights[model.to_hf_key(name)]
        assert torch.equal(parameter, stored.to(parameter.dtype)), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32])
def test_parameters_hold_the_file_in_the_dtype_they_were_built_with(
    make_folder: Make, stored: torch.dtype, trained: torch.dtype
) -> None:
    folder = make_folder(dtype=stored)
    model = load(folder, dtype=trained)
    assert_loaded(model, weights_of(folder))
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {trained}
    assert {p.dtype for p in model.parameters() if p.ndim == 1} == {torch.float32}


def test_report_counts_parameters_by_dtype_on_disk_and_loaded(make_folder: Make) -> None:
    folder = make_folder(dtype=torch.float16)
    model = build(folder)
    report = load_weights(model, folder, device="cpu")
    norms = 5 * 64
    assert report.dtype_on_disk == {"float16": report.num_parameters}
    assert report.dtype_loaded == {"bfloat16": report.num_parameters - norms, "float32": norms}
    assert "float16" in report.lines()[1]
    assert "320 float32" in report.lines()[1]


def test_parameter_objects_stay_the_same(make_folder: Make) -> None:
    folder = make_folder()
    model = build(folder)
    before = dict(model.named_parameters())
    load_weights(model, folder, device="cpu")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_shards_are_read_through_their_index(make_folder: Make) -> None:
    folder = make_folder()
    weights = weights_of(folder)
    write_shards(folder)
    assert_loaded(load(folder), weights)


def test_folder_of_links_is_read(make_folder: Make, tmp_path: Path) -> None:
    """The download cache of the Hugging Face Hub is one."""
    folder = make_folder()
    weights = weights_of(folder)
    write_shards(folder)
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    assert_loaded(load(links), weights)


@pytest.mark.parametrize("metadata", [None, {}])
def test_file_without_metadata_is_read(make_folder: Make, metadata: dict | None) -> None:
    folder = make_folder()
    path = folder / "model.safetensors"
    weights = weights_of(folder)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    assert_loaded(load(folder), weights)


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(make_folder: Make) -> None:
    folder = make_folder()
    weights = weights_of(folder)
    rewrite(folder, weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_loaded(load(folder), weights)


def test_tied_checkpoint_with_an_equal_output_weight_loads_tied(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=True)
    weights = weights_of(folder)
    rewrite(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    model = load(folder)
    assert model.output_weight is model.embed_tokens.weight
    assert_loaded(model, weights)


def test_tied_checkpoint_with_another_output_weight_is_refused(make_folder: Make) -> None:
    folder = make_folder(tie_word_embeddings=True)
    weights = weights_of(folder)
    other = weights["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1
    rewrite(folder, weights | {"lm_head.weight": other})
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs .* tie_word_embeddings"):
        load(folder)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def replace_by_text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)


def drop_a_tensor(folder: Path) -> None:
    weights = weights_of(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, weights)


def drop_the_head(folder: Path) -> None:
    weights = weights_of(folder)
    del weights["lm_head.weight"]
    rewrite(folder, weights)


def add_a_tensor(folder: Path) -> None:
    rewrite(folder, weights_of(folder) | {"model.layers.2.mlp.up_proj.weight": torch.ones(2)})


def reshape(folder: Path) -> None:
    weights = weights_of(folder)
    weights["model.norm.weight"] = weights["model.norm.weight"][:63].clone()
    rewrite(folder, weights)


def quantise(folder: Path) -> None:
    weights = weights_of(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    rewrite(folder, weights)


def lose_a_shard(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def misplace_in_index(folder: Path) -> None:
    weight_map = write_shards(folder)
    write_index(folder, weight_map | {"model.norm.weight": "model-00001-of-00002.safetensors"})


def leave_the_folder(folder: Path) -> None:
    weight_map = write_shards(folder)
    write_index(folder, weight_map | {"model.norm.weight": "../model-00002-of-00002.safetensors"})


def break_the_index(folder: Path) -> None:
    write_shards(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1, 2')


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model\.safetensors is truncated or damaged \(model.* would end at byte"),
        (cut_in_header, r"model\.safetensors is truncated or damaged \(its header"),
        (empty, r"model\.safetensors is truncated or damaged \(it has only 0 bytes"),
        (replace_by_text, r"model\.safetensors is a Git LFS pointer"),
        (drop_a_tensor, r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight: "),
        (drop_the_head, r"lacks the weights lm_head\.weight: set tie_word_embeddings"),
        (add_a_tensor, r"model\.safetensors holds model\.layers\.2\.mlp\.up_proj\.weight"),
        (reshape, r"model\.norm\.weight has the shape \[63\] where config\.json .* \[64\]"),
        (quantise, r"model\.layers\.0\.mlp\.up_proj\.weight is stored as float8_e4m3fn"),
        (lose_a_shard, r"model-00002-of-00002\.safetensors does not exist"),
        (misplace_in_index, r"00001-of-00002\.safetensors lacks model\.norm\.weight"),
        (leave_the_folder, r"\.\./model-00002-of-00002\.safetensors', which leaves its folder"),
        (break_the_index, r"index\.json is not a readable index"),
        (no_weights, r"neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_damaged_folder_is_refused_by_file_and_tensor(
    make_folder: Make, damage: Callable[[Path], None], message: str
) -> None:
    folder = make_folder()
    damage(folder)
    model = build(folder)
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, folder, device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 400), replacement=st.binary(min_size=1, max_size=8))
def test_a_header_of_any_bytes_is_read_or_refused(
    tmp_path: Path, position: int, replacement: bytes
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    content[position : position + len(replacement)] = replacement
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    for tensor in tensors.values():
        tensor.read()


def test_buffer_left_on_meta_is_refused(make_folder: Make) -> None:
    folder = make_folder()
    model = build(folder)
    model.register_buffer("scale", torch.ones(1, device="meta"))
    with pytest.raises(RuntimeError, match=r"scale .* still on meta"):
        load_weights(model, folder, device="cpu")


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file, not a folder"):
        model_folder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        model_folder(tmp_path / "nowhere")


MEASURE_LOAD = """
import json, sys, threading, time
from pathlib import Path
import torch
from solotune.checkpoint import load_weights
sys.path.insert(0, sys.argv[2])
from conftest import build

def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
model = build(folder, dtype=getattr(torch, sys.argv[3]))
before = peak = anonymous_bytes()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
load_weights(model, folder, device="cpu")
done = True
thread.join()
sizes = [p.numel() * p.element_size() for p in model.parameters()]
print(json.dumps({"rise": peak - before, "model": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_loading_needs_the_model_and_one_tensor(make_folder: Make, stored: torch.dtype) -> None:
    """About 400 MB of bf16 parameters; cast ones pass the host in their dtype on disk."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10}
    folder = make_folder(dtype=stored, vocab_size=32000, **sizes)
    here = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE_LOAD, str(folder), here, "bfloat16"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    measured = json.loads(result.stdout)
    print(measured)
    assert measured["model"] > 390e6
    one_tensor = measured["largest"] * stored.itemsize // 2
    allocator_slack = 4 * 2**20
    assert measured["rise"] < measured["model"] + one_tensor + allocator_slack

"""adapter_config.json as PEFT means it; what is not supported or damaged is one sentence."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from solotune.adapters import LoRA
from solotune.checkpoint.adapter_config import read_adapter_config, written_config
from solotune.checkpoint.stored_adapter import check_fit, read_adapter
from solotune.errors import CheckpointError

from .conftest import build

Make = Callable[..., Path]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
# As PEFT 0.21.2 writes it.
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "base_model_name_or_path": "someone/model",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    config = read_adapter_config(write(tmp_path / "adapter"))
    assert (config.base, config.rank, config.alpha, config.dropout) == ("someone/model", 4, 8, 0.1)
    assert config.targets == ("q_proj",)
    assert (config.dora, config.rslora) == (False, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("init_lora_weights", kind) for kind in ("pissa", "pissa_niter_4", "olora", "loftq")),
        *(("init_lora_weights", kind) for kind in ("corda", "lora_ga", "mica", "x", 1)),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("bias", "all"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("alora_invocation_tokens", [1]),
        ("ensure_weight_tying", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("task_type", "SEQ_CLS"),
        ("velora_config", {"scale": 1.0}),
        ("a_later_field", "on"),
    ],
)
def test_an_unsupported_field_is_refused_by_name_and_value(
    tmp_path: Path, field: str, value: Any
) -> None:
    folder = write(tmp_path / "adapter", **{field: value})
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(folder)
    assert str(caught.value).startswith(
        f"{folder}/adapter_config.json: {field}={value!r} is not supported: "
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("r", 0, "a whole number above 0 is needed"),
        ("r", True, "a whole number above 0 is needed"),
        ("r", 4.0, "a whole number above 0 is needed"),
        ("lora_alpha", "8", "a number is needed"),
        ("lora_alpha", float("nan"), "a number is needed"),
        ("use_dora", 1, "true or false is needed"),
        ("target_modules", None, "it names nothing"),
        ("target_modules", [], "it names nothing"),
        ("target_modules", [3], "a list of names is needed"),
        ("target_modules", {"q_proj": 1}, "a list of names is needed"),
        ("target_modules", "(", "no regular expression"),
        ("layers_to_transform", ["1"], "the numbers of layers are needed"),
        ("layers_to_transform", [-1], "the numbers of layers are needed"),
        ("layers_pattern", "(a+)+", "only plain names are supported"),
        ("rank_pattern", {"q_proj": 0}, "q_proj is no rank"),
        ("rank_pattern", {r".*\d": 2}, "is not supported: use plain names"),
        ("alpha_pattern", [1], "numbers by module name are needed"),
        ("base_model_name_or_path", 7, "a text is needed"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    folder = write(tmp_path / "adapter", **{field: value})
    with pytest.raises(CheckpointError, match=said) as caught:
        read_adapter_config(folder)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "PREFIX_TUNING", None, ["LORA"]])
def test_another_kind_of_adapter_is_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(CheckpointError, match=r"peft_type .* is not supported; 'LORA' is"):
        read_adapter_config(write(tmp_path / "adapter", peft_type=kind))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"LORA"', "\x00"])
def test_a_config_that_is_no_object_is_one_sentence(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter_config(folder)


NAMES = [
    *(f"model.layers.{n}.self_attn.{p}_proj" for n in range(3) for p in "qv"),
    "model.embed_tokens",
    "lm_head",
]


@pytest.mark.parametrize(
    ("adapted", "targets", "layers"),
    [
        (NAMES[:6], ["q_proj", "v_proj"], None),
        (NAMES[:6:2], ["q_proj"], None),
        ([NAMES[2], NAMES[4]], ["q_proj"], [1, 2]),
        ([NAMES[0], NAMES[3]], sorted([NAMES[0], NAMES[3]]), None),
        ([NAMES[0], "lm_head"], ["lm_head", "q_proj"], [0]),
        ([NAMES[0], "model.embed_tokens"], sorted([NAMES[0], "model.embed_tokens"]), None),
    ],
)
def test_target_modules_mean_exactly_the_adapted_layers(
    tmp_path: Path, adapted: list[str], targets: list[str], layers: list[int] | None
) -> None:
    lora = LoRA(rank=4, alpha=8)
    content = written_config(
        dict.fromkeys(adapted, (4, 2.0)), candidates=NAMES, base="b", lora=lora
    )
    assert (content["target_modules"], content["layers_to_transform"]) == (targets, layers)
    read = read_adapter_config(write(tmp_path / "adapter", **content))
    assert [name for name in NAMES if read.adapts(name)] == adapted


def test_ranks_and_alphas_of_single_layers_come_back(tmp_path: Path) -> None:
    lora = LoRA(rank=4, alpha=8, rslora=True)
    layers = {NAMES[0]: (4, lora.scaling), NAMES[2]: (16, 3 / 4), NAMES[4]: (4, 5 / 2)}
    content = written_config(layers, candidates=NAMES[:6:2], base="b", lora=lora)
    assert content["rank_pattern"] == {NAMES[2]: 16}
    assert content["alpha_pattern"] == {NAMES[2]: 3, NAMES[4]: 5}
    read = read_adapter_config(write(tmp_path / "adapter", **content))
    for name, (rank, scaling) in layers.items():
        assert (read.rank_of(name), read.scaling(name)) == (rank, scaling)


# --- damaged weight files -----------------------------------------------------------------------


@pytest.fixture
def base(make_folder: Make) -> Path:
    return make_folder()


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{part}.weight": torch.ones(shape)
        for n in (0, 1)
        for part, shape in (("A", (4, 64)), ("B", (64, 4)))
    }


def fault(base: Path, folder: Path, held: dict[str, torch.Tensor], **changes: Any) -> str:
    write(folder, **changes)
    save_file(held, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        check_fit(read_adapter(folder), build(base))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_file_is_one_sentence(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    whole = tensors()
    q1b = Q0.replace(".0.", ".1.") + ".lora_B.weight"
    lacking = {name: t for name, t in whole.items() if name != q1b}
    assert "lacks model.layers.1.self_attn.q_proj.lora_B.weight: the file is damaged" in fault(
        base, folder, lacking
    )
    half = {name: t for name, t in whole.items() if ".1." not in name}
    assert "lacks the tensors of model.layers.1.self_attn.q_proj, which" in fault(
        base, folder, half
    )
    more = whole | {Q0.replace("q_", "v_") + ".lora_A.weight": torch.ones(4, 64)}
    assert (
        "holds the tensors of model.layers.0.self_attn.v_proj, which adapter_config.json does"
        in (fault(base, folder, more))
    )
    assert "holds what, which is no part of a LoRA adapter" in fault(
        base, folder, whole | {"what": torch.ones(1)}
    )
    saved = {"base_model.model.lm_head.weight": torch.ones(320, 64)}
    assert "holds base_model.model.lm_head.weight, which is no part" in fault(
        base, folder, whole | saved
    )
    assert "has the shape [64, 5] where the base model and r=4 ask for [64, 4]" in fault(
        base, folder, whole | {q1b: torch.ones(64, 5)}
    )
    assert "has the shape [4, 64] where the base model and r=8 ask for [8, 64]" in fault(
        base, folder, whole, r=8
    )
    assert "lora_magnitude_vector: the file is damaged" in fault(base, folder, whole, use_dora=True)
    magnitude = {f"{Q0}.lora_magnitude_vector": torch.ones(64)}
    assert "lora_magnitude_vector, though use_dora is false" in fault(
        base, folder, whole | magnitude
    )
    assert "is stored as torch.int32, not as floats" in fault(
        base, folder, whole | {q1b: torch.ones(64, 4, dtype=torch.int32)}
    )
    assert "holds no adapter: copy it again" in fault(base, folder, {})


def test_a_truncated_or_missing_file_is_one_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors does not exist"):
        read_adapter(folder)
    save_file(tensors(), path)
    whole = path.read_bytes()
    for size in (4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is truncated or damaged"):
            read_adapter(folder)
    path.write_bytes(struct.pack("<Q", 2) + b"[]")
    with pytest.raises(CheckpointError, match="its header is not readable"):
        read_adapter(folder)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/an-adapter-ran-code"),))


def test_a_bin_file_runs_nothing(base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    torch.save(tensors(), folder / "adapter_model.bin")
    adapter = read_adapter(folder)
    check_fit(adapter, build(base))
    assert list(adapter.layers) == ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]
    torch.save({"x": Evil()}, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="weights_only=True"):
        read_adapter(folder)
    assert not Path("/tmp/an-adapter-ran-code").exists()


def test_the_names_of_a_multimodal_model_are_known(base: Path, tmp_path: Path) -> None:
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        held = {name.replace("model.layers", f"{prefix}layers"): t for name, t in tensors().items()}
        folder = write(tmp_path / prefix)
        save_file(held, folder / "adapter_model.safetensors")
        adapter = read_adapter(folder)
        check_fit(adapter, build(base))
        assert list(adapter.layers) == ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]

"""What the YAMLs share, they share exactly; what differs follows from the model's size."""

import inspect
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from solotune import models
from solotune.config import configs

CONFIGS = sorted(configs())
# Full fine-tuning, LoRA, and LoRA over a base in 4 bits: `family/size_KIND_single_device`.
KINDS = {
    kind: [name for name in CONFIGS if name.endswith(f"_{kind}_single_device")]
    for kind in ("full", "lora", "qlora")
}
each_config = pytest.mark.parametrize("name", CONFIGS)
each_full = pytest.mark.parametrize("name", KINDS["full"])
each_adapter = pytest.mark.parametrize("name", KINDS["lora"] + KINDS["qlora"])
# What a kind decides; all else is the same for one model, as far as it has the kind.
BY_KIND = (
    "recipe adapter quantize_base optimizer optimizer_in_bwd optimizer_state clip_grad_norm"
).split()
# What a size decides; all else is one and the same.
BY_SIZE = (
    "checkpoint_dir optimizer enable_activation_checkpointing optimizer_in_bwd optimizer_state "
    "batch_size gradient_accumulation_steps clip_grad_norm"
).split()
# The newest of a size has the config; nobody starts from these.
SUPERSEDED = {"mistral_7b_v0_1", "mistral_7b_v0_2"}


def read(name: str) -> tuple[str, dict[str, Any]]:
    text = configs()[name].read_text()
    return text, yaml.safe_load(text)


@cache
def parameters_of(builder: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in getattr(models, builder)().parameters())


def builder_of(text: str) -> str:
    return re.findall(r"^# model: (\w+)$", text, re.MULTILINE)[0]


def kind_of(name: str) -> str:
    return next(kind for kind, names in KINDS.items() if name in names)


def without(name: str, keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in read(name)[1].items() if key not in keys}


@each_config
def test_what_no_size_decides_is_the_same_everywhere(name: str) -> None:
    assert without(name, BY_SIZE) == without(KINDS[kind_of(name)][0], BY_SIZE)


@each_adapter
def test_the_kinds_of_one_model_differ_in_what_the_kind_decides_alone(name: str) -> None:
    kind = kind_of(name)
    full = name.replace(f"_{kind}_", "_full_")
    if full in CONFIGS:
        assert without(name, BY_KIND) == without(full, BY_KIND)
        assert builder_of(read(name)[0]) == builder_of(read(full)[0])
    else:  # too big for it, and for LoRA over a base in bf16
        assert kind == "qlora"
        assert parameters_of(builder_of(read(name)[0])) > 15e9
    order = [key for key in read(name)[1] if key not in BY_KIND]
    assert order == [key for key in read(KINDS["full"][0])[1] if key not in BY_KIND]


@each_adapter
def test_an_adapter_follows_the_defaults(name: str) -> None:
    text, values = read(name)
    billions = parameters_of(builder_of(text)) / 1e9
    assert values["adapter"] == {
        "_component_": "solotune.adapters.LoRA",
        "rank": 16,
        "alpha": 32,
        "targets": "all-linear",
        "dropout": 0.0,
        "dtype": "fp32",
    }
    assert values.get("quantize_base") == ("nf4" if kind_of(name) == "qlora" else None)
    assert values["optimizer"] == {
        "_component_": "torch.optim.AdamW",
        "fused": True,
        "lr": "2e-4" if billions <= 4.05 else "1e-4",
        "weight_decay": 0.01,
    }
    assert values["clip_grad_norm"] == 1.0
    assert values["enable_activation_checkpointing"] == (billions > 0.99)
    tokens = values["batch_size"] * values["gradient_accumulation_steps"]
    assert tokens * values["tokenizer"]["max_seq_len"] == 16384


@each_full
def test_what_a_size_decides_follows_the_defaults(name: str) -> None:
    text, values = read(name)
    billions = parameters_of(builder_of(text)) / 1e9
    optimizer = values["optimizer"]
    # YAML 1.1 reads 1e-5, without a dot, as text.
    rates = ((0.5, "5e-5"), (4.05, "2e-5"), (9.3, "1e-5"), (100, "5e-6"))
    assert str(optimizer["lr"]) == next(rate for size, rate in rates if billions <= size)
    assert optimizer["weight_decay"] == 0.01
    assert optimizer["_component_"] == "solotune.optim.AdamWKahan"
    formats = {key: optimizer[key] for key in ("residual", "state_dtype") if key in optimizer}
    small_state = {"residual": "none", "state_dtype": "int8"}
    assert formats == ({} if billions < 1.3 else small_state)
    assert values["enable_activation_checkpointing"] == (billions > 0.99)
    in_backward = values.get("optimizer_in_bwd", False)
    assert in_backward == (billions > 3.3)
    assert values.get("optimizer_state") == ("host" if in_backward else None)
    assert values["clip_grad_norm"] == (None if in_backward else 1.0)
    tokens = values["batch_size"] * values["gradient_accumulation_steps"]
    assert tokens * values["tokenizer"]["max_seq_len"] == 16384


@each_config
def test_the_header_names_card_peak_and_what_was_measured(name: str) -> None:
    text, values = read(name)
    header = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines())
    assert re.search(r"Card: \d+ GB", header)
    assert re.search(r"Peak: about [\d.]+ GiB", header)
    assert re.search(r"by tune plan|estimate by formula", header)
    assert "tokens/s" in header
    assert f"--config {name} " in header
    assert f"checkpoint_dir={values['checkpoint_dir']} " in header


@each_config
def test_a_value_that_could_be_another_has_its_reason(name: str) -> None:
    lines = read(name)[0].splitlines()
    plain = "checkpoint_dir resume_from_checkpoint shuffle seed device epochs max_steps_per_epoch "
    plain += "recipe log_every_n_steps _component_"
    for line in lines:
        match = re.match(r" *(\w+): *[^ #]", line)
        if match and match[1] not in plain.split():
            assert "  # " in line, line


def test_every_published_size_has_a_config_for_what_fits_on_one_device() -> None:
    builders = {
        name
        for name, builder in inspect.getmembers(models, inspect.isfunction)
        if not inspect.signature(builder).parameters
    }
    for kind, most in {"full": 15e9, "lora": 15e9, "qlora": 80e9}.items():
        small = {name for name in builders if parameters_of(name) < most}
        made = [builder_of(read(name)[0]) for name in KINDS[kind]]
        assert sorted(made) == sorted(small - SUPERSEDED), kind
    assert sorted(name for names in KINDS.values() for name in names) == CONFIGS


def test_config_files_have_lines_of_at_most_100_columns() -> None:
    for path in map(Path, configs().values()):
        assert all(len(line) <= 100 for line in path.read_text().splitlines()), path

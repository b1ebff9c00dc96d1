"""What the YAMLs share, they share exactly; what differs follows from the model's size."""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from solotune import models
from solotune.config import configs

CONFIGS = sorted(configs())
each_config = pytest.mark.parametrize("name", CONFIGS)
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


@each_config
def test_what_no_size_decides_is_the_same_everywhere(name: str) -> None:
    first, here = (
        {key: value for key, value in read(each)[1].items() if key not in BY_SIZE}
        for each in (CONFIGS[0], name)
    )
    assert here == first


@each_config
def test_what_a_size_decides_follows_the_defaults(name: str) -> None:
    text, values = read(name)
    billions = parameters_of(builder_of(text)) / 1e9
    optimizer = values["optimizer"]
    # YAML 1.1 reads 1e-5, without a dot, as text.
    rates = ((0.5, "5e-5"), (4.05, "2e-5"), (9.3, "1e-5"), (100, "5e-6"))
    assert str(optimizer["lr"]) == next(rate for size, rate in rates if billions <= size)
    assert optimizer["weight_decay"] == 0.01
    kahan = optimizer["_component_"] == "solotune.optim.AdamWKahan"
    assert kahan or optimizer["bf16_stochastic_round"] is True
    assert kahan == (billions < 1.3)
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
    assert "estimate by formula" in header
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


def test_every_published_size_for_one_device_has_a_config() -> None:
    builders = {
        name
        for name, builder in inspect.getmembers(models, inspect.isfunction)
        if not inspect.signature(builder).parameters
    }
    small = {name for name in builders if parameters_of(name) < 15e9}
    assert {builder_of(read(name)[0]) for name in CONFIGS} == small - SUPERSEDED


def test_config_files_have_lines_of_at_most_100_columns() -> None:
    for path in map(Path, configs().values()):
        assert all(len(line) <= 100 for line in path.read_text().splitlines()), path

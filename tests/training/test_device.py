"""The device and the dtype that a run gets, and the words for what it cannot get."""

import os
import random
import sys

import pytest
import torch

from solotune.errors import ConfigError
from solotune.training import (
    describe_device,
    parameter_lines,
    pick_device,
    pick_dtype,
    set_dtype,
    set_seed,
)
from solotune.training.device import configure_allocator
from tests.models.tiny import tiny

CPU = torch.device("cpu")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_auto_takes_a_device_that_is_there() -> None:
    kind = pick_device("auto").type
    assert kind == ("cuda" if torch.cuda.is_available() else kind)
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize(
    ("version", "platform", "wanted"),
    [
        ("2.13.0", "linux", "expandable_segments:True,pinned_max_round_threshold_mb:1"),
        ("2.13.1", "win32", "pinned_max_round_threshold_mb:1"),
        ("2.12.0+cu128", "linux", "expandable_segments:True"),
        ("2.11.0", "win32", None),
    ],
)
def test_the_allocators_settings_are_those_that_torch_knows(
    version: str, platform: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(sys, "platform", platform)
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    configure_allocator()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None) == wanted
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "max_split_size_mb:64")
        configure_allocator()
        assert {os.environ.get(name) for name in ALLOCATOR} == {"max_split_size_mb:64", None}
        monkeypatch.delenv(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is there")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device={name} is not available.*device=auto.*cpu"):
        pick_device(name)


def test_a_device_number_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="device=cpu:x cannot be used"):
        pick_device("cpu:x")


@pytest.mark.parametrize("name", ["fp16", "float32", ""])
def test_an_unknown_dtype_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype={name}.*use dtype=bf16 or dtype=fp32"):
        pick_dtype(name, CPU)


def test_bf16_on_an_old_card_stops_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 \(compute capability 7\.5\).*dtype=fp32"):
        pick_dtype("bf16", torch.device("cuda"))
    assert pick_dtype("fp32", torch.device("cuda")) == torch.float32
    assert pick_dtype("bf16", CPU) == torch.bfloat16


def test_the_dtype_table_counts_matrices_and_vectors() -> None:
    lines = parameter_lines(set_dtype(tiny(num_hidden_layers=1), torch.bfloat16))
    matrices = 2 * 256 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert [line.split() for line in lines] == [
        f"{matrices:,} parameters in 9 tensors, bfloat16 on cpu".split(),
        f"{3 * 64} parameters in 3 tensors, float32 on cpu".split(),
    ]


def test_equal_seeds_give_equal_draws() -> None:
    def draw() -> tuple[float, list[float]]:
        set_seed(7)
        return random.random(), torch.rand(3).tolist()

    assert draw() == draw()


def test_the_device_line_says_how_many_threads() -> None:
    assert describe_device(CPU) == f"cpu: {torch.get_num_threads()} threads"

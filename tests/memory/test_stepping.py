"""A step of some parameters leaves the others alone, whatever the optimizer."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import bitsandbytes.optim
import pytest
import torch
from torch import nn

from solotune.memory import Stepper
from solotune.memory import stepping as stepping_file
from solotune.optim import AdamWKahan

from .one_step import IN_BACKWARD, OneStep

BNB: Any = bitsandbytes.optim
OPTIMIZERS: dict[str, Callable] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "AdamWKahan": lambda p: AdamWKahan(p, lr=1e-2),
    "bitsandbytes AdamW8bit": lambda p: BNB.AdamW8bit(p, lr=1e-2),
    "bitsandbytes Lion8bit": lambda p: BNB.Lion8bit(p, lr=1e-2),
    "bitsandbytes AdEMAMix8bit": lambda p: BNB.AdEMAMix8bit(p, lr=1e-2),
}
SIZES = [(64, 64), (64,), (100, 70), (5000,)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def give_gradients(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in weights:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stepping_one_by_one_backwards_equals_one_step_of_all(name: str) -> None:
    whole, single = parameters(), parameters()
    optimizer = OPTIMIZERS[name]([{"params": whole[:2]}, {"params": whole[2:], "lr": 2e-2}])
    groups = [{"params": single[:2]}, {"params": single[2:], "lr": 2e-2}]
    stepper = Stepper(OPTIMIZERS[name](groups))
    for step in range(3):
        give_gradients(whole, step)
        give_gradients(single, step)
        optimizer.step()
        for parameter in reversed(single):
            stepper.step([parameter])
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))


def test_parameters_that_are_not_named_stay() -> None:
    weights = parameters()
    before = [p.detach().clone() for p in weights]
    give_gradients(weights, 0)
    Stepper(torch.optim.SGD(weights, lr=0.1)).step(weights[:1])
    assert [torch.equal(a, b) for a, b in zip(before, weights, strict=True)] == [
        False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "8bit" in name])
def test_pieces_of_a_large_parameter_change_no_bit(name: str, monkeypatch) -> None:
    whole, cut = parameters(), parameters()
    optimizer, stepper = OPTIMIZERS[name](whole), Stepper(OPTIMIZERS[name](cut))
    monkeypatch.setattr(stepping_file, "_CPU_PIECE", 512)
    for step in range(3):
        give_gradients(whole, step)
        give_gradients(cut, step)
        optimizer.step()
        stepper.step(cut)
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a, b)
        ours, theirs = stepper.optimizer.state[b], optimizer.state[a]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            same = torch.equal(ours[key], value) if torch.is_tensor(value) else ours[key] == value
            assert same, key
    assert len(stepper.optimizer.state) == len(cut), "no piece is left behind"


def test_state_that_was_restored_elsewhere_is_not_moved_at_the_first_step(monkeypatch) -> None:
    weights = parameters()
    optimizer = BNB.AdamW8bit(weights, lr=1e-2)
    monkeypatch.setattr(optimizer, "to_gpu", lambda: pytest.fail("all state is on the device"))
    give_gradients(weights, 0)
    Stepper(optimizer).step(weights)
    assert len(optimizer.state) == len(weights)


def test_a_model_that_steps_in_backward_dies_with_its_stepper() -> None:
    # Hooks that hold the optimizer hold all parameters, where the garbage collector does not see.
    one_step = OneStep(**IN_BACKWARD)
    one_step()
    weights = [weakref.ref(p) for p in one_step.model.parameters()]
    del one_step
    gc.collect()
    assert [ref() for ref in weights] == [None] * len(weights)

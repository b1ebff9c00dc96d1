"""AdamWKahan: bf16 weights are those of an fp32 run, rounded; decay included."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solotune.errors import ConfigError
from solotune.optim import AdamWKahan as DitheredAdamWKahan
from tests.memory.allocations import allocated

# Without dither: comparable with an fp32 run from the same weights.
AdamWKahan = partial(DitheredAdamWKahan, dither=False)
NUMBERS = 20_000
USUAL: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.1, "steps": 300}


def start() -> Tensor:
    """Return weights of usual size, exact in bf16."""
    generator = torch.Generator().manual_seed(0)
    return (0.05 * torch.randn(NUMBERS, generator=generator)).bfloat16()


def train(optimizer: Any, dtype: torch.dtype, *, steps: int, **settings: Any) -> Tensor:
    """Return the weights after noisy gradients that mostly keep their sign."""
    parameter = nn.Parameter(start().to(dtype, copy=True))
    stepping = optimizer([parameter], **settings)
    generator = torch.Generator().manual_seed(1)
    drift = 0.5 * torch.randn(NUMBERS, generator=generator)
    for _ in range(steps):
        parameter.grad = (drift + torch.randn(NUMBERS, generator=generator)).bfloat16().to(dtype)
        stepping.step()
    return parameter.detach()


def test_bf16_weights_are_those_of_an_fp32_run_rounded_once() -> None:
    found = train(AdamWKahan, torch.bfloat16, **USUAL)
    wanted = train(AdamWKahan, torch.float32, **USUAL)
    # Halfway cases alone may round the other way.
    assert (found == wanted.bfloat16()).double().mean() > 0.999
    torch.testing.assert_close(found.float(), wanted, atol=0, rtol=2**-8)


def test_300_steps_at_a_rate_of_1e_5_move_bf16_weights_as_far_as_rounding_lets_them() -> None:
    exact = train(torch.optim.AdamW, torch.float64, **USUAL)
    change = (exact - start().double()).norm()

    def error(weights: Tensor) -> float:
        return float((weights.double() - exact).norm() / change)

    kahan = error(train(AdamWKahan, torch.bfloat16, **USUAL))
    plain = error(train(torch.optim.AdamW, torch.bfloat16, **USUAL))
    rounded = error(exact.bfloat16())
    print(
        f"error of the weight change: {kahan:.1%}, rounding alone {rounded:.1%}; AdamW {plain:.0%}"
    )
    assert kahan < 1.01 * rounded
    assert plain > 0.9  # nearly nothing moves


def test_weight_decay_arrives() -> None:
    def decayed(optimizer: Any, dtype: torch.dtype) -> Tensor:
        with_decay = train(optimizer, dtype, **USUAL)
        without = train(optimizer, dtype, lr=1e-5, weight_decay=0.0, steps=300)
        return ((without.double() - with_decay.double()) * start().sign()).sum()

    wanted = decayed(torch.optim.AdamW, torch.float64)
    share = float(decayed(AdamWKahan, torch.bfloat16) / wanted)
    plain_share = float(decayed(torch.optim.AdamW, torch.bfloat16) / wanted)
    print(
        f"share of the weight decay that arrives: {share:.0%}; plain bf16 AdamW {plain_share:.0%}"
    )
    assert abs(share - 1) < 0.05  # of 20,000 weights, each rounded
    assert plain_share < 0.01


def test_decay_arrives_where_no_gradient_ever_does() -> None:
    # The embedding of a token that does not occur: 3000 steps of 5e-6 of the weight.
    parameter = nn.Parameter(start()[:1000].clone())
    parameter.grad = torch.zeros_like(parameter)
    optimizer = AdamWKahan([parameter], lr=5e-5, weight_decay=0.1)
    for _ in range(3000):
        optimizer.step()
    wanted = start()[:1000].double() * (1 - 5e-6) ** 3000
    torch.testing.assert_close(parameter.detach().double(), wanted, atol=0, rtol=2**-8)


@pytest.mark.parametrize("numbers", [1, 63, 4096, 2**18 + 1])  # the last in two pieces
def test_fp32_parameters_take_the_path_of_torchs_adamw(numbers: int) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(numbers))
    theirs = nn.Parameter(ours.detach().clone())
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = AdamWKahan([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(20):
        ours.grad = torch.randn(numbers)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert "remainder" not in optimizers[0].state[ours]


def test_groups_have_their_own_settings() -> None:
    first, second = (nn.Parameter(torch.ones(8)) for _ in range(2))
    optimizer = AdamWKahan(
        [{"params": [first]}, {"params": [second], "weight_decay": 0.0}], lr=0.1, weight_decay=0.5
    )
    first.grad, second.grad = torch.zeros(8), torch.zeros(8)
    optimizer.step()
    torch.testing.assert_close(first.detach(), torch.full((8,), 0.95))
    assert torch.equal(second.detach(), torch.ones(8))


@pytest.mark.parametrize("steps_before", [0, 20])  # with and without something remembered
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_of_zero_leaves_the_weights_unchanged(dtype: torch.dtype, steps_before: int) -> None:
    parameter = nn.Parameter(start().to(dtype, copy=True))
    optimizer = AdamWKahan([parameter], lr=1e-4, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        parameter.grad = torch.randn(NUMBERS, generator=generator).to(dtype)
        optimizer.step()

    for _ in range(steps_before):
        step()
    before = parameter.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(5):
        step()
    assert torch.equal(parameter, before)


def test_a_parameter_without_a_gradient_does_not_step() -> None:
    moving, resting = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = AdamWKahan([moving, resting], lr=0.1, weight_decay=0.1)
    moving.grad = torch.ones_like(moving)
    optimizer.step()
    assert (moving < 1).all()
    assert torch.equal(resting, torch.ones_like(resting))
    assert resting not in optimizer.state


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.bfloat16, 10), (torch.float32, 8)])
def test_state_takes_10_bytes_a_bf16_parameter_and_8_an_fp32_one(
    dtype: torch.dtype, bytes_each: int
) -> None:
    parameter = nn.Parameter(torch.randn(300, 100).to(dtype))
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamWKahan([parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    stored = sum(value.nbytes for value in state if isinstance(value, Tensor))
    assert stored == bytes_each * parameter.numel()


def test_a_steps_temporaries_do_not_grow_with_the_parameter() -> None:
    parameter = nn.Parameter(torch.randn(2**22).bfloat16())
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamWKahan([parameter])
    optimizer.step()
    peak = allocated(optimizer.step).peak
    print(f"{peak / 2**20:.2f} MiB of temporaries")
    assert peak <= 5.1 * 2**20  # five of a piece in fp32


@pytest.mark.parametrize("settings", [{"lr": -1e-3}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ConfigError) as raised:
        AdamWKahan([nn.Parameter(torch.ones(1))], **settings)
    assert f"{name}={value}" in str(raised.value)

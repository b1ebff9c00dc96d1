"""AdamWKahan: bf16 weights follow the float64 path of AdamW, decay included."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solotune.errors import ConfigError
from solotune.optim import AdamWKahan
from tests.memory.allocations import allocated

NUMBERS = 20_000


def start() -> Tensor:
    """Return weights of usual size, exact in bf16."""
    generator = torch.Generator().manual_seed(0)
    return (0.05 * torch.randn(NUMBERS, generator=generator)).bfloat16()


def train(
    optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, *, steps: int, **settings: Any
) -> tuple[nn.Parameter, Tensor]:
    """Return the parameter after noisy gradients that mostly keep their sign, and its remainder."""
    parameter = nn.Parameter(start().clone().to(dtype))
    stepping = optimizer([parameter], **settings)  # pyright: ignore[reportCallIssue]
    generator = torch.Generator().manual_seed(1)
    drift = 0.5 * torch.randn(NUMBERS, generator=generator)
    for _ in range(steps):
        parameter.grad = (drift + torch.randn(NUMBERS, generator=generator)).bfloat16().to(dtype)
        stepping.step()
    return parameter, stepping.state[parameter].get("remainder", torch.zeros(()))


def weights(*args: Any, **settings: Any) -> Tensor:
    """Return weight and remainder together, in float64."""
    parameter, remainder = train(*args, **settings)
    return parameter.detach().double() + remainder.double()


USUAL = {"lr": 1e-5, "weight_decay": 0.1, "steps": 300}


def test_300_steps_at_a_rate_of_1e_5_move_bf16_weights_as_float64_does() -> None:
    exact = weights(torch.optim.AdamW, torch.float64, **USUAL)
    change = (exact - start().double()).norm()
    kahan = weights(AdamWKahan, torch.bfloat16, **USUAL)
    plain = weights(torch.optim.AdamW, torch.bfloat16, **USUAL)
    error = float((kahan - exact).norm() / change)
    plain_error = float((plain - exact).norm() / change)
    print(f"error of the weight change: {error:.2%}; plain bf16 AdamW {plain_error:.0%}")
    assert error < 0.005
    assert plain_error > 0.9  # nearly nothing moves


def test_the_weight_itself_is_the_float64_one_rounded_once() -> None:
    exact = weights(torch.optim.AdamW, torch.float64, **USUAL)
    parameter, _ = train(AdamWKahan, torch.bfloat16, **USUAL)
    assert (parameter == exact.bfloat16()).double().mean() > 0.99
    assert (parameter != start()).double().mean() > 0.9


def test_weight_decay_arrives() -> None:
    def decayed(*args: Any) -> Tensor:
        without = weights(*args, **USUAL | {"weight_decay": 0.0})
        return ((without - weights(*args, **USUAL)) * start().sign()).sum()

    wanted = decayed(torch.optim.AdamW, torch.float64)
    share = float(decayed(AdamWKahan, torch.bfloat16) / wanted)
    plain_share = float(decayed(torch.optim.AdamW, torch.bfloat16) / wanted)
    print(f"share of the decay that arrives: {share:.1%}; plain bf16 AdamW {plain_share:.1%}")
    assert abs(share - 1) < 0.01
    assert plain_share < 0.01


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_of_zero_leaves_the_weights_unchanged(dtype: torch.dtype) -> None:
    parameter, _ = train(AdamWKahan, dtype, steps=5, lr=0.0, weight_decay=0.1)
    assert torch.equal(parameter, start().to(dtype))


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


def test_a_step_needs_three_mib_of_temporaries_however_large_the_parameter() -> None:
    parameter = nn.Parameter(torch.randn(2**22).bfloat16())
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamWKahan([parameter])
    optimizer.step()
    assert allocated(optimizer.step).peak <= 3 * 2**20 + 2**12


@pytest.mark.parametrize(
    "settings", [{"lr": -1e-3}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}]
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ConfigError) as raised:
        AdamWKahan([nn.Parameter(torch.ones(1))], **settings)
    assert f"{name}={value}" in str(raised.value)

"""Fewer bytes a parameter: residuals and moments in int8 and bf16, against float64."""

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from solotune.errors import ConfigError
from solotune.optim import AdamWKahan, LionKahan
from solotune.optim.compensated import Residual
from solotune.optim.moments import BLOCK, StateDtype, new_moment, read_moment, write_moment_
from solotune.optim.noise import Noise, noise_keys
from solotune.optim.rounding import join, split_

ROWS, COLUMNS = 64, 300  # whose last block of 256 is not full
RESIDUALS: tuple[Residual, ...] = ("int16", "int8", "none")
STATES: tuple[StateDtype, ...] = ("fp32", "bf16", "int8")
BYTES = {"int16": 2, "int8": 1, "none": 0, "fp32": 4, "bf16": 2}
CPU = torch.device("cpu")


def start() -> Tensor:
    """Return a matrix of usual weights, exact in bf16."""
    generator = torch.Generator().manual_seed(0)
    return (0.05 * torch.randn(ROWS, COLUMNS, generator=generator)).bfloat16()


def reference(optimizer: type, steps: int, **settings: Any) -> Tensor:
    """Return the weights of a float64 run, by the papers' formulas."""
    weight = start().double()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    lr, decay = settings["lr"], settings["weight_decay"]
    for step, grad in zip(range(1, steps + 1), gradients(steps), strict=True):
        g = grad.double()
        if optimizer is LionKahan:
            update = (0.9 * m + 0.1 * g).sign()
            m = 0.99 * m + 0.01 * g
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = weight - lr * (update + decay * weight)
    return weight


def gradients(steps: int) -> Iterator[Tensor]:
    """Yield gradients with a drift, of sizes that differ by column a hundredfold."""
    generator = torch.Generator().manual_seed(1)
    drift = 0.5 * torch.randn(ROWS, COLUMNS, generator=generator)
    sizes = torch.logspace(-2, 0, COLUMNS)
    for _ in range(steps):
        noise = torch.randn(ROWS, COLUMNS, generator=generator)
        yield ((drift + noise) * sizes).bfloat16()


def master(optimizer: Any, parameter: Tensor) -> Tensor:
    """Return the weights with what is remembered of them."""
    remainder = optimizer.state[parameter].get("remainder")
    flat = None if remainder is None else remainder.view(-1)
    return join(parameter.detach().view(-1), flat).view(parameter.shape)


def noise_of(like: Tensor, *, seed: int) -> Noise:
    """Return the noise of the first step of a parameter that is one piece."""
    (key,) = noise_keys(CPU, seed=seed, step=1, parameter=0, starts=[0]).unbind()
    return Noise(like.shape, key)


def train(optimizer: type, steps: int, **settings: Any) -> tuple[Any, Tensor]:
    parameter = nn.Parameter(start())
    stepping = optimizer([parameter], dither=False, **settings)
    for grad in gradients(steps):
        parameter.grad = grad
        stepping.step()
    return stepping, parameter


# The most that a format may be off, of the weight change of 300 steps at 1e-5.
ERRORS = {
    (AdamWKahan, "int16", "fp32"): 1e-3,
    (AdamWKahan, "int8", "fp32"): 0.01,
    (AdamWKahan, "int16", "bf16"): 0.01,
    (AdamWKahan, "int16", "int8"): 0.06,
    (AdamWKahan, "int8", "int8"): 0.06,
    (LionKahan, "int16", "fp32"): 1e-3,
    (LionKahan, "int8", "fp32"): 0.01,
    (LionKahan, "int16", "bf16"): 0.01,
    (LionKahan, "int8", "int8"): 0.06,
}


@pytest.mark.parametrize(("optimizer", "residual", "state"), ERRORS)
def test_the_weight_change_of_300_small_steps_is_that_of_float64(
    optimizer: type, residual: str, state: str
) -> None:
    keys = {"lr": 1e-5, "weight_decay": 0.1}
    wanted = reference(optimizer, 300, **keys)
    stepping, parameter = train(optimizer, 300, residual=residual, state_dtype=state, **keys)
    found = master(stepping, parameter).double()
    change = (wanted - start().double()).norm()
    error = float((found - wanted).norm() / change)
    print(f"{optimizer.__name__} residual={residual} state_dtype={state}: {error:.4f}")
    assert error < ERRORS[optimizer, residual, state]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_weight_decay_arrives_where_no_gradient_does(residual: Residual) -> None:
    # 1000 steps of 5e-6 of the weight: 0.5 %, and a bf16 step is 0.4 to 0.8 %.
    parameter = nn.Parameter(start())
    optimizer = AdamWKahan([parameter], lr=5e-5, weight_decay=0.1, residual=residual, dither=False)
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(1000):
        optimizer.step()
    lost = (start().double() - master(optimizer, parameter).double()) * start().double().sign()
    wanted = start().double().abs() * (1 - (1 - 5e-6) ** 1000)
    share = float(lost.sum() / wanted.sum())
    print(f"residual={residual}: {share:.1%} of the decay arrives")
    assert abs(share - 1) < {"int16": 0.001, "int8": 0.01, "none": 0.1}[residual]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("optimizer", [AdamWKahan, LionKahan])
def test_the_bytes_of_a_parameter_are_those_of_its_formats(
    optimizer: type, residual: str, state: str
) -> None:
    parameter = nn.Parameter(torch.zeros(ROWS, BLOCK, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    stepping = optimizer([parameter], residual=residual, state_dtype=state)
    stepping.step()
    kept = [t for t in stepping.state[parameter].values() if isinstance(t, Tensor)]
    moment = 1 + 4 / BLOCK if state == "int8" else BYTES[state]
    wanted = BYTES[residual] + moment * (2 if optimizer is AdamWKahan else 1)
    assert sum(t.nbytes for t in kept) == wanted * parameter.numel()


def test_one_dimensional_parameters_keep_fp32_moments() -> None:
    norm, matrix = nn.Parameter(torch.ones(512)), nn.Parameter(torch.ones(4, 4).bfloat16())
    optimizer = AdamWKahan([norm, matrix], residual="int8", state_dtype="int8")
    for parameter in (norm, matrix):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kinds = {name: t.dtype for name, t in optimizer.state[norm].items() if name != "step"}
    assert kinds == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert optimizer.state[matrix]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize("shape", [(1,), (63,), (1, 1), (1, 63), (5, 819), (4096, 1), (17, 241)])
def test_odd_sizes_step_as_even_ones_do(shape: tuple[int, ...]) -> None:
    weights = {}
    for state in STATES:
        parameter = nn.Parameter(torch.full(shape, 0.5, dtype=torch.bfloat16))
        optimizer = AdamWKahan([parameter], lr=1e-2, weight_decay=0, state_dtype=state)
        for _ in range(5):
            parameter.grad = torch.full_like(parameter, 0.25)
            optimizer.step()
        weights[state] = parameter.detach().float()
    for state in STATES:
        torch.testing.assert_close(weights[state], torch.full(shape, 0.45), atol=0.01, rtol=0)


def test_the_order_in_which_parameters_step_changes_no_bit() -> None:
    def weights(order: list[int]) -> list[Tensor]:
        parameters = [nn.Parameter(start()[:8]) for _ in range(3)]
        optimizer = AdamWKahan(parameters, lr=1e-4, residual="int8", state_dtype="int8", seed=3)
        for step in range(4):
            for index in order:  # as in backward: one alone has a gradient
                generator = torch.Generator().manual_seed(10 * step + index)
                parameters[index].grad = torch.randn(8, COLUMNS, generator=generator).bfloat16()
                optimizer.step()
                parameters[index].grad = None
        return [p.detach() for p in parameters]

    forward, backward = weights([0, 1, 2]), weights([2, 0, 1])
    assert all(map(torch.equal, forward, backward))


def test_another_seed_rounds_otherwise_and_the_same_one_alike() -> None:
    def weights(seed: int) -> Tensor:
        return train(AdamWKahan, 20, lr=1e-5, residual="none", seed=seed)[1].detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_rounding_at_random_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(256, generator=generator) * torch.logspace(-6, 0, 256)
    rounds = 64
    for kind in ("none", "int8"):
        found = []
        for seed in range(rounds):
            weight = torch.zeros(256, dtype=torch.bfloat16)
            remainder = torch.zeros(256, dtype=torch.int8) if kind == "int8" else None
            noise = noise_of(exact, seed=seed)
            split_(exact.clone(), weight, remainder, noise)
            found.append(join(weight, remainder).double())
        check_mean(torch.stack(found), exact)
    formats: tuple[Literal["bf16", "int8"], ...] = ("bf16", "int8")
    for name, dtype in itertools.product(("signed", "unsigned"), formats):
        value = exact if name == "signed" else exact.square()
        found = []
        for seed in range(rounds):
            kept = new_moment("m", value, dtype, signed=name == "signed")
            moment, scale, block = kept["m"].view(1, -1), kept.get("m_scale"), value.view(1, -1)
            write_moment_(moment, scale, block.clone(), noise_of(block, seed=seed))
            found.append(read_moment(moment, scale)[0].double())
        told = value > value.max() * (1 / 255) ** 6 if name == "unsigned" else slice(None)
        check_mean(torch.stack(found)[:, told], value[told])


def check_mean(found_RN: Tensor, exact_N: Tensor) -> None:
    """Within 4 standard errors, each number and all together; and no number is ever far off."""
    rounds = len(found_RN)
    error_N = (found_RN.mean(0) - exact_N.double()).abs()
    standard_N = found_RN.std(0) / rounds**0.5
    # Of a number that is nearly told the few that go the other way are seen too seldom.
    assert float((error_N <= 4 * standard_N + 1e-9 * exact_N.abs().max()).double().mean()) > 0.95
    total = (found_RN.sum(1) - exact_N.double().sum()).mean().abs()
    assert total <= 4 * found_RN.sum(1).std() / rounds**0.5


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    value = torch.logspace(-30, 0, BLOCK)
    kept = new_moment("v", value, "int8", signed=False)
    block = value.view(1, -1)
    write_moment_(kept["v"].view(1, -1), kept["v_scale"], block.clone(), noise_of(block, seed=0))
    assert (read_moment(kept["v"].view(1, -1), kept["v_scale"]) > 0).all()


@pytest.mark.parametrize("settings", [{"residual": "bf16"}, {"state_dtype": "fp16"}, {"seed": -1}])
def test_a_format_that_is_none_is_refused_by_name(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ConfigError, match=f"optimizer.{name}={value}"):
        LionKahan([nn.Parameter(torch.ones(2, 2).bfloat16())], **settings)


def test_a_residual_without_bf16_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="residual=int8 has no effect: no weight is bf16"):
        AdamWKahan([nn.Parameter(torch.ones(2, 2))], residual="int8")


@pytest.mark.parametrize("residual", ["int16", "int8"])
def test_dither_changes_no_weight_and_shows_small_changes_from_the_first_step_on(
    residual: Residual,
) -> None:
    # Each weight changes by a tenth of its rounding step: half a step would be needed otherwise.
    start_value = torch.full((400, 100), 0.0625, dtype=torch.bfloat16)
    start_value[:, ::2] *= -1
    start_value[0] = 0
    rounding_step = 0.0625 * 2**-7
    moved = {}
    for dither in (True, False):
        parameter = nn.Parameter(start_value.clone())
        optimizer = AdamWKahan([parameter], lr=0, weight_decay=0, residual=residual, dither=dither)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert torch.equal(parameter, start_value)
        assert master(optimizer, parameter).isfinite().all()
        optimizer.param_groups[0]["lr"] = rounding_step / 10
        optimizer.step()
        moved[dither] = float((start_value[1:] - parameter.detach()[1:]).double().mean())
    assert moved[False] == 0
    assert abs(moved[True] / (rounding_step / 10) - 1) < 0.1

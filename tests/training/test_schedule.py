"""Learning rates are finite functions of the step, counted from 1."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from solotune.errors import ConfigError
from solotune.training import constant, cosine, linear, set_lr
from solotune.training.schedule import Schedule

ALL = pytest.mark.parametrize("make", [cosine, linear, constant])
Make = Callable[..., Schedule]


def factors(schedule: Schedule, total_steps: int) -> list[float]:
    return [schedule(step) for step in range(1, total_steps + 1)]


@ALL
def test_warmup_over_ten_steps_begins_at_a_tenth_and_is_whole_at_step_ten(make: Make) -> None:
    found = factors(make(100, num_warmup_steps=10), 100)
    assert found[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(found) == 1


def test_cosine_ends_at_ten_percent_by_way_of_the_middle() -> None:
    found = factors(cosine(101, warmup_ratio=0), 101)
    assert found[0] == 1
    assert found[50] == pytest.approx(0.55)
    assert found[25] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert found[-1] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)


def test_linear_falls_by_equal_steps_to_zero() -> None:
    found = factors(linear(11, warmup_ratio=0), 11)
    assert found == pytest.approx([1 - step / 10 for step in range(11)])


@pytest.mark.parametrize("make", [cosine, linear])
def test_the_last_rate_can_be_chosen(make: Make) -> None:
    assert factors(make(20, final_lr_ratio=0.3), 20)[-1] == pytest.approx(0.3)


def test_constant_stays_at_one_and_does_not_warm_up_unasked() -> None:
    assert factors(constant(5), 5) == [1] * 5


def test_the_usual_warmup_is_three_percent_of_the_steps() -> None:
    found = factors(cosine(200), 200)
    assert found[:6] == pytest.approx([step / 6 for step in range(1, 7)])
    assert found[6] == 1
    assert found[7] < 1


@ALL
@pytest.mark.parametrize(("total", "warmup"), [(10, 10), (10, 100), (1, 0), (1, 1), (2, 1)])
def test_rates_are_finite_and_above_zero_whatever_the_warmup(
    make: Make, total: int, warmup: int
) -> None:
    found = factors(make(total, num_warmup_steps=warmup), total)
    assert all(0 < factor <= 1 for factor in found)


def test_a_warmup_longer_than_the_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cosine(10, num_warmup_steps=10)
    assert capsys.readouterr().out == ""
    schedule = cosine(10, num_warmup_steps=100)
    assert "num_warmup_steps=100 is more than the run's 10 steps" in capsys.readouterr().out
    assert factors(schedule, 10) == pytest.approx([step / 100 for step in range(1, 11)])


@ALL
@pytest.mark.parametrize("wrong", [{"warmup_ratio": 1.5}, {"num_warmup_steps": -1}])
def test_an_impossible_warmup_is_refused_by_name(make: Make, wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=rf"lr_scheduler\.{name}={value}"):
        make(10, **wrong)


def test_set_lr_scales_each_groups_own_rate_and_returns_the_first() -> None:
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 1.0}], lr=0.1)
    assert set_lr(optimizer, 0.5) == pytest.approx(0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])
    set_lr(optimizer, 0.25)  # of the configured rate, not of the last one
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.25])
    first.grad = torch.ones(1)
    optimizer.step()
    assert float(first.detach()) == pytest.approx(1 - 0.025)


def test_set_lr_fills_the_tensor_that_torchao_steps_with() -> None:
    from torchao.optim import AdamW8bit

    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW8bit([parameter], lr=0.1, weight_decay=0.0)
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert set_lr(optimizer, 0.5) == pytest.approx(0.05)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def test_set_lr_keeps_a_float_a_float() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4))], lr=0.1)
    set_lr(optimizer, 0.5)
    assert type(optimizer.param_groups[0]["lr"]) is float

"""The gauge counts the weights that a step leaves unchanged, and warns where they are most."""

from typing import Any

import pytest
import torch

from solotune.memory import Stepper
from solotune.models import Decoder
from solotune.optim import AdamWKahan
from solotune.training import UpdateGauge, set_dtype
from tests.models.tiny import tiny


def measure(
    optimizer: Any, *, lr: float, dtype: torch.dtype = torch.bfloat16, steps: int = 4, **keys: Any
) -> tuple[UpdateGauge, float | None, float]:
    """Return the gauge, its figure for the last step but one, and that of all the weights."""
    model: Decoder = set_dtype(tiny(), dtype)
    made = optimizer(model.parameters(), lr=lr, weight_decay=0.0, **keys)
    stepper = Stepper(made)
    gauge = UpdateGauge(model, stepper)
    exact = 0.0
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.to(parameter.dtype)
        matrices = [p for p in model.blocks.parameters() if p.dim() > 1]
        before = [p.detach().clone() for p in matrices]
        with gauge.watching():
            stepper.step(model.parameters())
        if step == steps - 2:
            same = sum(int((a == b).sum()) for a, b in zip(before, matrices, strict=True))
            exact = same / sum(p.numel() for p in matrices)
    return gauge, gauge.lost, exact


@pytest.mark.parametrize("lr", [1e-6, 1e-4, 3e-4, 1e-2])
def test_the_share_is_that_of_all_weights(lr: float) -> None:
    _, lost, exact = measure(torch.optim.AdamW, lr=lr)
    assert lost is not None
    assert abs(lost - exact) < 0.03


def test_more_than_half_lost_is_a_warning_that_names_the_remedy_once() -> None:
    gauge, lost, _ = measure(torch.optim.AdamW, lr=1e-6)
    assert lost is not None
    assert lost > 0.9
    (line,) = gauge.lines()
    assert "solotune.optim.AdamWKahan" in line
    assert gauge.lines() == []
    assert measure(torch.optim.AdamW, lr=1e-2)[0].lines() == []
    assert measure(torch.optim.AdamW, lr=1e-6, dtype=torch.float32)[0].lines() == []


def test_what_is_remembered_is_not_lost() -> None:
    _, lost, unchanged = measure(AdamWKahan, lr=1e-6)
    assert unchanged > 0.9
    assert lost is not None
    assert lost < 0.01


@pytest.mark.parametrize("residual", ["int8", "none"])
def test_rounding_at_random_is_not_measured(residual: str) -> None:
    assert measure(AdamWKahan, lr=1e-6, residual=residual)[1] is None


def test_what_has_no_gradient_is_not_lost() -> None:
    """As one half of the matrices of an adapter in its first step."""
    model = tiny()
    stepper = Stepper(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    gauge = UpdateGauge(model, stepper)
    for _ in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, float("down_proj" in name))
        with gauge.watching():
            stepper.step(model.parameters())
    assert gauge.lost == 0.0


def test_the_first_figure_comes_with_the_second_step() -> None:
    assert measure(torch.optim.AdamW, lr=1e-3, steps=1)[1] is None


@pytest.mark.gpu
def test_its_figure_waits_for_nothing_that_is_queued_on_a_card() -> None:
    model = set_dtype(tiny(), torch.bfloat16).to("cuda")
    stepper = Stepper(torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))
    gauge = UpdateGauge(model, stepper)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with gauge.watching():
                stepper.step(model.parameters())
                torch.cuda._sleep(200_000_000)  # a tenth of a second of the queue
                queued = torch.cuda.Event()
                queued.record()
            assert not queued.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert gauge.lost is not None
    assert gauge.lost > 0.9

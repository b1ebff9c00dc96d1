"""Clipping scales all gradients by one factor, from a norm in fp32."""

import pytest
import torch
from torch import nn

from solotune.training import clip_grad_norm, clipping
from tests.memory.allocations import allocated


def parameters(dtype: torch.dtype, *, scale: float = 1.0) -> list[nn.Parameter]:
    """Return matrices in `dtype` and a vector in fp32, with gradients, and one without."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((70, 50), (3, 4, 5), (30,)):
        kind = torch.float32 if len(shape) == 1 else dtype
        parameter = nn.Parameter(torch.zeros(shape, dtype=kind))
        parameter.grad = (scale * torch.randn(shape, generator=generator)).to(kind)
        made.append(parameter)
    return [*made, nn.Parameter(torch.zeros(2))]


def gradients(made: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in made if p.grad is not None]


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["above the limit", "below it"])
def test_norm_and_gradients_equal_torchs_in_fp32(scale: float) -> None:
    ours, theirs = (parameters(torch.float32, scale=scale) for _ in range(2))
    norm = clip_grad_norm(ours, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
    torch.testing.assert_close(gradients(ours), gradients(theirs))
    assert (norm > 1) == (scale == 1.0)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    made = parameters(torch.bfloat16)
    before = [g.clone() for g in gradients(made)]
    exact = torch.cat([g.double().flatten() for g in before]).norm()
    norm = clip_grad_norm(made, 1.0)
    assert norm.dtype == torch.float32
    assert abs(float(norm / exact) - 1) < 1e-6
    for after, g in zip(gradients(made), before, strict=True):
        assert after.dtype == g.dtype
        # One rounding: the factor itself is not rounded to bf16 first.
        torch.testing.assert_close(after, (g.double() / exact).to(g.dtype))


def test_gradients_below_the_limit_keep_their_bits() -> None:
    made = parameters(torch.bfloat16, scale=1e-3)
    before = [g.clone() for g in gradients(made)]
    clip_grad_norm(made, 1.0)
    assert all(map(torch.equal, gradients(made), before))


def test_without_a_limit_the_norm_is_measured_and_gradients_keep_their_bits() -> None:
    made, clipped = parameters(torch.bfloat16), parameters(torch.bfloat16)
    before = [g.clone() for g in gradients(made)]
    assert torch.equal(clip_grad_norm(made, None), clip_grad_norm(clipped, 1.0))
    assert all(map(torch.equal, gradients(made), before))


def test_no_gradient_is_a_norm_of_zero() -> None:
    assert clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    made = parameters(torch.float32)
    gradients(made)[0][3, 3] = bad
    assert not clip_grad_norm(made, 1.0).isfinite()


def test_a_large_bf16_gradient_is_not_copied_to_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(2**23, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert allocated(lambda: clip_grad_norm([parameter], 1.0)).peak < parameter.nbytes / 3


def test_measuring_transposed_gradients_copies_none_of_them() -> None:
    """A weight gradient is often the transposed result of a product: a copy of all was a peak."""
    parameters = [nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(32, 64).bfloat16().T
        assert not parameter.grad.is_contiguous()
    for parameter in parameters:
        assert parameter.grad is not None
        assert clipping._flat(parameter.grad).data_ptr() == parameter.grad.data_ptr()
    norm = clip_grad_norm(parameters, None)
    wanted = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    assert torch.allclose(norm, wanted.float().norm(), rtol=1e-5)

"""The compiled update is the eager one, in one kernel, for every size and format."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from solotune.optim import AdamWKahan, LionKahan, compensated
from solotune.optim.compensated import Residual
from solotune.optim.moments import StateDtype
from solotune.optim.rounding import join

RESIDUALS: tuple[Residual, ...] = ("int16", "int8", "none")
STATES: tuple[StateDtype, ...] = ("fp32", "bf16", "int8")
FORMATS = list(itertools.product(RESIDUALS, STATES))
QUICK = (AdamWKahan, "none", "bf16")
SHAPES = [(300, 100), (512, 256), (3, 3), (700,)]  # a last block of 48; whole ones; a rest alone
FILTERS = ["ignore::UserWarning:torch._inductor", "ignore::DeprecationWarning"]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [0.05 * torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(t.to(dtype) if t.dim() > 1 else t) for t in found]


def steps(optimizer: Any, weights: list[nn.Parameter], count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        optimizer.param_groups[0]["lr"] = 1e-3 * step / count  # the first is 0, as in a warmup
        for p in weights:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def master(optimizer: Any, parameter: Tensor) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter.detach()
    return join(parameter.detach(), optimizer.state[parameter].get("remainder"))


@pytest.mark.parametrize(
    ("kind", "residual", "state"),
    [
        pytest.param(*case, marks=[] if case == QUICK else pytest.mark.slow)
        for case in ((kind, *formats) for kind in (AdamWKahan, LionKahan) for formats in FORMATS)
    ],
)
@pytest.mark.filterwarnings(*FILTERS)
def test_compiled_steps_are_the_eager_ones(kind: type, residual: str, state: str) -> None:
    """The same noise, so that only square roots differ: those of torch on CPU are not exact."""
    torch._dynamo.reset()
    made = []
    for compiled in (False, True):
        weights = parameters(torch.bfloat16)
        optimizer = kind(weights, residual=residual, state_dtype=state, compile=compiled)
        steps(optimizer, weights, 6)
        assert optimizer.news() == []
        made.append((optimizer, weights))
    (eager, ours), (compiled, theirs) = made
    begin = parameters(torch.bfloat16)
    for a, b, start in zip(ours, theirs, begin, strict=True):
        found, wanted = master(compiled, b).double(), master(eager, a).double()
        change = (wanted - start.double()).norm()
        assert change > 0
        # What is rounded at random goes the other way only where a chance is a hair from the draw.
        exact = (residual == "int16" and state == "fp32") or a.dim() == 1
        assert (found - wanted).norm() <= (1e-6 if exact else 2e-3) * change
        for name, value in eager.state[a].items():
            if name != "step" and not value.is_floating_point() and name != "remainder":
                other = compiled.state[b][name]
                assert (value != other).double().mean() < 1e-3, name


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_one_code_serves_all_sizes_rates_and_steps(monkeypatch, state: StateDtype) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compensated, "_PIECE_ON_CPU", 2**14)
    function = torch.compile(compensated._step_piece, dynamic=True, backend=counter)
    monkeypatch.setattr(compensated, "_compiled", lambda format: function)
    shapes = [(64, 256), (128, 256), (300, 100), (256, 1024), (256, 1025)]
    weights = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    optimizer = AdamWKahan(weights, state_dtype=state, compile=True)
    steps(optimizer, weights, 4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("compile", [None, True])
def test_without_a_compiler_a_run_goes_on_and_says_so_once(monkeypatch, compile) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler in PATH")

    torch._dynamo.reset()
    function = torch.compile(compensated._step_piece, dynamic=True, backend=broken)
    monkeypatch.setattr(compensated, "_compiled", lambda format: function)
    monkeypatch.setattr(compensated, "_COMPILED_FROM", 1)
    monkeypatch.setattr(compensated, "_PIECE_ON_CPU", 2**14)  # several of a matrix
    made = []
    for wanted in (False, compile):
        weights = parameters(torch.bfloat16)
        optimizer = AdamWKahan(weights, residual="int8", state_dtype="int8", compile=wanted)
        steps(optimizer, weights, 3)
        made.append(weights)
    (line,) = optimizer.news()
    assert "no working compiler" in line
    assert "no compiler in PATH" in line
    assert optimizer.news() == []
    assert all(map(torch.equal, *made))


def test_small_models_are_not_compiled_unless_asked(monkeypatch) -> None:
    def never(format: str) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(compensated, "_compiled", never)
    weights = parameters(torch.bfloat16)
    steps(AdamWKahan(weights, residual="int8", state_dtype="int8"), weights, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize(("residual", "state"), FORMATS)
def test_on_a_card_the_update_is_one_kernel(residual: Residual, state: StateDtype) -> None:
    torch._dynamo.reset()
    parameter = nn.Parameter(torch.randn(1024, 1024, device="cuda").bfloat16())
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamWKahan([parameter], residual=residual, state_dtype=state, compile=True)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
    kernels = [e.name for e in profile.events() or [] if "triton" in e.name]
    assert len(kernels) == 1

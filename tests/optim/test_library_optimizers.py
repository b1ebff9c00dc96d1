"""What is quantised and what is not, optimizer by optimizer: sizes, norms, options."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solotune.errors import ConfigError
from solotune.memory import Stepper
from solotune.optim import AdamWKahan, LionKahan, decay_groups
from solotune.training import set_dtype
from tests.models.tiny import tiny


def library(module: str, name: str, **options: Any) -> Callable[..., Any]:
    def make(parameters: Any, lr: float) -> Any:
        return getattr(pytest.importorskip(module), name)(parameters, lr=lr, **options)

    return make


INT8: dict[str, Any] = {"residual": "int8", "state_dtype": "int8"}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "torch AdamW fused": partial(torch.optim.AdamW, fused=True),
    "torch Adafactor": torch.optim.Adafactor,
    "bitsandbytes AdamW8bit": library("bitsandbytes.optim", "AdamW8bit"),
    "bitsandbytes PagedAdamW8bit": library("bitsandbytes.optim", "PagedAdamW8bit"),
    "bitsandbytes Lion8bit": library("bitsandbytes.optim", "Lion8bit"),
    "AdamWKahan": AdamWKahan,
    "AdamWKahan int8": partial(AdamWKahan, **INT8),
    "LionKahan int8": partial(LionKahan, **INT8),
    "torchao AdamW8bit": library("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": library("torchao.optim", "AdamW4bit"),
    "torchao AdamWFp8": library("torchao.optim", "AdamWFp8"),
}
SIZES = (1, 63, 4095, 4096, 4097)
# Of matrices with SIZES numbers: which have moments of fewer bytes than the fp32 or bf16 ones.
FROM_4096 = [4096, 4097]
QUANTISED: dict[str, list[int]] = {
    "bitsandbytes AdamW8bit": FROM_4096,
    "bitsandbytes PagedAdamW8bit": FROM_4096,
    "bitsandbytes Lion8bit": FROM_4096,
    "AdamWKahan int8": list(SIZES),
    "LionKahan int8": list(SIZES),
    "torchao AdamW8bit": [4096],  # and a multiple of the block
    "torchao AdamW4bit": [4096],
    "torchao AdamWFp8": [4096],
}
each_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if "torchao" in n else n for n in OPTIMIZERS]
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Paged optimizers are not supported on CPU",
    "ignore::UserWarning:torch._inductor",
    "ignore::DeprecationWarning",
)


@each_optimizer
def test_one_dimensional_parameters_train_in_fp32(name: str) -> None:
    model = set_dtype(tiny(num_hidden_layers=1), torch.bfloat16)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() == 1}
    assert before
    optimizer = OPTIMIZERS[name](decay_groups(model), lr=1e-5)
    stepper = Stepper(optimizer)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    stepper.step(model.parameters())
    for key, old in before.items():
        parameter = model.get_parameter(key)
        assert parameter.dtype == torch.float32
        # bf16 could not hold one step of it from 1.
        change = (parameter.detach() - old).abs()
        assert 0 < change.max() < 1e-3
        kept = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor)]
        floats = {t.dtype for t in kept if t.is_floating_point() and t.numel() > 1}
        assert floats <= {torch.float32}, f"{key}: a moment of {floats}"


@each_optimizer
@pytest.mark.parametrize("size", SIZES)
def test_a_matrix_of_any_size_steps_and_is_quantised_where_the_docs_say(
    name: str, size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = 0.05 * torch.randn(1, size, generator=generator)
    start = start.where(start.abs() > 0.01, 0.01).bfloat16()
    parameter = nn.Parameter(start.clone())
    optimizer = OPTIMIZERS[name]([parameter], lr=1e-2)
    for _ in range(3):
        parameter.grad = torch.randn(1, size, generator=generator).sign().bfloat16()
        optimizer.step()
    assert parameter.isfinite().all()
    assert (parameter != start).double().mean() > 0.9
    is_small = [
        type(t) is not Tensor or t.element_size() == 1
        for key, t in optimizer.state[parameter].items()
        if isinstance(t, Tensor) and t.numel() >= size > 1 and key not in ("remainder", "qmap1")
    ]
    if size > 1:
        assert any(is_small) == (size in QUANTISED.get(name, []))


def test_rounding_at_random_without_bf16_weights_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    setattr(optimizer, "bf16_stochastic_round", True)  # noqa: B010  # as torchao's optimizers say
    with pytest.raises(ConfigError, match="bf16_stochastic_round=True has no effect"):
        Stepper(optimizer)

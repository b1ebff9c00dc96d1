"""AdamW for bf16 weights: what an update loses to rounding is kept, all of it.

A bf16 number is the upper half of an fp32 number. The remainder is the lower half, in units of its
last bit: weight and remainder together are an fp32 weight, in the bytes of bf16 and a Kahan buffer.

Bytes a parameter beside weight and gradient: 8 for the fp32 moments, 2 for the remainder. fp32
parameters take plain AdamW.

Source: AdamW (1711.05101); compensated updates in bf16 (2010.06192).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from solotune.errors import ConfigError

# Numbers stepped at a time: the fp32 temporaries of a whole embedding would make the memory peak.
# On CPU they stay in the cache (a quarter of the time); a card wants fewer, larger kernels.
_PIECE_ON_CPU, _PIECE_ON_A_CARD = 2**18, 2**23


class AdamWKahan(Optimizer):
    """AdamW whose bf16 weights are the rounded weights of an fp32 run on the same gradients.

    Weight decay is part of the compensated update: multiplied straight into a bf16 weight it is
    lost whenever lr * weight_decay is under 2^-9, that is, at every usual setting.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"optimizer: lr={lr}, betas={tuple(betas)}, weight_decay={weight_decay}: rates are "
                "0 or more, betas at least 0 and below 1"
            )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype != torch.float32:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        state["step"] += 1
        tensors = [parameter, grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]]
        if "remainder" in state:
            tensors.append(state["remainder"])
        size = _PIECE_ON_CPU if parameter.device.type == "cpu" else _PIECE_ON_A_CARD
        for piece in zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True):
            _update_(*piece, step=state["step"], group=group)


def _update_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    remainder: Tensor | None = None,
    *,
    step: int,
    group: dict[str, Any],
) -> None:
    """Step one piece of a parameter in place; the arithmetic is fp32."""
    beta1, beta2 = group["betas"]
    grad = grad.float()
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    update = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
    torch.div(exp_avg, update, out=update)
    master = weight if remainder is None else _join(weight, remainder)
    update.div_(1 - beta1**step).add_(master, alpha=group["weight_decay"]).mul_(-group["lr"])
    master.add_(update)
    if remainder is not None:
        _split_(master, weight, remainder)


def _join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 weights whose upper halves, rounded, are `weight`."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def _split_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write fp32 weights as bf16 ones, rounded to nearest, and what these miss of their bits."""
    bits = master.view(torch.int32)
    upper = bits.add(2**15).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper)
    remainder.copy_(bits.sub_(upper.bitwise_left_shift_(16)))

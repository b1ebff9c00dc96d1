"""AdamW for bf16 weights: what an update loses to rounding is kept.

Bytes a bf16 parameter, beside weight and gradient:

    residual     int16 2 (an fp32 weight in all), int8 1, none 0 (rounded at random)
    state_dtype  fp32 8, bf16 4, int8 2

Source: AdamW (1711.05101); compensated updates and stochastic rounding in bf16 (2010.06192).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from solotune.optim.compensated import Compensated, Residual
from solotune.optim.moments import StateDtype


class AdamWKahan(Compensated):
    """AdamW whose bf16 weights are the rounded weights of an fp32 run on the same gradients.

    Weight decay is part of the compensated update: multiplied straight into a bf16 weight it is
    lost whenever lr * weight_decay is under 2^-9, that is, at every usual setting. What is random
    is keyed by `seed`, step and parameter: rounding, and with `dither` the first remainders, which
    let rounded weights follow from the first step on.
    """

    moments = {"exp_avg": True, "exp_avg_sq": False}  # noqa: RUF012 (declared by the base)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        residual: Residual = "int16",
        state_dtype: StateDtype = "fp32",
        dither: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "residual": residual,
                "state_dtype": state_dtype,
                "dither": dither,
                "seed": seed,
            },
        )

    def update_(
        self,
        master: Tensor,
        grad: Tensor,
        moments: list[Tensor],
        *,
        step: int,
        group: dict[str, Any],
    ) -> None:
        exp_avg, exp_avg_sq = moments
        beta1, beta2 = group["betas"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
        torch.div(exp_avg, update, out=update)
        update.div_(1 - beta1**step).add_(master, alpha=group["weight_decay"]).mul_(-group["lr"])
        master.add_(update)

"""AdamW for bf16 weights: what an update loses to rounding is kept.

Bytes a bf16 parameter, beside weight and gradient:

    residual     int16 2 (an fp32 weight in all), int8 1, none 0 (rounded at random)
    state_dtype  fp32 8, bf16 4, int8 2

Source: AdamW (1711.05101); compensated updates and stochastic rounding in bf16 (2010.06192).
"""

from collections.abc import Iterable, Sequence
from typing import Any

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
        compile: bool | None = None,
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
            compile=compile,
        )

    @staticmethod
    def numbers(step: int, group: dict[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        corrections = 1 / (1 - beta1**step), 1 / (1 - beta2**step)
        rates = group["eps"], group["weight_decay"], -group["lr"]
        return (beta1, 1 - beta1, beta2, 1 - beta2, *corrections, *rates)

    @staticmethod
    def update_(
        master: Tensor, grad: Tensor, moments: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> None:
        exp_avg, exp_avg_sq = moments
        beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, minus_lr = numbers
        exp_avg.mul_(beta1).add_(grad * rest1)
        exp_avg_sq.mul_(beta2).add_((grad * grad).mul_(rest2))
        root = (exp_avg_sq * correction2).sqrt_().add_(eps)
        update = (exp_avg * correction1).div_(root).add_(master * decay)
        master.add_(update.mul_(minus_lr))

"""Lion for bf16 weights: one moment, and what an update loses to rounding is kept.

Bytes a bf16 parameter, beside weight and gradient: `residual` int16 2, int8 1, none 0;
`state_dtype` fp32 4, bf16 2, int8 1.

Source: Lion (2302.06675).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from solotune.optim.compensated import Compensated, Residual
from solotune.optim.moments import StateDtype


class LionKahan(Compensated):
    """Lion: every weight moves by `lr` in the direction of a mean of gradients.

    It wants a rate of a third to a tenth of AdamW's, and a decay as much larger.
    """

    moments = {"exp_avg": True}  # noqa: RUF012 (declared by the base)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
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
        return beta1, 1 - beta1, beta2, 1 - beta2, group["weight_decay"], -group["lr"]

    @staticmethod
    def update_(
        master: Tensor, grad: Tensor, moments: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> None:
        (exp_avg,) = moments
        beta1, rest1, beta2, rest2, decay, minus_lr = numbers
        update = (exp_avg * beta1).add_(grad * rest1).sign_()
        exp_avg.mul_(beta2).add_(grad * rest2)
        master.add_(update.add_(master * decay).mul_(minus_lr))

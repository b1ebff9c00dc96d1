"""What AdamWKahan and LionKahan share: bf16 weights that lose nothing, stepped piece by piece."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from solotune.device_kind import device_kind
from solotune.errors import ConfigError
from solotune.optim.moments import BLOCK, new_moment, read_moment, write_moment_
from solotune.optim.noise import Noise
from solotune.optim.rounding import join, split_

Residual = Literal["int16", "int8", "none"]

# Numbers stepped at a time: the fp32 temporaries of a whole embedding would make the memory peak.
# On CPU they stay in the cache (a quarter of the time); a card wants fewer, larger kernels.
_PIECE_ON_CPU, _PIECE = 2**18, 2**23
assert _PIECE_ON_CPU % BLOCK == 0


class Compensated(Optimizer):
    """Base of an optimizer that works on fp32 weights made of bf16 ones and their remainders.

    A subclass names its `moments` (True: signed) and makes the fp32 update. Its `defaults` hold lr,
    betas and weight_decay; `residual`; `state_dtype`, of the moments of matrices, while
    one-dimensional parameters, norms and biases, keep fp32 ones; `dither` and `seed`.
    """

    moments: dict[str, bool]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        residual, state_dtype, seed = (defaults[k] for k in ("residual", "state_dtype", "seed"))
        lr, decay, betas = defaults["lr"], defaults["weight_decay"], tuple(defaults["betas"])
        if lr < 0 or decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"optimizer: lr={lr}, betas={betas}, weight_decay={decay}: rates are 0 or more, "
                "betas at least 0 and below 1"
            )
        if residual not in ("int16", "int8", "none"):
            raise ConfigError(f"optimizer.residual={residual}: use int16, int8 or none")
        if state_dtype not in ("fp32", "bf16", "int8"):
            raise ConfigError(f"optimizer.state_dtype={state_dtype}: use fp32, bf16 or int8")
        if not 0 <= seed < 2**31:
            raise ConfigError(f"optimizer.seed={seed}: use 0 or more, and less than 2**31")
        self._numbers: dict[Tensor, int] = {}  # place of each parameter, which keys its noise
        super().__init__(params, defaults)
        if residual != "int16" and not any(p.dtype == torch.bfloat16 for p in self._numbers):
            raise ConfigError(
                f"optimizer.residual={residual} has no effect: no weight is bf16, set dtype=bf16 "
                "or remove the key"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._numbers[parameter] = len(self._numbers)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def update_(
        self,
        master: Tensor,
        grad: Tensor,
        moments: list[Tensor],
        *,
        step: int,
        group: dict[str, Any],
    ) -> None:
        """Change fp32 weights and fp32 moments in place, given the fp32 gradient; all flat."""
        raise NotImplementedError

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= self._new_state(parameter, group)
        state["step"] += 1
        key = {"seed": group["seed"], "step": state["step"], "parameter": self._numbers[parameter]}
        rounds = any(t.dtype not in (torch.float32, torch.int16) for t in self._kept(state))
        rounds |= parameter.dtype != torch.float32 and "remainder" not in state
        noise = Noise(parameter.device, **key) if rounds else None

        size = _PIECE_ON_CPU if device_kind(parameter) == "cpu" else _PIECE
        weight, grad = parameter.view(-1), grad.contiguous().view(-1)
        for start in range(0, weight.numel(), size):
            piece = slice(start, start + size)
            blocks = slice(start // BLOCK, -(-(start + size) // BLOCK))
            kept = {
                name: value.view(-1)[blocks if name.endswith("_scale") else piece]
                for name, value in state.items()
                if name != "step"
            }
            self._step_piece(weight[piece], grad[piece], kept, noise, state["step"], group)

    def _step_piece(
        self,
        weight: Tensor,
        grad: Tensor,
        kept: dict[str, Tensor],
        noise: Noise | None,
        step: int,
        group: dict[str, Any],
    ) -> None:
        is_fp32, remainder = weight.dtype == torch.float32, kept.get("remainder")
        master = weight if is_fp32 else join(weight, remainder)
        pairs = [(kept[name], kept.get(f"{name}_scale")) for name in self.moments]
        values = [read_moment(moment, scale) for moment, scale in pairs]
        self.update_(master, grad.float(), values, step=step, group=group)
        for (moment, scale), value in zip(pairs, values, strict=True):
            write_moment_(moment, scale, value, noise)
        if not is_fp32:
            split_(master, weight, remainder, noise)

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        dtype = group["state_dtype"] if parameter.dim() > 1 else "fp32"
        state: dict[str, Any] = {"step": 0}
        for name, signed in self.moments.items():
            state |= new_moment(name, parameter, dtype, signed=signed)
        if parameter.dtype == torch.bfloat16 and group["residual"] != "none":
            state["remainder"] = self._first_remainder(parameter, group)
        return state

    def _first_remainder(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the rounded weights may have lacked before: anything, with equal chance.

        With 0 every weight stands in the middle of its rounding step, and none shows the first half
        step of its change. With `dither` some are near the end of theirs, so that rounded weights
        follow in the mean from the first step on.
        """
        kind = torch.int16 if group["residual"] == "int16" else torch.int8
        if not group["dither"]:
            return torch.zeros_like(parameter, dtype=kind)
        number = self._numbers[parameter]
        noise = Noise(parameter.device, seed=group["seed"], step=0, parameter=number)
        remainder = noise.bytes_like(parameter, each=kind.itemsize).view(kind)
        # The bits of 0 have no smaller neighbour of the same sign.
        return remainder.view(parameter.shape).masked_fill_(parameter == 0, 0)

    @staticmethod
    def _kept(state: dict[str, Any]) -> list[Tensor]:
        return [value for value in state.values() if isinstance(value, Tensor)]

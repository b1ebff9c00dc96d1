"""What AdamWKahan and LionKahan share: bf16 weights that lose nothing, stepped piece by piece."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from solotune.device_kind import device_kind, is_planning
from solotune.errors import ConfigError
from solotune.optim.moments import BLOCK, new_moment, read_moment, write_moment_
from solotune.optim.noise import Noise, noise_keys
from solotune.optim.rounding import join, split_

Residual = Literal["int16", "int8", "none"]

# Numbers stepped at a time: the fp32 temporaries of a whole embedding would make the memory peak.
# On CPU they stay in the cache, and are large enough to be shared by threads; a card wants fewer,
# larger kernels. Compiled there are none.
_PIECE_ON_CPU, _PIECE = 2**18, 2**23
assert _PIECE_ON_CPU % BLOCK == _PIECE % BLOCK == 0
_COMPILED_FROM = 2**24  # numbers of all parameters, from where seconds of compiling pay


class Compensated(Optimizer):
    """Base of an optimizer that works on fp32 weights made of bf16 ones and their remainders.

    A subclass names its `moments` (True: signed) and makes the fp32 update. Its `defaults` hold lr,
    betas and weight_decay; `residual`; `state_dtype`, of the moments of matrices, while
    one-dimensional parameters, norms and biases, keep fp32 ones; `dither` and `seed`. `compile`
    None compiles the update where that pays.
    """

    moments: dict[str, bool]

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, compile: bool | None
    ) -> None:
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
        self._compile = compile
        self._news: list[str] = []
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

    @staticmethod
    def numbers(step: int, group: dict[str, Any]) -> tuple[float, ...]:
        """Return the numbers of `update_` that change from step to step, or by group."""
        raise NotImplementedError

    @staticmethod
    def update_(
        master: Tensor, grad: Tensor, moments: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> None:
        """Change fp32 weights and fp32 moments in place, given the fp32 gradient."""
        raise NotImplementedError

    def news(self) -> list[str]:
        """Return, once, the facts to print about how parameters are stepped."""
        news, self._news = self._news, []
        return news

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= self._new_state(parameter, group)
        state["step"] += 1
        weight, grad = parameter.detach().view(-1), grad.contiguous().view(-1)
        names = [name for name in state if name != "step"]
        kept = {name: state[name].view(-1) for name in names}
        step_piece = self._step_piece_of(parameter, kept, group)
        pieces = _pieces(weight, by_block="exp_avg_scale" in kept)
        key = {"seed": group["seed"], "step": state["step"], "parameter": self._numbers[parameter]}
        keys = noise_keys(weight.device, starts=[piece.start for piece in pieces], **key)
        numbers = torch.tensor(self.numbers(state["step"], group), dtype=torch.float32)
        numbers = numbers.to(weight.device, non_blocking=True)
        for piece, key in zip(pieces, keys.unbind(), strict=True):
            blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
            scales = [kept.get(f"{name}_scale") for name in self.moments]
            args = (
                # `.data`: views of what they are parts of would be compiled by the size of that.
                weight[piece].data,
                grad[piece].data,
                [kept[name][piece].data for name in self.moments],
                [None if scale is None else scale[blocks].data for scale in scales],
                kept["remainder"][piece].data if "remainder" in kept else None,
                key,
                numbers,
                self.update_,
            )
            by_kernel = self._compile is not False and piece.stop - piece.start > BLOCK
            self._run(step_piece if by_kernel else _step_piece, args)

    def _run(self, step_piece: Callable[..., None], args: tuple[Any, ...]) -> None:
        if step_piece is _step_piece:
            step_piece(*args)
            return
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        try:
            step_piece(*args)
        except TorchDynamoException as error:  # raised before anything ran
            self._compile = False
            reason = " ".join(str(error).split("\n")[:2])
            self._news.append(
                f"warning: {type(self).__name__} is not compiled and so several times slower, as "
                f"torch.compile finds no working compiler here ({reason}); optimizer.compile=False "
                "does without"
            )
            _step_piece(*args)

    def _step_piece_of(
        self, parameter: Tensor, kept: dict[str, Tensor], group: dict[str, Any]
    ) -> Callable[..., None]:
        """Return the function that steps a parameter's pieces: compiled where that pays."""
        wanted = self._compile
        if is_in_torch_dispatch_mode() and not is_planning():  # what watches is to see operators
            wanted = False
        if wanted is None:
            # Compiling takes seconds. torch.compile makes no vectors of int16 on CPU.
            remainder = kept.get("remainder")
            is_int16 = remainder is not None and remainder.dtype == torch.int16
            pays = device_kind(parameter) != "cpu" or not is_int16
            total = sum(p.numel() for p in self._numbers)
            wanted = pays and total >= _COMPILED_FROM
        if not wanted or parameter.dim() < 2:
            return _step_piece
        compiled = (
            _compile if is_planning() else _compiled
        )  # a plan's own torch.compile is no other's
        return compiled(f"{type(self).__name__}_{group['residual']}_{group['state_dtype']}")

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
        number, flat = self._numbers[parameter], parameter.detach().view(-1)
        remainder = torch.empty_like(flat, dtype=kind)
        pieces = _pieces(flat, by_block=False)
        keys = noise_keys(
            flat.device,
            seed=group["seed"],
            step=0,
            parameter=number,
            starts=[piece.start for piece in pieces],
        )
        half = 2 ** (8 * kind.itemsize - 1)
        for piece, key in zip(pieces, keys.unbind(), strict=True):
            bits = Noise(flat[piece].shape, key).bits(8 * kind.itemsize).sub_(half)
            # The bits of 0 have no smaller neighbour of the same sign.
            remainder[piece] = bits.masked_fill_(flat[piece] == 0, 0)
        return remainder.view(parameter.shape)


def _pieces(flat: Tensor, *, by_block: bool) -> list[slice]:
    """Return slices of a flat parameter; with `by_block` a block that is not full has its own."""
    size = _PIECE_ON_CPU if device_kind(flat) == "cpu" else _PIECE
    numel = flat.numel()
    full = numel - numel % BLOCK if by_block else numel
    pieces = [slice(start, min(start + size, full)) for start in range(0, full, size)]
    return pieces if full == numel else [*pieces, slice(full, numel)]


def _step_piece(
    weight: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    remainder: Tensor | None,
    key: Tensor,
    numbers: Tensor,
    update_: Callable[..., None],
) -> None:
    """Step a flat piece in place. Compiled, it is one kernel that reads and writes each once."""
    if any(scale is not None for scale in scales):
        shape = (-1, BLOCK) if weight.numel() % BLOCK == 0 else (1, -1)
        weight, grad = weight.view(shape), grad.view(shape)
        moments = [moment.view(shape) for moment in moments]
        remainder = None if remainder is None else remainder.view(shape)
    is_fp32 = weight.dtype == torch.float32
    noise = Noise(weight.shape, key)
    master = weight if is_fp32 else join(weight, remainder)
    values = [read_moment(m, scale) for m, scale in zip(moments, scales, strict=True)]
    update_(master, grad.float(), values, numbers.unbind())
    for moment, scale, value in zip(moments, scales, values, strict=True):
        write_moment_(moment, scale, value, noise)
    if not is_fp32:
        split_(master, weight, remainder, noise)


def _compile(format: str) -> Callable[..., None]:
    """Return the function compiled for a format: one code for pieces of every size.

    A function of its own for each: torch compiles a function for 8 formats, and then no more.
    """
    code = _step_piece.__code__.replace(co_name=f"step_{format}")
    return torch.compile(FunctionType(code, _step_piece.__globals__), dynamic=True)


_compiled = cache(_compile)

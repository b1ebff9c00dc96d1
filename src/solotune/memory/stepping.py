"""Step some parameters of the one optimizer, and leave the others alone."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from solotune.device_kind import device_kind
from solotune.errors import ConfigError
from solotune.memory.optimizer_state import StateHome

_BLOCK = 256  # numbers that share a scale in bitsandbytes' 8-bit state
_CPU_PIECE = 2**18  # numbers; their fp32 copies stay in the cache: twice as fast as 2**22

_ORDER_FACT = (
    "bf16_stochastic_round draws from torch's one generator in the order in which parameters step: "
    "other bits than in a plain step. "
    "solotune.optim.AdamWKahan with residual=none, state_dtype=int8 draws by step and parameter"
)

_Around = Callable[[list[nn.Parameter]], AbstractContextManager[None]]


class Stepper:
    """Steps parameters by whatever optimizer class, wherever its state lives."""

    def __init__(self, optimizer: Optimizer, home: StateHome | None = None) -> None:
        at_random = getattr(optimizer, "bf16_stochastic_round", False)
        groups = optimizer.param_groups
        if at_random and all(p.dtype != torch.bfloat16 for g in groups for p in g["params"]):
            raise ConfigError(
                "optimizer.bf16_stochastic_round=True has no effect: no weight is bf16, set "
                "dtype=bf16 or remove the key"
            )
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            kind = type(optimizer)
            raise ConfigError(
                f"optimizer: {kind.__module__.removesuffix('.lbfgs')}.{kind.__name__}: it asks for "
                "the loss again within a step (closure): use another optimizer"
            )
        self.optimizer = optimizer
        self.home = home
        self._group_of = {
            p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._after: dict[nn.Parameter, nn.Parameter] = {}  # who stepped next, last time
        self._last: nn.Parameter | None = None
        self._told = False
        self._steps_apart = False  # not all parameters in one call
        self._around: _Around = lambda parameters: nullcontext()

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step those of `parameters` that have a gradient; gradients stay."""
        ready = [p for p in parameters if p.grad is not None]
        if self.home is None:
            with self._around(ready):
                self._step_only(ready)
            return
        for parameter in ready:
            self._remember(parameter)
            state_here = self.home.on_device(parameter, then=self._after.get(parameter))
            with state_here, self._around([parameter]):
                self._step_only([parameter])

    def watch(self, around: _Around) -> None:
        """Enter `around(parameters)` whenever some step; they and their state are on the device."""
        self._around = around

    def keep(self, parameter: nn.Parameter) -> None:
        """Move state that was just restored to where it lives."""
        if self.home is not None:
            self.home.keep(parameter)

    def news(self) -> list[str]:
        """Return, each once after a step, the facts to print about how and where it was done."""
        lines = []
        if not self._told:
            self._told = True
            lines += self.home.lines() if self.home is not None else []
            if self._steps_apart and getattr(self.optimizer, "bf16_stochastic_round", False):
                lines.append(_ORDER_FACT)
        of_optimizer = getattr(self.optimizer, "news", list)  # ours tell what did not compile
        return [*lines, *of_optimizer()]

    def settle(self) -> None:
        """Wait until all state is where a save can read it."""
        if self.home is not None:
            self.home.flush()

    def close(self) -> None:
        """Remove what the state left on disk."""
        if self.home is not None:
            self.home.close()

    def _step_only(self, parameters: list[nn.Parameter]) -> None:
        optimizer = self.optimizer
        self._steps_apart |= len(parameters) < len(self._group_of)
        if hasattr(optimizer, "update_step") and hasattr(optimizer, "prefetch_state"):
            _step_bitsandbytes(optimizer, parameters)
            return
        with self._groups_of(parameters):
            optimizer.step()

    @contextmanager
    def _groups_of(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Narrow the groups to `parameters`: a step of one must not walk past all the others."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for parameter in parameters:
            groups[self._group_of[parameter]]["params"].append(parameter)
        try:
            yield
        finally:
            for group, members in zip(groups, whole, strict=True):
                group["params"] = members

    def _remember(self, parameter: nn.Parameter) -> None:
        """Learn the order of steps: it is the same each time, and tells what to fetch next."""
        if self._last is not None:
            self._after[self._last] = parameter
        self._last = parameter


def _step_bitsandbytes(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Do what `step()` of bitsandbytes does, without its synchronisation after every parameter.

    Paged state is host memory that kernels write: a save waits for the device before it reads it.
    """
    if not optimizer.initialized:
        optimizer.check_overrides()
        # Not its `to_gpu`: it would bring all restored state to the device, also what lives
        # elsewhere.
        optimizer.initialized = True
    wanted = set(parameters)
    with torch.no_grad():
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter not in wanted:
                    continue
                if not optimizer.state[parameter]:
                    optimizer.init_state(group, parameter, group_index, index)
                optimizer.prefetch_state(parameter)
                for piece in _pieces(optimizer, parameter):
                    optimizer.update_step(group, piece, group_index, index)


def _pieces(optimizer: Any, parameter: nn.Parameter) -> Iterator[nn.Parameter]:
    """Yield what bitsandbytes updates in one call: on a card the parameter, on CPU pieces of it.

    Its CPU update holds fp32 copies of weight, gradient and both states, 8 GB for the embedding of
    an 8B model. A piece is a view with views of the state, cut between quantisation blocks.
    """
    state, numel = optimizer.state[parameter], parameter.numel()
    state1 = state["state1"]
    by_blocks = state1.dtype == torch.uint8 and state1.numel() == numel  # AdEMAMix keeps two in one
    if device_kind(parameter) != "cpu" or not by_blocks or numel <= _CPU_PIECE:
        yield parameter
        return
    assert parameter.grad is not None
    flat, grad = parameter.data.view(-1), parameter.grad.reshape(-1)
    per_number = {name: state[name].view(-1) for name in ("state1", "state2") if name in state}
    per_block = {name: state[name] for name in ("absmax1", "absmax2") if name in state}
    for start in range(0, numel, _CPU_PIECE):
        end = min(start + _CPU_PIECE, numel)
        piece = nn.Parameter(flat[start:end], requires_grad=False)
        piece.grad = grad[start:end]
        blocks = slice(start // _BLOCK, -(-end // _BLOCK))
        optimizer.state[piece] = (
            state
            | {name: value[start:end] for name, value in per_number.items()}
            | {name: value[blocks] for name, value in per_block.items()}
        )
        yield piece
        del optimizer.state[piece]
    state["step"] += 1

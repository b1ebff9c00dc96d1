"""How many weights a step leaves as they were: updates below half a rounding step are lost."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from solotune.memory.stepping import Stepper
from solotune.models import Decoder
from solotune.optim.rounding import join

# A few numbers of a few matrices: under a thousandth of a step, on a card 200 small kernels.
_MATRICES, _NUMBERS = 32, 1024
_WARN_ABOVE = 0.5


class UpdateGauge:
    """Measures the share of weights that a step did not change, on samples of the blocks' matrices.

    With what an optimizer remembers of its rounding (`remainder`). Nothing is measured where
    weights, or what is kept of them, are rounded at random: that is right on average, and a number
    that did not change was not lost. Nor was one without a gradient: in the first step of an
    adapter that is half of them.
    """

    def __init__(self, model: Decoder, stepper: Stepper) -> None:
        self.optimizer = stepper.optimizer
        matrices = [p for p in model.blocks.parameters() if p.requires_grad and p.dim() > 1]
        every = max(1, -(-len(matrices) // _MATRICES))
        self._sampled = set(matrices[::every])
        self._same: list[Tensor] = []  # of this step: how many numbers of a sample stayed
        self._pulled: list[Tensor] = []  # of this step: how many of them had a gradient
        self._pending: Callable[[], float] | None = None
        self._told = False
        self.lost: float | None = None  # of the step before the last
        stepper.watch(self._around)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the step inside. Its figure is read at the end of the next: nothing waits."""
        self._same, self._pulled = [], []
        yield
        self.lost = None if self._pending is None else self._pending()
        self._pending = None
        if self._same:
            pulled = torch.stack(self._pulled).sum()
            self._pending = _on_its_way(torch.stack(self._same).sum() / pulled.clamp(min=1))

    def lines(self) -> list[str]:
        """Return, once, the warning that a run deserves whose updates are mostly lost."""
        if self._told or self.lost is None or self.lost <= _WARN_ABOVE:
            return []
        self._told = True
        return [
            f"warning: {self.lost:.0%} of the weights did not change in a step: their updates are "
            "below the rounding of bf16. Use optimizer=solotune.optim.AdamWKahan, which keeps what "
            "is rounded away, an optimizer that rounds at random, or dtype=fp32"
        ]

    def _is_plain(self) -> bool:
        groups = self.optimizer.param_groups
        at_random = getattr(self.optimizer, "bf16_stochastic_round", False)
        return not at_random and groups[0].get("residual", "int16") == "int16"

    @contextmanager
    def _around(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Compare samples before and after these parameters step, where all of them is at hand."""
        sampled = [p for p in parameters if p in self._sampled] if self._is_plain() else []
        before = [(p, _sample(p), self._remainder(p), _sample(_gradient(p)) != 0) for p in sampled]
        yield
        for parameter, old, old_kept, is_pulled in before:
            new, kept = _sample(parameter), self._remainder(parameter)
            if kept is not None:
                if old_kept is None:  # made in this step
                    continue
                old, new = join(old, old_kept), join(new, kept)
            self._same.append(((old == new) & is_pulled).sum())
            self._pulled.append(is_pulled.sum())

    def _remainder(self, parameter: nn.Parameter) -> Tensor | None:
        remainder = self.optimizer.state.get(parameter, {}).get("remainder")
        return _sample(remainder) if isinstance(remainder, Tensor) else None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _on_its_way(value: Tensor) -> Callable[[], float]:
    """Return what waits for a number to be on the host, and for nothing that was queued after it.

    Reading it from the device itself would wait for all that is queued there.
    """
    if not value.is_cuda:
        return lambda: float(value)
    home = torch.empty((), dtype=value.dtype, pin_memory=True)
    home.copy_(value, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def read() -> float:
        there.synchronize()
        return float(home)

    return read


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy of numbers that lie evenly in a tensor."""
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // _NUMBERS)].clone()

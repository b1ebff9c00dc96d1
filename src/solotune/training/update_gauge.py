"""How many weights a step leaves as they were: updates below half a rounding step are lost."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from solotune.models import Decoder
from solotune.optim.rounding import join

# A few numbers of a few matrices: under a thousandth of a step, on a card 200 small kernels.
_MATRICES, _NUMBERS = 32, 1024
_WARN_ABOVE = 0.5


class UpdateGauge:
    """Measures the share of weights that a step did not change, on samples of the blocks' matrices.

    With what an optimizer remembers of its rounding (`remainder`), where that is on the device.
    Nothing is measured where weights, or what is kept of them, are rounded at random: that is right
    on average, and a number that did not change was not lost.
    """

    def __init__(self, model: Decoder, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        matrices = [p for p in model.blocks.parameters() if p.requires_grad and p.dim() > 1]
        every = max(1, -(-len(matrices) // _MATRICES))
        self._matrices = matrices[::every]
        self._pending: Tensor | None = None
        self._told = False
        self.lost: float | None = None  # of the step before the last

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the step inside. Its figure is read at the end of the next: nothing waits."""
        before = [_sample(p) for p in self._matrices] if self._is_plain() else []
        kept = self._remainders()
        yield
        # What was queued before the last read of the device is there by now.
        self.lost = None if self._pending is None else float(self._pending)
        self._pending = self._share(before, kept) if before else None

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

    def _remainders(self) -> list[Tensor | None]:
        return [self._remainder(p) for p in self._matrices]

    def _remainder(self, parameter: nn.Parameter) -> Tensor | None:
        remainder = self.optimizer.state.get(parameter, {}).get("remainder")
        here = isinstance(remainder, Tensor) and remainder.device == parameter.device
        return _sample(remainder) if here else None

    def _share(self, before: list[Tensor], kept: list[Tensor | None]) -> Tensor | None:
        """Return the share of unchanged numbers, on the device."""
        same, total = [], 0
        for parameter, old, old_kept in zip(self._matrices, before, kept, strict=True):
            new, new_kept = _sample(parameter), self._remainder(parameter)
            if new_kept is not None and old_kept is not None:
                old, new = join(old, old_kept), join(new, new_kept)
            elif "remainder" in self.optimizer.state.get(parameter, {}):
                continue  # on the host, or made in this step
            same.append((old == new).sum())
            total += new.numel()
        return torch.stack(same).sum() / total if total else None


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy of numbers that lie evenly in a tensor."""
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // _NUMBERS)].clone()

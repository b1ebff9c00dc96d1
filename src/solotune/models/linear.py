"""Linear layer whose bias may be kept in another dtype than its weight."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from solotune.models.output import AdaptedOutput


class Linear(nn.Linear):
    """`x @ weight.T + bias`; a bias is one-dimensional, so it is trained in fp32 and cast here."""

    def forward(self, input: Tensor, context: Any = None) -> Tensor:
        """`context` is the block's: an adapter takes from it what its dropout is keyed by."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight, bias)

    @property
    def output(self) -> Tensor | AdaptedOutput:
        """What a loss takes of an output layer: its weight (V, D), unless it is adapted."""
        return self.weight

    def dense_weight(self) -> Tensor:
        """Return the weight as numbers, (out, in), whatever it is stored as; not to be changed."""
        return self.weight.detach()

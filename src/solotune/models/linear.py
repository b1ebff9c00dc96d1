"""Linear layer whose bias may be kept in another dtype than its weight."""

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`x @ weight.T + bias`; a bias is one-dimensional, so it is trained in fp32 and cast here."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight, bias)

"""Root-mean-square norm with statistics and scale in fp32.

Shapes: B batch, S tokens, D width.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale x_BSD by weight_D / rms(x); returns x's dtype.

    The scale is a one-dimensional parameter, kept in fp32: half a bf16 step at 1.0 is 2e-3, more
    than any usual learning rate moves it. Source: 1910.07467.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        x32_BSD = x_BSD.float()
        rrms_BS1 = torch.rsqrt(x32_BSD.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * (x32_BSD * rrms_BS1)).to(x_BSD.dtype)

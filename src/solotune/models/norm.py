"""Root-mean-square norm with statistics and scale in fp32.

Shapes: B batch, S tokens, D width.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale x_BSD by (offset + weight_D) / rms(x); returns x's dtype.

    The scale is a one-dimensional parameter, kept in fp32: half a bf16 step at 1.0 is 2e-3, more
    than any usual learning rate moves it. Source: 1910.07467; `offset` 1 is Gemma's.
    """

    def __init__(self, width: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x_BSD: Tensor) -> Tensor:
        x32_BSD = x_BSD.float()
        rrms_BS1 = torch.rsqrt(x32_BSD.square().mean(-1, keepdim=True) + self.eps)
        scale_D = self.weight + self.offset if self.offset else self.weight
        return (scale_D * (x32_BSD * rrms_BS1)).to(x_BSD.dtype)

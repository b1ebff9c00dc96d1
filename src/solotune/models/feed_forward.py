"""Gated feed-forward layer.

Shapes: B batch, S tokens, D width, F feed-forward width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from solotune.models.linear import Linear


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), D -> F -> D. Source: 2002.05202 (SwiGLU)."""

    def __init__(self, width: int, hidden_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden_width, bias=bias)
        self.up_proj = Linear(width, hidden_width, bias=bias)
        self.down_proj = Linear(hidden_width, width, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gated_BSF = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj(gated_BSF)

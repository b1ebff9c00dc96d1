"""Gated feed-forward layer.

Shapes: B batch, S tokens, D width, F feed-forward width.
"""

from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from solotune.models.attention import Context
from solotune.models.linear import Linear

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), D -> F -> D. Source: 2002.05202 (SwiGLU, GEGLU).

    `fused`: gate and up are the two halves of one matrix.
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.fused = fused
        if fused:
            self.gate_up_proj = Linear(width, 2 * hidden_width, bias=bias)
        else:
            self.gate_proj = Linear(width, hidden_width, bias=bias)
            self.up_proj = Linear(width, hidden_width, bias=bias)
        self.down_proj = Linear(hidden_width, width, bias=bias)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        if self.fused:
            gate_BSF, up_BSF = self.gate_up_proj(x_BSD, context).chunk(2, dim=-1)
        else:
            gate_BSF, up_BSF = self.gate_proj(x_BSD, context), self.up_proj(x_BSD, context)
        return self.down_proj(self.activation(gate_BSF) * up_BSF, context)

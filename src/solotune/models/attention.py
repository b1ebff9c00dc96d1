"""Grouped-query self-attention, for training over segments and for decoding with a cache.

Shapes: B batch, S tokens, D width, H heads, G key/value heads, K head width, T cached positions,
M segments a row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solotune.models.linear import Linear
from solotune.models.rope import rotate
from solotune.models.segment_attention import segment_attention


class KVCache:
    """Keys and values of every block for decoding; a token's slot is its position.

    Rows of one batch may differ in length: filler behind a short prompt writes to slots that no
    query sees before the row's own next token has overwritten them.
    """

    def __init__(
        self, num_blocks: int, batch: int, max_tokens: int, groups: int, head_dim: int, **factory
    ) -> None:
        shape = (num_blocks, batch, max_tokens, groups, head_dim)
        self._keys = torch.zeros(shape, **factory)
        self._values = torch.zeros(shape, **factory)

    def update(
        self, block: int, positions_BS: Tensor, k_BSGK: Tensor, v_BSGK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values at their positions; return all of the block's."""
        row_B1 = torch.arange(len(positions_BS), device=positions_BS.device).unsqueeze(1)
        keys_BTGK, values_BTGK = self._keys[block], self._values[block]
        keys_BTGK[row_B1, positions_BS] = k_BSGK
        values_BTGK[row_B1, positions_BS] = v_BSGK
        return keys_BTGK, values_BTGK


class Context(NamedTuple):
    """What a block needs besides its input; made once a batch by `Decoder.context`."""

    positions_BS: Tensor
    segments_BM: Tensor | None  # lengths, int32; None: attend to the cache
    cos_BSK: Tensor
    sin_BSK: Tensor
    cache: KVCache | None = None

    def tensors(self) -> list[Tensor]:
        """Return what all blocks share, the cache excepted."""
        return [value for value in self if isinstance(value, Tensor)]


class Attention(nn.Module):
    """Self-attention with rotary positions; `index` is the block's slot in the cache."""

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        index: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.index = index
        self.q_proj = Linear(width, num_heads * head_dim, bias=bias)
        self.k_proj = Linear(width, num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(width, num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_heads * head_dim, width, bias=bias)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_BSHK = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSGK = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSGK = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHK = rotate(q_BSHK, context.cos_BSK, context.sin_BSK)
        k_BSGK = rotate(k_BSGK, context.cos_BSK, context.sin_BSK)
        scale = self.head_dim**-0.5
        k_BTGK, v_BTGK = k_BSGK, v_BSGK
        if context.cache is not None:
            k_BTGK, v_BTGK = context.cache.update(self.index, context.positions_BS, k_BSGK, v_BSGK)
        if context.segments_BM is not None:  # training, and a prompt, whose keys are all new
            out_BSHK = segment_attention(q_BSHK, k_BSGK, v_BSGK, context.segments_BM, scale=scale)
        else:
            out_BSHK = _cached_attention(q_BSHK, k_BTGK, v_BTGK, context.positions_BS, scale)
        return self.o_proj(out_BSHK.flatten(-2))


def _cached_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions_BS: Tensor, scale: float
) -> Tensor:
    """Attend to every cached position up to the query's own."""
    slot_T = torch.arange(k_BTGK.size(1), device=positions_BS.device)
    seen_B1ST = (slot_T <= positions_BS.unsqueeze(-1)).unsqueeze(1)
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BTGK, v_BTGK))
    out_BHSK = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen_B1ST, scale=scale, enable_gqa=True
    )
    return out_BHSK.transpose(1, 2)

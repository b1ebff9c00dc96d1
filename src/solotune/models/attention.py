"""Grouped-query self-attention, for training over segments and for decoding with a cache.

Shapes: B batch, S tokens, D width, H heads, G key/value heads, K head width, of which P rotated,
T cached positions, M segments a row.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from solotune.models.linear import Linear
from solotune.models.masked_attention import attend_masked
from solotune.models.norm import RMSNorm
from solotune.models.rope import Angles, rotate
from solotune.models.segment_attention import segment_attention


class KVCache:
    """Keys and values of every block for decoding; a token's slot is its position.

    Rows of one batch may differ in length: filler behind a short prompt writes to slots that no
    query sees before the row's own next token has overwritten them.
    """

    def __init__(
        self, num_blocks: int, batch: int, max_tokens: int, groups: int, head_dim: int, **factory
    ) -> None:
        self.max_tokens = max_tokens
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
    angles: tuple[Angles, ...]  # one for each rotary base of the model
    cache: KVCache | None = None
    key: Tensor | None = None  # of dropout, on the host; None: nothing is dropped

    def tensors(self) -> list[Tensor]:
        """Return what all blocks share, the cache excepted."""
        values = [self.positions_BS, self.segments_BM, self.key]
        values += [tensor for angles in self.angles for tensor in angles]
        return [value for value in values if value is not None]


class Attention(nn.Module):
    """Self-attention with rotary positions.

    index      the block's slot in the cache
    scale      of the scores; None: 1 / sqrt(head_dim)
    rope       which of the context's angles turns queries and keys; None: none does
    window     how many tokens a query sees, itself included; None: all before it
    soft_cap   c bounds the scaled scores: c * tanh(score / c)
    norm_eps   of a norm over queries and over keys, by head or over all heads (`norm_over`)
    fused      q, k and v are parts of one matrix
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        index: int,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        rope: int | None = 0,
        window: int | None = None,
        soft_cap: float | None = None,
        norm_over: Literal["head", "heads"] | None = None,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.index = index
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope = rope
        self.window = window
        self.soft_cap = soft_cap
        self.norm_over = norm_over
        self.fused = fused
        self.widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        if fused:
            self.qkv_proj = Linear(width, sum(self.widths), bias=bias)
        else:
            self.q_proj = Linear(width, self.widths[0], bias=bias)
            self.k_proj = Linear(width, self.widths[1], bias=bias)
            self.v_proj = Linear(width, self.widths[2], bias=bias)
        self.o_proj = Linear(self.widths[0], width, bias=output_bias)
        if norm_over is not None:
            normed = [head_dim, head_dim] if norm_over == "head" else self.widths[:2]
            self.q_norm = RMSNorm(normed[0], norm_eps, offset=norm_offset)
            self.k_norm = RMSNorm(normed[1], norm_eps, offset=norm_offset)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_BSHK, k_BSGK, v_BSGK = self.project(x_BSD, context)
        if self.rope is not None:
            cos_BSP, sin_BSP, query_scale_BS = context.angles[self.rope]
            q_BSHK = rotate(q_BSHK, cos_BSP, sin_BSP)
            k_BSGK = rotate(k_BSGK, cos_BSP, sin_BSP)
            if query_scale_BS is not None:
                q_BSHK = q_BSHK * query_scale_BS[..., None, None].to(q_BSHK.dtype)
        k_BTGK, v_BTGK = k_BSGK, v_BSGK
        if context.cache is not None:
            k_BTGK, v_BTGK = context.cache.update(self.index, context.positions_BS, k_BSGK, v_BSGK)
        if context.segments_BM is not None:  # training, and a prompt, whose keys are all new
            out_BSHK = segment_attention(
                q_BSHK,
                k_BSGK,
                v_BSGK,
                context.segments_BM,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
            )
        else:
            seen_BST = _seen(k_BTGK.size(1), context.positions_BS, self.window)
            out_BSHK = attend_masked(q_BSHK, k_BTGK, v_BTGK, seen_BST, self.scale, self.soft_cap)
        return self.o_proj(out_BSHK.flatten(-2), context)

    def project(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BSHK, k_BSGK, v_BSGK, normed where the family norms them."""
        if self.fused:
            q, k, v = self.qkv_proj(x_BSD, context).split(self.widths, dim=-1)
        else:
            q, k, v = (p(x_BSD, context) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm_over == "heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSHK, k_BSGK, v_BSGK = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.norm_over == "head":
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        return q_BSHK, k_BSGK, v_BSGK


def _seen(num_slots: int, positions_BS: Tensor, window: int | None) -> Tensor:
    """Return a mask (B, S, T) of the cached positions that a query sees: up to its own."""
    distance_BST = positions_BS.unsqueeze(-1) - torch.arange(num_slots, device=positions_BS.device)
    seen_BST = distance_BST >= 0
    return seen_BST if window is None else seen_BST & (distance_BST < window)

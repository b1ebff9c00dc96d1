"""Attention under a dense mask made from the segments: for devices without a path of their own.

Without a soft cap, scaled_dot_product_attention under one (B, 1, S, S) mask. With one, which no
fused kernel of PyTorch has, in blocks of query rows, so that the scores of one block exist at a
time: (B, H, 512, S) in fp32.

Shapes: B batch, S tokens, H heads, G key/value heads, K head width, M segments a row,
Q query rows of one block, N keys of one block.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_ROWS = 512


def forward(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Return out_BSHK, zero at filler."""
    out_BSHK = torch.empty_like(q_BSHK, memory_format=torch.contiguous_format)
    for rows, keys, seen_BQN in _blocks(segments_BM, q_BSHK.size(1), window, soft_cap):
        k_BNHK, v_BNHK = (_repeated(t[:, keys], q_BSHK) for t in (k_BSGK, v_BSGK))
        qkv = q_BSHK[:, rows], k_BNHK, v_BNHK
        out_BSHK[:, rows] = attend_masked(*qkv, seen_BQN, scale, soft_cap)
    return out_BSHK.masked_fill_(_filler(segments_BM, q_BSHK.size(1)), 0)


def backward(
    grad_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: autograd's of each block, computed again."""
    dq_BSHK = torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format)
    dk_BSGK = torch.zeros_like(k_BSGK, memory_format=torch.contiguous_format)
    dv_BSGK = torch.zeros_like(v_BSGK, memory_format=torch.contiguous_format)
    grad_BSHK = grad_BSHK.masked_fill(_filler(segments_BM, q_BSHK.size(1)), 0)
    for rows, keys, seen_BQN in _blocks(segments_BM, q_BSHK.size(1), window, soft_cap):
        qkv = q_BSHK[:, rows], k_BSGK[:, keys], v_BSGK[:, keys]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in qkv]
            k_BNHK, v_BNHK = (_repeated(t, q_BSHK) for t in leaves[1:])
            out_BQHK = attend_masked(leaves[0], k_BNHK, v_BNHK, seen_BQN, scale, soft_cap)
            dq, dk, dv = torch.autograd.grad(out_BQHK, leaves, grad_BSHK[:, rows])
        dq_BSHK[:, rows] = dq
        dk_BSGK[:, keys] += dk
        dv_BSGK[:, keys] += dv
    return dq_BSHK, dk_BSGK, dv_BSGK


def attend_masked(
    q_BQHK: Tensor,
    k_BNGK: Tensor,
    v_BNGK: Tensor,
    seen_BQN: Tensor,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Return out_BQHK over the keys that a mask shows; every query sees at least one."""
    q, k, v = (t.transpose(1, 2) for t in (q_BQHK, k_BNGK, v_BNGK))
    mask_B1QN = seen_BQN.unsqueeze(1)
    shared = q.size(1) // k.size(1)
    if soft_cap is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1QN, scale=scale, enable_gqa=shared > 1
        )
        return out.transpose(1, 2)
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores_BHQN = soft_cap * (q @ k.transpose(2, 3)).to(wide).mul(scale / soft_cap).tanh()
    p_BHQN = scores_BHQN.masked_fill(~mask_B1QN, -torch.inf).softmax(-1).to(v.dtype)
    return (p_BHQN @ v).transpose(1, 2)


def _repeated(x_BNGK: Tensor, q_BSHK: Tensor) -> Tensor:
    """Return as many key heads as query heads: so a fused kernel takes them, in training too.

    The plain one holds all scores at once.
    """
    return x_BNGK.repeat_interleave(q_BSHK.size(2) // x_BNGK.size(2), dim=2)


def _blocks(
    segments_BM: Tensor, tokens: int, window: int | None, soft_cap: float | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (query rows, their keys, seen_BQN); filler sees itself, so nothing is NaN.

    Lengths stay on the device: blocks are those of the whole row, not of its segments.
    """
    position_S = torch.arange(tokens, device=segments_BM.device)
    ends_BM = segments_BM.cumsum(1)
    position_BS = position_S.repeat(len(ends_BM), 1)  # searchsorted warns about an expanded one
    segment_BS = torch.searchsorted(ends_BM, position_BS, right=True)
    step = tokens if soft_cap is None else _BLOCK_ROWS
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        rows = slice(first, last)
        keys = slice(0 if window is None else max(0, first - window + 1), last)
        distance_QN = position_S[rows].unsqueeze(1) - position_S[keys]
        near_QN = distance_QN >= 0
        if window is not None:
            near_QN &= distance_QN < window
        yield rows, keys, near_QN & (segment_BS[:, rows, None] == segment_BS[:, None, keys])


def _filler(segments_BM: Tensor, tokens: int) -> Tensor:
    """Return a mask (B, S, 1, 1) of the positions behind the last segment."""
    position_S = torch.arange(tokens, device=segments_BM.device)
    return (position_S >= segments_BM.sum(1, keepdim=True))[..., None, None]

"""Attention under a dense mask made from the segments: for devices without a path of their own.

Without a soft cap, scaled_dot_product_attention under one (B, 1, S, S) mask. With one, which no
fused kernel of PyTorch has, and in backward, in blocks of query rows, so that the scores of one
block exist at a time: (B, H, 512, S) in fp32.

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
    tokens = q_BSHK.size(1)
    for rows, keys, seen_BQN in _blocks(
        segments_BM, tokens, window, tokens if soft_cap is None else _BLOCK_ROWS
    ):
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
    """Return the gradients of q, k and v, block by block from probabilities computed again.

    By hand: inside an operator autograd is off, whatever the gradient mode.
    """
    dq_BSHK = torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format)
    dk_BSGK = torch.zeros_like(k_BSGK, memory_format=torch.contiguous_format)
    dv_BSGK = torch.zeros_like(v_BSGK, memory_format=torch.contiguous_format)
    grad_BSHK = grad_BSHK.masked_fill(_filler(segments_BM, q_BSHK.size(1)), 0)
    heads = k_BSGK.size(2)
    for rows, keys, seen_BQN in _blocks(segments_BM, q_BSHK.size(1), window, _BLOCK_ROWS):
        blocks = grad_BSHK[:, rows], q_BSHK[:, rows], k_BSGK[:, keys], v_BSGK[:, keys]
        grad, q, k, v = (_repeated(t, q_BSHK).transpose(1, 2) for t in blocks)
        tanh_BHQN, p_BHQN = _probabilities(q, k, seen_BQN, scale, soft_cap)
        dv_BHNK = p_BHQN.to(v.dtype).transpose(2, 3) @ grad
        slope_BHQN = (grad @ v.transpose(2, 3)).to(p_BHQN.dtype)
        slope_BHQN -= (slope_BHQN * p_BHQN).sum(-1, keepdim=True)
        slope_BHQN *= p_BHQN
        if tanh_BHQN is not None:
            slope_BHQN *= 1 - tanh_BHQN.square()
        slope_BHQN = (slope_BHQN * scale).to(q.dtype)
        dq_BSHK[:, rows] = (slope_BHQN @ k).transpose(1, 2)
        for sum_BSGK, part in ((dk_BSGK, slope_BHQN.transpose(2, 3) @ q), (dv_BSGK, dv_BHNK)):
            # Query heads that share a key head lie next to each other.
            sum_BSGK[:, keys] += part.unflatten(1, (heads, -1)).sum(2).transpose(1, 2)
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
    _, p_BHQN = _probabilities(q, k, seen_BQN, scale, soft_cap)
    return (p_BHQN.to(v.dtype) @ v).transpose(1, 2)


def _probabilities(
    q_BHQK: Tensor, k_BHNK: Tensor, seen_BQN: Tensor, scale: float, soft_cap: float | None
) -> tuple[Tensor | None, Tensor]:
    """Return the tanh of capped scores, if they are, and the probabilities p_BHQN, both in fp32."""
    wide = torch.promote_types(q_BHQK.dtype, torch.float32)
    scores_BHQN, tanh_BHQN = (q_BHQK @ k_BHNK.transpose(2, 3)).to(wide).mul_(scale), None
    if soft_cap is not None:
        tanh_BHQN = scores_BHQN.div_(soft_cap).tanh_()
        scores_BHQN = soft_cap * tanh_BHQN
    return tanh_BHQN, scores_BHQN.masked_fill_(~seen_BQN.unsqueeze(1), -torch.inf).softmax(-1)


def _repeated(x_BNGK: Tensor, q_BSHK: Tensor) -> Tensor:
    """Return as many key heads as query heads: so a fused kernel takes them, in training too.

    The plain one holds all scores at once.
    """
    return x_BNGK.repeat_interleave(q_BSHK.size(2) // x_BNGK.size(2), dim=2)


def _blocks(
    segments_BM: Tensor, tokens: int, window: int | None, step: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (`step` query rows, their keys, seen_BQN); filler sees itself, so nothing is NaN.

    Lengths stay on the device: blocks are those of the whole row, not of its segments.
    """
    position_S = torch.arange(tokens, device=segments_BM.device)
    ends_BM = segments_BM.cumsum(1)
    position_BS = position_S.repeat(len(ends_BM), 1)  # searchsorted warns about an expanded one
    segment_BS = torch.searchsorted(ends_BM, position_BS, right=True)
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

"""Attention on CPU: segment by segment, matrix products and softmax, in blocks of query rows.

Shapes: B batch, S tokens, H heads, G key/value heads, R = H/G, K head width, M segments a row,
Q query rows of one block, N keys of one block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from solotune.device_kind import to_list

# Query rows of one block. A block sees the keys up to its own end only, so smaller blocks waste
# less on masked pairs; larger ones have fewer calls. 256 was the fastest of 128, 256, 512.
_BLOCK_ROWS = 256


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
    out_BSHK = torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format)
    for row, rows, keys in _blocks(segments_BM, window):
        q_QHK, k_NGK = q_BSHK[row, rows], k_BSGK[row, keys]
        hidden_QN = _hidden(rows, keys, window)
        p_GQN, _ = _probabilities(q_QHK, k_NGK, hidden_QN, scale, soft_cap)
        out_GQK = torch.bmm(p_GQN, v_BSGK[row, keys].transpose(0, 1))
        out_BSHK[row, rows] = _to_rows(out_GQK, q_BSHK.size(2))
    return out_BSHK


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
    """Return the gradients of q, k and v."""
    dq_BSHK = torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format)
    dk_BSGK = torch.zeros_like(k_BSGK, memory_format=torch.contiguous_format)
    dv_BSGK = torch.zeros_like(v_BSGK, memory_format=torch.contiguous_format)
    groups = k_BSGK.size(2)
    for row, rows, keys in _blocks(segments_BM, window):
        q_QHK, k_NGK = q_BSHK[row, rows], k_BSGK[row, keys]
        hidden_QN = _hidden(rows, keys, window)
        p_GQN, slope_GQN = _probabilities(q_QHK, k_NGK, hidden_QN, scale, soft_cap)
        g_GQK = _to_groups(grad_BSHK[row, rows], groups)
        # Later blocks of a segment add to the keys of earlier ones, in a fixed order.
        dv_BSGK[row, keys] += torch.bmm(p_GQN.transpose(1, 2), g_GQK).transpose(0, 1)
        dp_GQN = torch.bmm(g_GQK, v_BSGK[row, keys].permute(1, 2, 0))
        ds_GQN = torch.ops.aten._softmax_backward_data(dp_GQN, p_GQN, -1, p_GQN.dtype)
        if slope_GQN is not None:
            ds_GQN = (ds_GQN * slope_GQN).to(p_GQN.dtype)
        dq_GQK = torch.bmm(ds_GQN, k_NGK.transpose(0, 1)).mul_(scale)
        dq_BSHK[row, rows] = _to_rows(dq_GQK, q_BSHK.size(2))
        dk_GNK = torch.bmm(ds_GQN.transpose(1, 2), _to_groups(q_QHK, groups)).mul_(scale)
        dk_BSGK[row, keys] += dk_GNK.transpose(0, 1)
    return dq_BSHK, dk_BSGK, dv_BSGK


def _blocks(segments_BM: Tensor, window: int | None) -> Iterator[tuple[int, slice, slice]]:
    """Yield (batch row, query rows, their keys) of each block; on CPU lengths cost no sync."""
    for row, lengths in enumerate(to_list(segments_BM)):
        start = 0
        for length in lengths:
            for first in range(start, start + length, _BLOCK_ROWS):
                last = min(first + _BLOCK_ROWS, start + length)
                oldest = start if window is None else max(start, first - window + 1)
                yield row, slice(first, last), slice(oldest, last)
            start += length


def _hidden(rows: slice, keys: slice, window: int | None) -> Tensor:
    """Return a mask (Q, N) of the keys that a query row must not see."""
    num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
    offset = rows.start - keys.start  # of a row's own key
    hidden_QN = torch.ones(num_rows, num_keys, dtype=torch.bool).triu_(offset + 1)
    if window is not None and num_keys > window:
        hidden_QN |= torch.ones(num_rows, num_keys, dtype=torch.bool).tril_(offset - window)
    return hidden_QN


def _probabilities(
    q_QHK: Tensor, k_NGK: Tensor, hidden_QN: Tensor, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return p_GQN, the softmax over the keys each row may see, and the soft cap's slope.

    Q is R times the rows here.
    """
    q_GQK = _to_groups(q_QHK, k_NGK.size(1))
    scores_GQN = torch.bmm(q_GQK, k_NGK.permute(1, 2, 0)).mul_(scale)
    slope_GQN = None
    if soft_cap is not None:
        # In fp32 also for bf16 input: near the cap, 1 - tanh^2 is a difference of alike numbers.
        wide = torch.promote_types(scores_GQN.dtype, torch.float32)
        tanh_GQN = scores_GQN.to(wide).div(soft_cap).tanh_()
        scores_GQN = tanh_GQN * soft_cap
        slope_GQN = 1 - tanh_GQN.square_()
    scores_GQN.unflatten(1, (-1, len(hidden_QN))).masked_fill_(hidden_QN, -torch.inf)
    # The CPU kernel sums in fp32 for bf16 input.
    return torch.softmax(scores_GQN, dim=-1).to(q_QHK.dtype), slope_GQN


def _to_groups(x_QHK: Tensor, groups: int) -> Tensor:
    """Gather the R heads that share a key head: (rows, H, K) -> (G, R * rows, K)."""
    heads, width = x_QHK.shape[1:]
    x_GRQK = x_QHK.unflatten(1, (groups, heads // groups)).permute(1, 2, 0, 3)
    return x_GRQK.reshape(groups, -1, width)


def _to_rows(x_GQK: Tensor, heads: int) -> Tensor:
    """Undo `_to_groups`: (G, R * rows, K) -> (rows, H, K)."""
    groups, _, width = x_GQK.shape
    return x_GQK.view(groups, heads // groups, -1, width).permute(2, 0, 1, 3).flatten(1, 2)

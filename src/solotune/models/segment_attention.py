"""Causal attention that never crosses a segment, as one operator opaque to autograd and compile.

Segments are lengths, int32, zero-padded: they change with every batch, so they reach the operator
as a tensor; as a Python list inside a compiled block they would recompile it each time.

    CUDA, fp16/bf16   PyTorch's variable-length flash attention
    CPU               segment by segment, matrix products and softmax, in blocks of query rows
    anything else     scaled_dot_product_attention with a mask made from the segments

Positions outside every segment (filler) see at most each other: their output is finite, and it
reaches no real position.

Shapes: B batch, S tokens, H heads, G key/value heads, R = H/G, K head width, M segments a row,
Q query rows of one block, N keys of one block.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows of one block on CPU. A block sees the keys up to its own end only, so smaller blocks
# waste less on masked pairs; larger ones have fewer calls. 256 was the fastest of 128, 256, 512.
_BLOCK_ROWS = 256


def segment_attention(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, segments_BM: Tensor, *, scale: float
) -> Tensor:
    """Return out_BSHK, causal within each segment.

    `segments_BM` holds lengths in tokens, int32, on the device of `q`; each row sums to at most S.
    """
    return _attend(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale)[0]


@torch.library.custom_op("solotune::segment_attention", mutates_args=())
def _attend(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, segments_BM: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out_BSHK and, for the flash kernel, the log-sum-exp its backward needs."""
    if _uses_flash(q_BSHK):
        return _flash_forward(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale)
    no_lse = q_BSHK.new_empty(0, dtype=torch.float32)
    if q_BSHK.device.type != "cpu":
        return _masked(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale), no_lse
    out_BSHK = torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format)
    for row, rows, keys in _blocks(segments_BM):
        p_GQN = _probabilities(q_BSHK, k_BSGK, row, rows, keys, scale)
        out_GQK = torch.bmm(p_GQN, v_BSGK[row, keys].transpose(0, 1))
        out_BSHK[row, rows] = _to_rows(out_GQK, q_BSHK.size(2))
    return out_BSHK, no_lse


@_attend.register_fake
def _(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, segments_BM: Tensor, scale: float):
    batch, tokens, heads, _ = q_BSHK.shape
    lse_shape = (heads, batch * tokens) if _uses_flash(q_BSHK) else (0,)
    out_BSHK = torch.empty_like(q_BSHK, memory_format=torch.contiguous_format)
    return out_BSHK, q_BSHK.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op("solotune::segment_attention_backward", mutates_args=())
def _attend_backward(
    grad_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    out_BSHK: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; probabilities are recomputed block by block."""
    if _uses_flash(q_BSHK):
        return _flash_backward(grad_BSHK, q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse, scale)
    if q_BSHK.device.type != "cpu":
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q_BSHK, k_BSGK, v_BSGK)]
            out = _masked(*inputs, segments_BM=segments_BM, scale=scale)
            dq_BSHK, dk_BSGK, dv_BSGK = torch.autograd.grad(out, inputs, grad_BSHK)
            return dq_BSHK, dk_BSGK, dv_BSGK
    dq_BSHK = torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format)
    dk_BSGK = torch.zeros_like(k_BSGK, memory_format=torch.contiguous_format)
    dv_BSGK = torch.zeros_like(v_BSGK, memory_format=torch.contiguous_format)
    for row, rows, keys in _blocks(segments_BM):
        groups = k_BSGK.size(2)
        p_GQN = _probabilities(q_BSHK, k_BSGK, row, rows, keys, scale)
        g_GQK = _to_groups(grad_BSHK[row, rows], groups)
        # Later blocks of a segment add to the keys of earlier ones, in a fixed order.
        dv_BSGK[row, keys] += torch.bmm(p_GQN.transpose(1, 2), g_GQK).transpose(0, 1)
        dp_GQN = torch.bmm(g_GQK, v_BSGK[row, keys].permute(1, 2, 0))
        ds_GQN = torch.ops.aten._softmax_backward_data(dp_GQN, p_GQN, -1, p_GQN.dtype)
        dq_GQK = torch.bmm(ds_GQN, k_BSGK[row, keys].transpose(0, 1)).mul_(scale)
        dq_BSHK[row, rows] = _to_rows(dq_GQK, q_BSHK.size(2))
        q_GQK = _to_groups(q_BSHK[row, rows], groups)
        dk_GNK = torch.bmm(ds_GQN.transpose(1, 2), q_GQK).mul_(scale)
        dk_BSGK[row, keys] += dk_GNK.transpose(0, 1)
    return dq_BSHK, dk_BSGK, dv_BSGK


@_attend_backward.register_fake
def _(grad_BSHK, q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse, scale):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BSHK, k_BSGK, v_BSGK)
    )


def _save(ctx, inputs, output) -> None:
    q_BSHK, k_BSGK, v_BSGK, segments_BM, ctx.scale = inputs
    out_BSHK, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse)


def _backward(ctx, grad_BSHK, _grad_lse):
    q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse = ctx.saved_tensors
    grads = torch.ops.solotune.segment_attention_backward(
        grad_BSHK, q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse, ctx.scale
    )
    return *grads, None, None


_attend.register_autograd(_backward, setup_context=_save)


# --- CPU ------------------------------------------------------------------------------------


def _blocks(segments_BM: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Yield (batch row, query rows, their keys) of each block; on CPU lengths cost no sync."""
    for row, lengths in enumerate(segments_BM.tolist()):
        start = 0
        for length in lengths:
            for first in range(start, start + length, _BLOCK_ROWS):
                last = min(first + _BLOCK_ROWS, start + length)
                yield row, slice(first, last), slice(start, last)
            start += length


def _probabilities(
    q_BSHK: Tensor, k_BSGK: Tensor, row: int, rows: slice, keys: slice, scale: float
) -> Tensor:
    """Return p_GQN, the softmax over the keys each query row may see; Q = R * rows."""
    groups = k_BSGK.size(2)
    q_GQK = _to_groups(q_BSHK[row, rows], groups)
    scores_GQN = torch.bmm(q_GQK, k_BSGK[row, keys].permute(1, 2, 0))
    num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
    hidden = torch.ones(num_rows, num_keys, dtype=torch.bool).triu_(num_keys - num_rows + 1)
    scores_GRQN = scores_GQN.unflatten(1, (-1, num_rows)).mul_(scale)
    scores_GRQN.masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores_GQN, dim=-1)  # its CPU kernel sums in fp32 for bf16 input


def _to_groups(x_QHK: Tensor, groups: int) -> Tensor:
    """Gather the R heads that share a key head: (rows, H, K) -> (G, R * rows, K)."""
    rows, heads, width = x_QHK.shape
    x_GRQK = x_QHK.view(rows, groups, heads // groups, width).permute(1, 2, 0, 3)
    return x_GRQK.reshape(groups, -1, width)


def _to_rows(x_GQK: Tensor, heads: int) -> Tensor:
    """Undo `_to_groups`: (G, R * rows, K) -> (rows, H, K)."""
    groups, _, width = x_GQK.shape
    return x_GQK.view(groups, heads // groups, -1, width).permute(2, 0, 1, 3).flatten(1, 2)


# --- CUDA -----------------------------------------------------------------------------------


def _uses_flash(q_BSHK: Tensor) -> bool:
    """Whether the variable-length flash kernel takes this tensor: its device and dtype alone."""
    return (
        q_BSHK.device.type == "cuda"
        and q_BSHK.dtype in (torch.float16, torch.bfloat16)
        and q_BSHK.size(-1) <= 256
        and q_BSHK.size(-1) % 8 == 0
        and torch.backends.cuda.is_flash_attention_available()
    )


def _cumulative(segments_BM: Tensor, tokens: int) -> Tensor:
    """Return the B*(M+1)+1 cumulative lengths over the flat batch; filler is a segment of its own.

    Stays on the device: empty segments are legal for the kernel, so nothing is filtered.
    """
    filler_B1 = tokens - segments_BM.sum(1, keepdim=True, dtype=torch.int32)
    lengths = torch.cat((segments_BM, filler_B1), dim=1).flatten()
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _flash_forward(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale):
    batch, tokens = q_BSHK.shape[:2]
    bounds = _cumulative(segments_BM, tokens)
    q, k, v = (t.reshape(batch * tokens, *t.shape[2:]) for t in (q_BSHK, k_BSGK, v_BSGK))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, tokens, tokens, 0.0, True, False, scale=scale
    )
    return out.view_as(q_BSHK), lse


def _flash_backward(grad_BSHK, q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse, scale):
    batch, tokens = q_BSHK.shape[:2]
    bounds = _cumulative(segments_BM, tokens)
    flat = (t.reshape(batch * tokens, *t.shape[2:]) for t in (grad_BSHK, q_BSHK, k_BSGK, v_BSGK))
    out = out_BSHK.reshape(batch * tokens, *out_BSHK.shape[2:])
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BSHK.device)  # the kernel's RNG state
    grads = torch.ops.aten._flash_attention_backward(
        *flat, out, lse, bounds, bounds, tokens, tokens, 0.0, True, no_dropout, no_dropout,
        scale=scale,
    )  # fmt: skip
    return tuple(g.view_as(t) for g, t in zip(grads, (q_BSHK, k_BSGK, v_BSGK), strict=True))


# --- anything else --------------------------------------------------------------------------


def _masked(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale):
    """Attend under a dense (B, 1, S, S) mask; a filler position sees itself, so nothing is NaN."""
    tokens = q_BSHK.size(1)
    ends_BM = segments_BM.cumsum(1)
    position_S = torch.arange(tokens, device=q_BSHK.device)
    position_BS = position_S.repeat(len(ends_BM), 1)  # searchsorted warns about an expanded one
    segment_BS = torch.searchsorted(ends_BM, position_BS, right=True)
    same_BSS = segment_BS.unsqueeze(2) == segment_BS.unsqueeze(1)
    causal_SS = position_S.unsqueeze(1) >= position_S
    shared = q_BSHK.size(2) // k_BSGK.size(2)
    k_BSHK, v_BSHK = (t.repeat_interleave(shared, dim=2) for t in (k_BSGK, v_BSGK))
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BSHK, v_BSHK))
    # Equal head counts, so that a fused kernel takes it: the plain one holds all scores at once.
    mask = (same_BSS & causal_SS).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    filler_BS = position_S >= ends_BM[:, -1:]
    return out.transpose(1, 2).masked_fill(filler_BS[..., None, None], 0).contiguous()

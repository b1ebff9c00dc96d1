"""Causal attention that never crosses a segment, as one operator opaque to autograd and compile.

Segments are lengths, int32, zero-padded: they change with every batch, so they reach the operator
as a tensor; as a Python list inside a compiled block they would recompile it each time.

    CUDA, fp16/bf16   PyTorch's variable-length flash attention (flash_attention.py)
    CPU               segment by segment, in blocks of query rows (cpu_attention.py)
    anything else     under a mask made from the segments (masked_attention.py); on CUDA this is
                      fp32, and any dtype with a soft cap, which that flash kernel lacks

Positions outside every segment (filler) see at most each other: their output is finite, and it
reaches no real position.

Shapes: B batch, S tokens, H heads, G key/value heads, K head width, M segments a row.
"""

import torch
from torch import Tensor

from solotune.device_kind import device_kind
from solotune.models import cpu_attention, flash_attention, masked_attention


def segment_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return out_BSHK, causal within each segment.

    `segments_BM` holds lengths in tokens, int32, on the device of `q`; each row sums to at most S.
    `window` is how many tokens a query sees, itself and those before it; None: all of its segment.
    `soft_cap` c bounds the scaled scores: c * tanh(score / c).
    """
    return _attend(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale, window, soft_cap)[0]


@torch.library.custom_op("solotune::segment_attention", mutates_args=())
def _attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out_BSHK and, for the flash kernel, the log-sum-exp its backward needs."""
    if flash_attention.takes(q_BSHK, soft_cap):
        return flash_attention.forward(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale, window)
    path = cpu_attention if device_kind(q_BSHK) == "cpu" else masked_attention
    out_BSHK = path.forward(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale, window, soft_cap)
    return out_BSHK, q_BSHK.new_empty(0, dtype=torch.float32)


@_attend.register_fake
def _(q_BSHK, k_BSGK, v_BSGK, segments_BM, scale, window=None, soft_cap=None):
    batch, tokens, heads, _ = q_BSHK.shape
    has_lse = flash_attention.takes(q_BSHK, soft_cap)
    lse_shape = (heads, batch * tokens) if has_lse else (0,)
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
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; probabilities are computed again, block by block."""
    qkv = (q_BSHK, k_BSGK, v_BSGK)
    if flash_attention.takes(q_BSHK, soft_cap):
        return flash_attention.backward(grad_BSHK, *qkv, segments_BM, out_BSHK, lse, scale, window)
    path = cpu_attention if device_kind(q_BSHK) == "cpu" else masked_attention
    return path.backward(grad_BSHK, *qkv, segments_BM, scale, window, soft_cap)


@_attend_backward.register_fake
def _(
    grad_BSHK, q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse, scale, window=None, soft_cap=None
):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BSHK, k_BSGK, v_BSGK)
    )


def _save(ctx, inputs, output) -> None:
    q_BSHK, k_BSGK, v_BSGK, segments_BM, *ctx.numbers = inputs
    out_BSHK, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse)


def _backward(ctx, grad_BSHK, _grad_lse):
    q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse = ctx.saved_tensors
    grads = torch.ops.solotune.segment_attention_backward(
        grad_BSHK, q_BSHK, k_BSGK, v_BSGK, segments_BM, out_BSHK, lse, *ctx.numbers
    )
    return *grads, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)

"""Attention on CUDA in fp16 and bf16: PyTorch's variable-length flash kernels.

Shapes: B batch, S tokens, H heads, G key/value heads, K head width, M segments a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from solotune.device_kind import device_kind, is_planning


def takes(q_BSHK: Tensor, soft_cap: float | None) -> bool:
    """Whether the kernel takes this tensor: by device, dtype and shape alone.

    PyTorch builds it without soft caps.
    """
    return (
        soft_cap is None
        and device_kind(q_BSHK) == "cuda"
        and q_BSHK.dtype in (torch.float16, torch.bfloat16)
        and q_BSHK.size(-1) <= 256
        and q_BSHK.size(-1) % 8 == 0
        and (is_planning() or torch.backends.cuda.is_flash_attention_available())
    )


def forward(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return out_BSHK and the log-sum-exp for backward."""
    batch, tokens = q_BSHK.shape[:2]
    bounds = _cumulative(segments_BM, tokens)
    q, k, v = (t.reshape(batch * tokens, *t.shape[2:]) for t in (q_BSHK, k_BSGK, v_BSGK))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, tokens, tokens, 0.0, True, False, scale=scale, **_sides(window)
    )
    return out.view_as(q_BSHK), lse


def backward(
    grad_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    segments_BM: Tensor,
    out_BSHK: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    batch, tokens = q_BSHK.shape[:2]
    bounds = _cumulative(segments_BM, tokens)
    flat = (t.reshape(batch * tokens, *t.shape[2:]) for t in (grad_BSHK, q_BSHK, k_BSGK, v_BSGK))
    out = out_BSHK.reshape(batch * tokens, *out_BSHK.shape[2:])
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BSHK.device)  # the kernel's RNG state
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *flat, out, lse, bounds, bounds, tokens, tokens, 0.0, True, no_dropout, no_dropout,
        scale=scale, **_sides(window),
    )  # fmt: skip
    return dq.view(q_BSHK.shape), dk.view(k_BSGK.shape), dv.view(v_BSGK.shape)


def _sides(window: int | None) -> dict[str, int]:
    """Return the kernel's words for a window: how many keys it sees left and right of the query."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _cumulative(segments_BM: Tensor, tokens: int) -> Tensor:
    """Return the B*(M+1)+1 cumulative lengths over the flat batch; filler is a segment of its own.

    Stays on the device: empty segments are legal for the kernel, so nothing is filtered.
    """
    filler_B1 = tokens - segments_BM.sum(1, keepdim=True, dtype=torch.int32)
    lengths = torch.cat((segments_BM, filler_B1), dim=1).flatten()
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

"""Attention by segments equals softmax attention under a dense mask, forward and backward.

Shapes: B batch, S tokens, H heads, G key/value heads, K head width, M segments a row.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solotune.models.segment_attention import _attend, _attend_backward, _masked, segment_attention

WIDTH, SCALE = 8, 0.3

SEGMENTS = {
    "uneven, with filler": ((5, 1, 9), (12,)),
    "no filler": ((16, 4), (7, 13)),
    "a row of filler alone": ((20,), ()),
    "longer than a block of rows": ((300, 5),),
    "longer than four blocks of rows": ((1100, 70),),
    "a block exactly": ((256, 512),),
}


def lengths_tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int32)


def inputs(
    rows: Sequence[Sequence[int]],
    *,
    heads: int = 4,
    groups: int = 2,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    width: int = WIDTH,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, the output's gradient; three positions of filler behind the longest row."""
    generator = torch.Generator().manual_seed(0)
    tokens = max(map(sum, rows)) + 3

    def random(count: int) -> Tensor:
        shape = (len(rows), tokens, count, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return random(heads), random(groups), random(groups), random(heads)


def dense(q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return scaled_dot_product_attention under an explicit mask, zero at filler."""
    seen_BSS = torch.zeros(len(rows), q.size(1), q.size(1), dtype=torch.bool)
    real_BS = torch.zeros(len(rows), q.size(1), dtype=torch.bool)
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            block = slice(start, start + length)
            seen_BSS[row, block, block] = torch.ones(length, length, dtype=torch.bool).tril()
            real_BS[row, block] = True
            start += length
    seen_BSS |= torch.eye(q.size(1), dtype=torch.bool)  # filler sees itself: no NaN
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        attn_mask=seen_BSS.unsqueeze(1),
        scale=SCALE,
        enable_gqa=True,
    )
    return out.transpose(1, 2) * real_BS[..., None, None]


def with_gradients(attend, *tensors: Tensor) -> list[Tensor]:
    """Return the output of `attend(q, k, v)` and its gradients for the last of `tensors`."""
    *leaves, grad = tensors
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def real(rows: Sequence[Sequence[int]], grad_BSHK: Tensor) -> Tensor:
    """Return `grad` with zeros at filler: no loss looks there."""
    grad_BSHK = grad_BSHK.clone()
    for row, lengths in enumerate(rows):
        grad_BSHK[row, sum(lengths) :] = 0
    return grad_BSHK


@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
def test_output_and_gradients_equal_dense_attention(rows, dtype, tolerance: float) -> None:
    *qkv, grad = inputs(rows, dtype=dtype)
    lengths_BM = lengths_tensor(rows)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), *qkv, real(rows, grad)
    )
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows), *qkv, real(rows, grad))
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (5, 1)])
def test_any_number_of_query_heads_shares_a_key_head(heads: int, groups: int) -> None:
    rows = ((5, 9), (14,))
    *qkv, grad = inputs(rows, heads=heads, groups=groups)
    lengths_BM = lengths_tensor(rows)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), *qkv, real(rows, grad)
    )
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows), *qkv, real(rows, grad))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
def test_bf16_is_within_one_percent_of_float64(rows) -> None:
    *qkv, grad = inputs(rows, dtype=torch.bfloat16)
    lengths_BM, grad = lengths_tensor(rows), real(rows, grad)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), *qkv, grad
    )
    assert all(t.dtype == torch.bfloat16 for t in found)
    exact = [t.double() for t in (*qkv, grad)]
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows), *exact)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert relative_l2(ours, theirs) < 0.01, name


def test_a_gradient_that_is_a_view_is_taken() -> None:
    # `out.sum()` hands over a gradient whose strides are all 0.
    rows = ((6, 4),)
    q, k, v, _ = inputs(rows)
    lengths_BM = lengths_tensor(rows)
    grad = torch.ones((), dtype=torch.float64).expand_as(q)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), q, k, v, grad
    )
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows), q, k, v, grad)
    torch.testing.assert_close(found, wanted)


def test_filler_is_finite_and_passes_nothing_on() -> None:
    rows = ((5,), ())
    *qkv, grad = inputs(rows)
    lengths_BM = lengths_tensor(rows)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), *qkv, grad
    )
    assert all(t.isfinite().all() for t in found)
    q, k, v = (t.index_fill(1, torch.arange(5, t.size(1)), 1e6) for t in qkv)
    other_out = segment_attention(q, k, v, lengths_BM, scale=SCALE)
    assert torch.equal(other_out[0, :5], found[0][0, :5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_operators_keep_the_contract_of_torch_library(dtype: torch.dtype) -> None:
    rows = ((5, 9), (14,))
    q, k, v, grad = inputs(rows, dtype=dtype)
    lengths_BM = lengths_tensor(rows)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(_attend, (*leaves, lengths_BM, SCALE))
    plain = [t.detach() for t in (grad, *leaves)]
    out, lse = torch.ops.solotune.segment_attention(*plain[1:], lengths_BM, SCALE)
    torch.library.opcheck(_attend_backward, (*plain, lengths_BM, out, lse, SCALE))


@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
def test_the_masked_path_of_other_devices_equals_the_cpu_path(rows) -> None:
    *qkv, grad = inputs(rows)
    lengths_BM, grad = lengths_tensor(rows), real(rows, grad)
    found = with_gradients(lambda q, k, v: _masked(q, k, v, lengths_BM, SCALE), *qkv, grad)
    wanted = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), *qkv, grad
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_card_is_within_one_percent_of_float64(rows, dtype: torch.dtype) -> None:
    # Two flash dtypes, and fp32, which takes the masked path.
    *qkv, grad = inputs(rows, dtype=dtype, device="cuda", width=64)
    lengths_BM, grad = lengths_tensor(rows), real(rows, grad)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM.cuda(), scale=SCALE), *qkv, grad
    )
    exact = [t.double().cpu() for t in (*qkv, grad)]
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows), *exact)
    real_out = real(rows, found[0].cpu())  # the flash kernel fills filler with numbers of its own
    for name, ours, theirs in zip(
        ("out", "dq", "dk", "dv"), (real_out, *found[1:]), wanted, strict=True
    ):
        assert ours.isfinite().all(), name
        assert relative_l2(ours, theirs) < 0.01, name
    leaves = [t.detach().requires_grad_() for t in qkv]
    torch.library.opcheck(_attend, (*leaves, lengths_BM.cuda(), SCALE))


@pytest.mark.gpu
def test_attention_on_the_card_reads_nothing_back() -> None:
    rows = ((70, 30), (90,))
    *qkv, grad = inputs(rows, dtype=torch.bfloat16, device="cuda", width=64)
    lengths_BM = lengths_tensor(rows).cuda()

    def once() -> None:
        with_gradients(
            lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE), *qkv, grad
        )

    once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")

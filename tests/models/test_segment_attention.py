"""Attention by segments equals softmax attention under a dense mask, forward and backward.

Shapes: B batch, S tokens, H heads, G key/value heads, K head width, M segments a row.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from solotune.models.segment_attention import _attend, _attend_backward, segment_attention

WIDTH, SCALE = 8, 0.3

SEGMENTS = {
    "uneven, with filler": ((5, 1, 9), (12,)),
    "no filler": ((16, 4), (7, 13)),
    "a row of filler alone": ((20,), ()),
    "longer than a block of rows": ((300, 5),),
    "longer than four blocks of rows": ((1100, 70),),
    "a block exactly": ((256, 512),),
}


KINDS: dict[str, dict[str, Any]] = {
    "all before it": {},
    "a window of 7": {"window": 7},
    "a window of one block and a bit": {"window": 300},
    "a window of two": {"window": 2},
    "a soft cap": {"soft_cap": 2.0},  # scores reach 4: some are near it
    "a soft cap and a window": {"soft_cap": 2.0, "window": 100},
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


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Sequence[Sequence[int]],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return softmax attention over all scores under an explicit mask, zero at filler."""
    seen_BSS = torch.zeros(len(rows), q.size(1), q.size(1), dtype=torch.bool)
    real_BS = torch.zeros(len(rows), q.size(1), dtype=torch.bool)
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            block = slice(start, start + length)
            near = torch.ones(length, length, dtype=torch.bool).tril()
            seen_BSS[row, block, block] = near if window is None else near.triu(1 - window)
            real_BS[row, block] = True
            start += length
    seen_BSS |= torch.eye(q.size(1), dtype=torch.bool)  # filler sees itself: no NaN
    shared = q.size(2) // k.size(2)
    k, v = (t.repeat_interleave(shared, dim=2) for t in (k, v))
    scores = torch.einsum("bqhk,bnhk->bhqn", q, k) * SCALE
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    p = scores.masked_fill(~seen_BSS.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bhqn,bnhk->bqhk", p, v) * real_BS[..., None, None]


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
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
def test_output_and_gradients_equal_dense_attention(rows, kind, dtype, tolerance: float) -> None:
    *qkv, grad = inputs(rows, dtype=dtype)
    lengths_BM = lengths_tensor(rows)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE, **kind),
        *qkv,
        real(rows, grad),
    )
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows, **kind), *qkv, real(rows, grad))
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
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bf16_is_within_one_percent_of_float64(rows, kind) -> None:
    *qkv, grad = inputs(rows, dtype=torch.bfloat16)
    lengths_BM, grad = lengths_tensor(rows), real(rows, grad)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE, **kind), *qkv, grad
    )
    assert all(t.dtype == torch.bfloat16 for t in found)
    exact = [t.double() for t in (*qkv, grad)]
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows, **kind), *exact)
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
@pytest.mark.parametrize("numbers", [(SCALE,), (SCALE, 4), (SCALE, None, 2.0), (SCALE, 4, 2.0)])
def test_both_operators_keep_the_contract_of_torch_library(dtype: torch.dtype, numbers) -> None:
    rows = ((5, 9), (14,))
    q, k, v, grad = inputs(rows, dtype=dtype)
    lengths_BM = lengths_tensor(rows)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(_attend, (*leaves, lengths_BM, *numbers))
    plain = [t.detach() for t in (grad, *leaves)]
    out, lse = torch.ops.solotune.segment_attention(*plain[1:], lengths_BM, *numbers)
    torch.library.opcheck(_attend_backward, (*plain, lengths_BM, out, lse, *numbers))


@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_masked_path_of_other_devices_equals_the_cpu_path(rows, kind, monkeypatch) -> None:
    q, k, v, grad = inputs(rows)
    lengths_BM = lengths_tensor(rows)
    attend = lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE, **kind)  # noqa: E731
    wanted = with_gradients(attend, q, k, v, grad)
    # Through the operator: inside one autograd is off, and a backward that needs it fails.
    monkeypatch.setattr("solotune.models.segment_attention.device_kind", lambda tensor: "xpu")
    torch.testing.assert_close(with_gradients(attend, q, k, v, grad), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_card_is_within_one_percent_of_float64(rows, kind, dtype: torch.dtype) -> None:
    # Two flash dtypes, and fp32, which takes the masked path, as soft caps do.
    *qkv, grad = inputs(rows, dtype=dtype, device="cuda", width=64)
    lengths_BM, grad = lengths_tensor(rows), real(rows, grad)
    found = with_gradients(
        lambda q, k, v: segment_attention(q, k, v, lengths_BM.cuda(), scale=SCALE, **kind),
        *qkv,
        grad,
    )
    exact = [t.double().cpu() for t in (*qkv, grad)]
    wanted = with_gradients(lambda q, k, v: dense(q, k, v, rows, **kind), *exact)
    real_out = real(rows, found[0].cpu())  # the flash kernel fills filler with numbers of its own
    for name, ours, theirs in zip(
        ("out", "dq", "dk", "dv"), (real_out, *found[1:]), wanted, strict=True
    ):
        assert ours.isfinite().all(), name
        assert relative_l2(ours, theirs) < 0.01, name
    leaves = [t.detach().requires_grad_() for t in qkv]
    torch.library.opcheck(_attend, (*leaves, lengths_BM.cuda(), SCALE))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_attention_on_the_card_reads_nothing_back(kind) -> None:
    rows = ((70, 30), (90,))
    *qkv, grad = inputs(rows, dtype=torch.bfloat16, device="cuda", width=64)
    lengths_BM = lengths_tensor(rows).cuda()

    def once() -> None:
        with_gradients(
            lambda q, k, v: segment_attention(q, k, v, lengths_BM, scale=SCALE, **kind), *qkv, grad
        )

    once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")

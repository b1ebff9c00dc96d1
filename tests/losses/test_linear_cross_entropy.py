"""Value, gradients and memory of the loss that never holds all logits.

Shapes: B batch, S tokens, T target rows, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solotune.losses import LinearCrossEntropy
from tests.memory.allocations import allocated

VOCAB, WIDTH = 300, 32


@dataclass(frozen=True)
class Targets:
    labels_BS: Tensor
    target_rows_T: Tensor


def targets(batch: int, tokens: int, *, vocab: int = VOCAB, share: float = 0.7) -> Targets:
    """Return random labels, `share` of the positions with a target."""
    generator = torch.Generator().manual_seed(1)
    labels_BS = torch.randint(vocab, (batch, tokens), generator=generator)
    labels_BS[torch.rand(batch, tokens, generator=generator) >= share] = -100
    return Targets(labels_BS, (labels_BS.flatten() != -100).nonzero().squeeze(1))


def leaves(
    batch: int = 2,
    tokens: int = 50,
    *,
    vocab: int = VOCAB,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return hidden_BSD and weight_VD that want gradients; logits have a spread of 3."""
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = torch.randn(batch, tokens, width, generator=generator)
    weight_VD = torch.randn(vocab, width, generator=generator) * 3 * width**-0.5
    return hidden_BSD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_()


def exact(
    inputs: Sequence[Tensor], batch: Targets, num: int, *, soft_cap: float | None = None
) -> list[Tensor]:
    """Return loss and gradients by F.cross_entropy in float64."""
    inputs = [t.detach().double().requires_grad_() for t in inputs]
    logits_BSV = inputs[0] @ inputs[1].T
    if soft_cap is not None:
        logits_BSV = soft_cap * torch.tanh(logits_BSV / soft_cap)
    total = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")
    loss = total / num
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def found(
    loss_fn: LinearCrossEntropy, inputs: Sequence[Tensor], batch: Targets, num: int
) -> list[Tensor]:
    """Return loss and gradients by ours."""
    hidden_BSD, weight_VD = inputs
    loss = loss_fn(hidden_BSD, weight_VD, batch, num)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def relative_l2(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 64, 10_000])
def test_value_and_gradients_equal_cross_entropy_in_float64(chunk_tokens: int | None) -> None:
    batch = targets(2, 50)
    loss_fn = LinearCrossEntropy(chunk_tokens=chunk_tokens)
    ours = found(loss_fn, leaves(), batch, len(batch.target_rows_T))
    assert ours[0].dtype == torch.float32
    wanted = exact(leaves(), batch, len(batch.target_rows_T))
    for name, a, b in zip(("loss", "hidden", "weight"), ours, wanted, strict=True):
        assert relative_l2(a, b) <= 1e-6, name


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("soft_cap", [30.0, 3.0])  # logits have a spread of 3
def test_a_soft_cap_is_of_the_logits_and_in_the_gradients(
    chunk_tokens: int | None, soft_cap: float
) -> None:
    batch = targets(2, 50)
    loss_fn = LinearCrossEntropy(chunk_tokens=chunk_tokens, soft_cap=soft_cap)
    ours = found(loss_fn, leaves(), batch, len(batch.target_rows_T))
    wanted = exact(leaves(), batch, len(batch.target_rows_T), soft_cap=soft_cap)
    for name, a, b in zip(("loss", "hidden", "weight"), ours, wanted, strict=True):
        assert relative_l2(a, b) <= 1e-6, name
    uncapped = exact(leaves(), batch, len(batch.target_rows_T))
    assert relative_l2(wanted[1], uncapped[1]) > 1e-3  # otherwise the above would show nothing


def test_a_soft_cap_in_bf16_is_within_one_percent_of_float64() -> None:
    batch = targets(2, 50)
    inputs = leaves(dtype=torch.bfloat16)
    ours = found(LinearCrossEntropy(chunk_tokens=16, soft_cap=3.0), inputs, batch, 70)
    wanted = exact(inputs, batch, 70, soft_cap=3.0)
    for name, a, b in zip(("loss", "hidden", "weight"), ours, wanted, strict=True):
        assert relative_l2(a, b) < 0.01, name


def test_a_loss_object_gives_the_same_bits_whatever_it_has_seen_before() -> None:
    # Its buffers are used again: nothing of an earlier, larger batch may shine through.
    batch = targets(2, 50)
    fresh = found(LinearCrossEntropy(chunk_tokens=16), leaves(), batch, 70)
    used = LinearCrossEntropy(chunk_tokens=16)
    found(used, leaves(3, 90), targets(3, 90), 100)
    for a, b in zip(found(used, leaves(), batch, 70), fresh, strict=True):
        assert torch.equal(a, b)


def test_shares_of_micro_batches_add_up_to_the_mean() -> None:
    hidden_BSD, weight_VD = leaves(4, 30)
    whole = targets(4, 30)
    num = len(whole.target_rows_T)
    parts = [
        Targets(rows, (rows.flatten() != -100).nonzero().squeeze(1))
        for rows in whole.labels_BS.split((1, 3))
    ]
    loss_fn = LinearCrossEntropy(chunk_tokens=16)
    total = torch.zeros(())
    for part_BSD, part in zip(hidden_BSD.split((1, 3)), parts, strict=True):
        loss = loss_fn(part_BSD, weight_VD, part, num)
        loss.backward()
        total += loss.detach()
    loss, dhidden_BSD, dweight_VD = exact((hidden_BSD, weight_VD), whole, num)
    assert relative_l2(total, loss) <= 1e-6
    assert hidden_BSD.grad is not None
    assert weight_VD.grad is not None
    assert relative_l2(hidden_BSD.grad, dhidden_BSD) <= 1e-6
    assert relative_l2(weight_VD.grad, dweight_VD) <= 1e-6


def test_positions_without_a_target_get_no_gradient() -> None:
    batch = targets(2, 50)
    _, dhidden_BSD, _ = found(LinearCrossEntropy(), leaves(), batch, 70)
    has_target_BS = batch.labels_BS != -100
    assert not dhidden_BSD[~has_target_BS].any()
    assert dhidden_BSD[has_target_BS].any(-1).all()


@pytest.mark.parametrize("num_targets", [0, 5])  # of the step: other micro-batches may have some
def test_a_batch_without_a_target_gives_zero_and_zero_gradients(num_targets: int) -> None:
    batch = Targets(torch.full((2, 50), -100), torch.empty(0, dtype=torch.int64))
    loss, dhidden_BSD, dweight_VD = found(LinearCrossEntropy(), leaves(), batch, num_targets)
    assert loss == 0
    assert torch.equal(dhidden_BSD, torch.zeros(2, 50, WIDTH))
    assert torch.equal(dweight_VD, torch.zeros(VOCAB, WIDTH))


def test_a_scaled_loss_scales_its_gradients() -> None:
    batch = targets(2, 50)
    _, dhidden_BSD, dweight_VD = found(LinearCrossEntropy(), leaves(), batch, 70)
    inputs = leaves()
    loss = LinearCrossEntropy()(*inputs, batch, 70)
    scaled = torch.autograd.grad(3 * loss, inputs)
    torch.testing.assert_close(scaled, (3 * dhidden_BSD, 3 * dweight_VD))


def test_a_second_backward_says_that_it_needs_a_second_forward() -> None:
    loss = LinearCrossEntropy()(*leaves(), targets(2, 50), 70)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward needs a second forward"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_wants_a_gradient_gets_one(frozen: str) -> None:
    hidden_BSD, weight_VD = leaves()
    hidden_BSD.requires_grad_(frozen == "weight")
    weight_VD.requires_grad_(frozen == "hidden")
    batch = targets(2, 50)
    loss = LinearCrossEntropy()(hidden_BSD, weight_VD, batch, 70)
    wanted, dhidden_BSD, dweight_VD = exact(leaves(), batch, 70)
    assert relative_l2(loss.detach(), wanted) <= 1e-6
    if frozen == "both":
        assert not loss.requires_grad
        return
    loss.backward()
    ours, theirs = (
        (hidden_BSD.grad, dhidden_BSD) if frozen == "weight" else (weight_VD.grad, dweight_VD)
    )
    assert ours is not None
    assert relative_l2(ours, theirs) <= 1e-6


@pytest.mark.parametrize("micro_batches", [2, 8, 16])
def test_the_head_gradient_of_many_micro_batches_is_summed_in_fp32(micro_batches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab, width, rows = 1024, 64, 32
    weight_VD = (0.05 * torch.randn(vocab, width, generator=generator)).bfloat16()
    hidden = [torch.randn(1, rows, width, generator=generator) for _ in range(micro_batches)]
    labels = [torch.randint(0, vocab, (1, rows), generator=generator) for _ in hidden]

    def gradient(dtype: torch.dtype) -> Tensor:
        trained_VD = weight_VD.to(dtype, copy=True).requires_grad_()
        for hidden_BSD, labels_BS in zip(hidden, labels, strict=True):
            batch = Targets(labels_BS, torch.arange(rows))
            x_BSD = hidden_BSD.bfloat16().to(dtype)
            loss_fn = LinearCrossEntropy(chunk_tokens=8)
            loss_fn(x_BSD, trained_VD, batch, rows * micro_batches).backward()
        assert trained_VD.grad is not None
        assert trained_VD.grad.dtype == torch.float32
        return trained_VD.grad

    wanted = gradient(torch.float32)
    error = float((gradient(torch.bfloat16) - wanted).norm() / wanted.norm())
    print(f"{micro_batches} micro-batches: {error:.4f}")
    assert error < 0.0021  # that of bf16 logits; summed in bf16 it is 0.0022, 0.0036 and 0.0048


def test_the_head_has_one_gradient_however_many_micro_batches_there_are() -> None:
    weight_VD = (0.05 * torch.randn(256, 64)).bfloat16().requires_grad_()
    places = set()
    for _ in range(3):
        batch = Targets(torch.randint(0, 256, (1, 32)), torch.arange(32))
        x_BSD = torch.randn(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
        LinearCrossEntropy(chunk_tokens=8)(x_BSD, weight_VD, batch, 96).backward()
        assert x_BSD.grad is not None
        assert weight_VD.grad is not None
        places.add(weight_VD.grad.data_ptr())
    assert len(places) == 1


def test_confident_bf16_targets_keep_their_gradient() -> None:
    # p = 1 - 3e-4. In bf16 such a p is 1, and p - 1 nothing.
    weight_VD = torch.eye(8, dtype=torch.bfloat16).requires_grad_()
    hidden_BSD = (10 * torch.eye(8, dtype=torch.bfloat16)).unsqueeze(0).requires_grad_()
    batch = Targets(torch.arange(8).unsqueeze(0), torch.arange(8))
    _, dhidden_BSD, _ = found(LinearCrossEntropy(), (hidden_BSD, weight_VD), batch, 8)
    _, exact_BSD, _ = exact((hidden_BSD, weight_VD), batch, 8)
    assert exact_BSD.abs().max() < 1e-4
    assert relative_l2(dhidden_BSD, exact_BSD) < 0.01


def test_92_chunks_in_bf16_are_as_exact_as_one() -> None:
    # Summed in bf16, the weight's gradient would be three times as far off.
    batch = targets(1, 368, share=1.0)
    inputs = leaves(1, 368, dtype=torch.bfloat16)
    *_, exact_VD = exact(inputs, batch, 368)

    def distance(chunk_tokens: int) -> float:
        *_, dweight_VD = found(LinearCrossEntropy(chunk_tokens=chunk_tokens), inputs, batch, 368)
        assert dweight_VD.dtype == torch.bfloat16
        return relative_l2(dweight_VD, exact_VD)

    assert distance(4) <= 1.2 * distance(368) < 0.01


def test_chunk_tokens_below_1_and_a_soft_cap_of_0_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"loss\.chunk_tokens=0"):
        LinearCrossEntropy(chunk_tokens=0)
    with pytest.raises(ValueError, match=r"loss\.soft_cap=0"):
        LinearCrossEntropy(soft_cap=0.0)


def plain(inputs: Sequence[Tensor], batch: Targets) -> None:
    """Do the same with all logits at once, as torch has it."""
    hidden_BSD, weight_VD = inputs
    logits_BSV = hidden_BSD @ weight_VD.T
    loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.labels_BS.flatten())
    torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_memory_holds_the_logits_of_one_chunk_at_most(
    dtype: torch.dtype, soft_cap: float | None
) -> None:
    vocab, width, chunk = 4000, 8, 1024

    def peak(tokens: int) -> int:
        inputs = leaves(1, tokens, vocab=vocab, width=width, dtype=dtype)
        batch = targets(1, tokens, vocab=vocab, share=1.0)
        loss_fn = LinearCrossEntropy(chunk_tokens=chunk, soft_cap=soft_cap)
        ours = allocated(lambda: found(loss_fn, inputs, batch, tokens)).peak
        all_at_once = allocated(lambda: plain(inputs, batch)).peak
        print(f"{tokens} targets: {ours / 1e6:.1f} MB, all at once {all_at_once / 1e6:.1f} MB")
        return ours

    one_chunk = chunk * vocab * (dtype.itemsize + 4)  # logits, and their softmax in fp32
    one_chunk += 0 if soft_cap is None else 6 * 2**20  # on CPU the cap's slope is of a few rows
    weight = vocab * width * (4 + 4 + dtype.itemsize)  # fp32 sum, one piece's share, the result
    a_row = 4 * width * dtype.itemsize + 4 * 8  # hidden states, their gradients, labels
    fewer, more = peak(1024), peak(4096)
    assert more <= one_chunk + weight + 4096 * a_row
    # Three times as many targets again cost their own rows and no logits.
    assert more - fewer <= 4096 * a_row + weight


@pytest.mark.parametrize("soft_cap", [None, 4.0])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_label_smoothing_and_z_loss_equal_their_formulas_in_float64(
    smoothing: float, z_loss: float, soft_cap: float | None, chunk_tokens: int | None
) -> None:
    batch, inputs = targets(2, 50), leaves()
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    logits_BSV = doubles[0] @ doubles[1].T
    if soft_cap is not None:
        logits_BSV = soft_cap * torch.tanh(logits_BSV / soft_cap)
    logits_TV = logits_BSV.flatten(0, 1)[batch.target_rows_T]
    labels_T = batch.labels_BS.flatten()[batch.target_rows_T]
    total = F.cross_entropy(logits_TV, labels_T, reduction="sum", label_smoothing=smoothing)
    total = total + z_loss * logits_TV.logsumexp(1).square().sum()
    num = len(labels_T)
    wanted = [total.detach() / num, *torch.autograd.grad(total / num, doubles)]
    loss_fn = LinearCrossEntropy(
        chunk_tokens=chunk_tokens, soft_cap=soft_cap, label_smoothing=smoothing, z_loss=z_loss
    )
    for ours, theirs in zip(found(loss_fn, inputs, batch, num), wanted, strict=True):
        assert relative_l2(ours, theirs) < 1e-6
    # A validation loss is plain cross-entropy.
    with torch.no_grad():
        plain_loss = loss_fn(*inputs, batch, num)
    assert relative_l2(plain_loss, exact(inputs, batch, num, soft_cap=soft_cap)[0]) < 1e-6


@pytest.mark.parametrize("settings", [{"label_smoothing": 1.0}, {"z_loss": -1.0}])
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, float]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ValueError, match=f"loss.{name}={value}"):
        LinearCrossEntropy(**settings)  # pyright: ignore[reportArgumentType]


def test_a_chunks_head_gradient_never_stands_whole_beside_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab, width, tokens, chunk = 4000, 256, 256, 64
    inputs = leaves(1, tokens, vocab=vocab, width=width, dtype=torch.bfloat16)
    batch = targets(1, tokens, vocab=vocab, share=1.0)
    loss_fn = LinearCrossEntropy(chunk_tokens=chunk)
    whole = allocated(lambda: found(loss_fn, inputs, batch, tokens))
    monkeypatch.setattr("solotune.losses.linear_cross_entropy._SLAB_ON_CPU", 100 * width)
    pieces = allocated(lambda: found(loss_fn, inputs, batch, tokens))
    head = inputs[1].numel()
    # fp32 sum and bf16 result at the end; before, beside the sum one piece in bf16 and fp32.
    one_chunk = chunk * vocab * (2 + 4) + 2 * inputs[0].nbytes
    assert pieces.peak <= head * (4 + 2) + one_chunk + 2**16 < whole.peak
    for ours, theirs in zip(pieces.result, whole.result, strict=True):
        assert relative_l2(ours, theirs) < 1e-3


def test_without_gradients_the_weights_gradient_is_not_made() -> None:
    vocab, width, tokens, chunk = 4000, 512, 256, 64
    hidden_BSD, weight_VD = leaves(1, tokens, vocab=vocab, width=width)
    batch = targets(1, tokens, vocab=vocab, share=1.0)
    loss_fn = LinearCrossEntropy(chunk_tokens=chunk)

    @torch.no_grad()
    def evaluate() -> Tensor:
        return loss_fn(hidden_BSD, weight_VD, batch, tokens)

    one_chunk = chunk * vocab * (4 + 4)
    assert allocated(evaluate).peak <= one_chunk + hidden_BSD.nbytes + 2**16 < weight_VD.nbytes


def test_the_default_chunk_is_what_256_mib_of_fp32_logits_hold() -> None:
    assert LinearCrossEntropy().chunk_rows(128256) == 523
    assert 523 * 128256 * 4 <= 256 * 2**20 < 524 * 128256 * 4
    assert LinearCrossEntropy(chunk_tokens=7).chunk_rows(128256) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_card_computes_the_same_and_reads_nothing_back(dtype: torch.dtype) -> None:
    batch = targets(2, 50)
    inputs = [t.detach().cuda().requires_grad_() for t in leaves(dtype=dtype)]
    on_card = Targets(batch.labels_BS.cuda(), batch.target_rows_T.cuda())
    loss_fn = LinearCrossEntropy(chunk_tokens=16)
    found(loss_fn, inputs, on_card, 70)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = found(loss_fn, inputs, on_card, 70)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(ours, exact([t.cpu() for t in inputs], batch, 70), strict=True):
        assert relative_l2(a.cpu(), b) <= (1e-5 if dtype == torch.float32 else 1e-2)

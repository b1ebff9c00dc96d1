"""Projection, cross-entropy and both gradients, chunk by chunk, in the forward pass.

Saves:    the logits: V * (bytes of the dtype + 4) bytes a target, for all targets but one chunk's.
          Only target rows are projected.
Costs:    the head's gradient in fp32 (4 V D bytes) where there is more than one chunk, and with
          several micro-batches one sum of all from the first to the last; with a soft cap, another
          4 bytes a logit of the chunk.
Excludes: a second backward through the same loss.
Label:    reordered. Figures: docs/linear_cross_entropy.md

Shapes: B batch, S tokens, T target rows, N rows of one chunk, R rows of one piece, D width,
V vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from solotune.device_kind import device_kind
from solotune.losses.low_rank_logits import LowRankLogits
from solotune.models.output import AdaptedOutput, rounded_in_place

_DEFAULT_CHUNK_BYTES = 256 * 2**20  # of fp32 logits
# Of fp32 softmax made at a time: on CPU what stays in a shared cache, on a card what keeps it busy.
_TILE_BYTES, _TILE_BYTES_ON_CPU = 64 * 2**20, 6 * 2**20
# Numbers of a chunk's head gradient that are made before they are added. On CPU they stay in the
# cache, and the fp32 copy that adding them takes is no second head: 0.6 of the time.
_SLAB, _SLAB_ON_CPU = 2**25, 2**22


class Targets(Protocol):
    """What the loss reads of a batch."""

    labels_BS: Tensor  # the target of each position, -100 where there is none
    target_rows_T: Tensor  # flat positions with a target, found in collation: no sync
    key: int | None  # of an adapted output layer's dropout


class _Extras(NamedTuple):
    """What is added to cross-entropy while training."""

    label_smoothing: float
    z_loss: float


_NONE = _Extras(0.0, 0.0)


class LinearCrossEntropy(nn.Module):
    """Cross-entropy from hidden states, with the logits of one chunk alive at a time.

    `chunk_tokens` is the number of target rows of one chunk; None: what 256 MiB of fp32
    logits hold. `soft_cap` c, which a recipe takes from the model, bounds logits: c * tanh(x / c).

    With gradients only, so that a validation loss stays comparable: `label_smoothing` e gives the
    target 1 - e and shares e among all V tokens; `z_loss` z adds z * (log Z)^2 for each target.
    Sources: label smoothing (1512.00567), z-loss (2204.02311).
    """

    def __init__(
        self,
        *,
        chunk_tokens: int | None = None,
        soft_cap: float | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"loss.chunk_tokens={chunk_tokens}: use at least 1, or null")
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"loss.soft_cap={soft_cap}: use a number above 0, or null")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"loss.label_smoothing={label_smoothing}: use 0 or more, and below 1")
        if z_loss < 0:
            raise ValueError(f"loss.z_loss={z_loss}: use 0 or more")
        self.chunk_tokens = chunk_tokens
        self.soft_cap = soft_cap
        self.extras = _Extras(label_smoothing, z_loss)
        self._chunks: dict[Any, Tensor] = {}  # reused: fresh pages cost as much as the softmax

    def forward(
        self,
        hidden_BSD: Tensor,
        output: Tensor | AdaptedOutput,
        batch: Targets,
        num_targets: int,
    ) -> Tensor:
        """Return the sum over the batch's targets divided by `num_targets`, an fp32 scalar.

        `output` is the output layer: its weight (V, D), unless it is adapted.

        `num_targets` counts the targets of the whole optimizer step, so the losses of its
        micro-batches add up to the mean, and their gradients to its gradient. Where it is not the
        batch's own count, the weight's `grad` is summed in fp32, to be rounded when it is complete:
        the first micro-batch hands a sum over, the others add to it in forward, so that the head
        has one gradient however many there are. Their losses must not be scaled.
        """
        rows_T = batch.target_rows_T
        hidden_TD = hidden_BSD.flatten(0, 1).index_select(0, rows_T)
        kind = hidden_TD.device.type
        if torch.is_autocast_enabled(kind):  # does not reach products that write into a buffer
            hidden_TD = hidden_TD.to(torch.get_autocast_dtype(kind))
        labels_T = batch.labels_BS.flatten().index_select(0, rows_T)
        factors: list[Tensor | None] = [None, None, None]
        if isinstance(output, AdaptedOutput):
            low_TR = output.down(hidden_TD, batch.key if torch.is_grad_enabled() else None)
            factors = [low_TR, output.up_VR.to(low_TR.dtype), output.scale_V]
        weight_VD = output.weight_VD if isinstance(output, AdaptedOutput) else output
        inputs = [hidden_TD, weight_VD, *factors]
        sum_dtype, sum_VD = weight_VD.dtype, None
        is_narrow = weight_VD.dtype.itemsize < torch.float32.itemsize
        is_part = len(rows_T) != num_targets
        if is_narrow and is_part and weight_VD.is_leaf and weight_VD.requires_grad:
            # One of several micro-batches: autograd would round each share, and their sum.
            sum_dtype, weight_VD.grad_dtype = torch.float32, None
            if torch.is_grad_enabled() and weight_VD.grad is not None:
                sum_VD = weight_VD.grad
        if not torch.is_grad_enabled():  # needs_input_grad does not know it
            inputs = [None if each is None else each.detach() for each in inputs]
        count = max(num_targets, 1)
        return _LinearCrossEntropy.apply(*inputs, labels_T, count, sum_dtype, sum_VD, self)

    def chunk_rows(self, vocab: int) -> int:
        return self.chunk_tokens or max(1, _DEFAULT_CHUNK_BYTES // (4 * vocab))

    def chunk_buffer(self, role: str, rows: int, vocab: int, like: Tensor) -> Tensor:
        """Return an uninitialised (rows, vocab) tensor whose memory the next chunk uses again."""
        key = (role, vocab, like.dtype, like.device)
        flat = self._chunks.get(key)
        if flat is None or flat.numel() < rows * vocab:
            flat = torch.empty(rows * vocab, dtype=like.dtype, device=like.device)
            self._chunks[key] = flat
        return flat[: rows * vocab].view(rows, vocab)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in forward, where the logits are; backward hands them over."""

    @staticmethod
    def forward(
        ctx,
        hidden_TD,
        weight_VD,
        low_TR,
        up_VR,
        scale_V,
        labels_T,
        num_targets,
        sum_dtype: torch.dtype,
        sum_VD: Tensor | None,
        loss: LinearCrossEntropy,
    ):
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        wants_any = any(ctx.needs_input_grad)
        extras = loss.extras if wants_any else _NONE
        added = None if low_TR is None else LowRankLogits(low_TR, up_VR, scale_V)
        rows, vocab = len(hidden_TD), len(weight_VD)
        weight_VD = weight_VD.to(hidden_TD.dtype)
        chunk_rows = loss.chunk_rows(vocab)
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        dhidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        dweight_VD, several = sum_VD, sum_VD is not None or rows > chunk_rows
        for start in range(0, rows, chunk_rows):
            chunk = slice(start, min(start + chunk_rows, rows))
            hidden_ND = hidden_TD[chunk]
            logits_NV = loss.chunk_buffer("logits", len(hidden_ND), vocab, hidden_TD)
            torch.mm(hidden_ND, weight_VD.T, out=logits_NV)
            if added is not None:
                buffer = partial(loss.chunk_buffer, "unscaled", *logits_NV.shape, hidden_TD)
                added.add_(logits_NV, chunk, buffer)
            total += _to_gradient_(logits_NV, labels_T[chunk], 1.0 / num_targets, loss, extras)
            if added is not None and wants_any:
                added.collect_(logits_NV, chunk)
            if dhidden_TD is not None:
                torch.mm(logits_NV, weight_VD, out=dhidden_TD[chunk])
            if wants_weight:
                dweight_VD = _accumulate(dweight_VD, logits_NV, hidden_ND, several)
        if sum_VD is not None:
            dweight_VD = None  # the weight has it already
        elif wants_weight and dweight_VD is None:  # a batch without a target
            dweight_VD = torch.zeros_like(weight_VD, dtype=sum_dtype)
        if dweight_VD is not None:
            dweight_VD = rounded_in_place(dweight_VD, sum_dtype)
        ctx.gradients = dhidden_TD, dweight_VD, *(added.gradients() if added else (None,) * 3)
        return total / num_targets

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hand the gradients over, uncopied; `grad` is 1 unless the caller scaled the loss."""
        if ctx.gradients is None:
            raise RuntimeError("LinearCrossEntropy: a second backward needs a second forward")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad)  # to skip it at 1 would read the device
        return *gradients, None, None, None, None, None


def _to_gradient_(
    logits_NV: Tensor, labels_N: Tensor, scale: float, loss: LinearCrossEntropy, extras: _Extras
) -> Tensor:
    """Turn logits into scale * (softmax - one_hot), in place; return the rows' summed loss.

    The softmax is fp32, of some rows at a time in one buffer. With a soft cap the gradient is that
    of the logits before it.
    """
    rows, vocab = logits_NV.shape
    tile_bytes = _TILE_BYTES_ON_CPU if device_kind(logits_NV) == "cpu" else _TILE_BYTES
    step = max(1, tile_bytes // (4 * vocab))
    total = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
    buffer_RV = loss.chunk_buffer("softmax", min(step, rows), vocab, total)
    for logits_RV, labels_R in zip(logits_NV.split(step), labels_N.split(step), strict=True):
        labels_R1 = labels_R.unsqueeze(1)
        p_RV = buffer_RV[: len(logits_RV)].copy_(logits_RV)
        slope_RV = None
        if loss.soft_cap is not None:
            p_RV.div_(loss.soft_cap).tanh_()
            slope_RV = loss.chunk_buffer("slope", len(p_RV), vocab, total)
            torch.mul(p_RV, p_RV, out=slope_RV).neg_().add_(1)
            p_RV.mul_(loss.soft_cap)
        max_R, target_R = p_RV.amax(1), p_RV.gather(1, labels_R1).squeeze(1)
        if extras.label_smoothing:
            target_R.lerp_(p_RV.mean(1), extras.label_smoothing)
        torch.softmax(p_RV, 1, out=p_RV)
        # The softmax at the maximum is 1 / sum(exp(x - max)): log Z without another pass.
        log_z_R = max_R - p_RV.amax(1).log()
        total += (log_z_R - target_R).sum()
        if extras.z_loss:
            total += extras.z_loss * log_z_R.square().sum()
            p_RV.mul_((1 + 2 * extras.z_loss * log_z_R).unsqueeze(1))
        if extras.label_smoothing:
            p_RV.sub_(extras.label_smoothing / vocab)
        one_R1 = p_RV.new_full((len(p_RV), 1), extras.label_smoothing - 1.0)
        p_RV.scatter_add_(1, labels_R1, one_R1)
        if slope_RV is not None:
            p_RV.mul_(slope_RV)
        torch.mul(p_RV, scale, out=logits_RV)
    return total


def _accumulate(
    dweight_VD: Tensor | None, dlogits_NV: Tensor, hidden_ND: Tensor, several: bool
) -> Tensor:
    """Add one chunk's head gradient; the sum of several is fp32 (in bf16 its error triples).

    Some rows of the vocabulary at a time: the chunk's whole gradient never exists beside the sum.
    """
    if not several:
        return torch.mm(dlogits_NV.T, hidden_ND)
    if dweight_VD is None:
        shape = (dlogits_NV.size(1), hidden_ND.size(1))
        dweight_VD = torch.zeros(shape, dtype=torch.float32, device=hidden_ND.device)
    step = max(1, (_SLAB_ON_CPU if device_kind(hidden_ND) == "cpu" else _SLAB) // hidden_ND.size(1))
    for sum_RD, dlogits_NR in zip(dweight_VD.split(step), dlogits_NV.split(step, 1), strict=True):
        sum_RD.add_(torch.mm(dlogits_NR.T, hidden_ND))
    return dweight_VD

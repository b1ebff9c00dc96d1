"""Clipping of the global gradient norm."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from solotune.device_kind import device_kind


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm.

    None only measures: a norm that is not finite is how a broken gradient shows.

    The norm is summed in fp32 (torch's own is rounded to the gradients' bf16) and stays on the
    device: nothing is read.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(norms_of(grads)))
    if max_norm is None:
        return norm
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def norms_of(grads: list[Tensor]) -> list[Tensor]:
    """Return fp32 norms whose own norm is that of all gradients: of each, or of its pieces."""
    return [norm for alike in _batches(grads) for norm in _norms(alike)]


def _batches(grads: list[Tensor]) -> list[list[Tensor]]:
    """Return what one call takes: a card's fast kernel wants one dtype.

    On CPU pieces: its norm in fp32 copies a bf16 input, and an embedding's copy would be a peak.
    """
    if device_kind(grads[0]) == "cpu":
        return [list(_flat(grad).split(2**20)) for grad in grads]
    return [[g for g in grads if g.dtype == dtype] for dtype in {g.dtype: None for g in grads}]


def _flat(grad: Tensor) -> Tensor:
    """Return all numbers of a gradient as a view: a matrix product may have left it transposed."""
    return (grad if grad.is_contiguous() or grad.dim() < 2 else grad.mT).flatten()


def _norms(grads: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(grads, 2, dtype=torch.float32))  # pyright: ignore[reportPrivateImportUsage]

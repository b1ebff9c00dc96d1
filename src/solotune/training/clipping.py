"""Clipping of the global gradient norm."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm.

    The norm is summed in fp32 (torch's own is rounded to the gradients' bf16) and stays on the
    device: nothing is read.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    # In pieces: on CPU a norm in fp32 copies a bf16 input, and an embedding's would be a peak.
    pieces = [piece for grad in grads for piece in grad.flatten().split(2**20)]
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm

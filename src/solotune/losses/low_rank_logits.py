"""The low-rank part of an adapted output layer's logits, chunk by chunk, with its gradients.

Shapes: T target rows, N rows of one chunk, R rank, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class LowRankLogits:
    """Adds (low @ up^T) to logits, scales them where there is a scale, and collects gradients."""

    def __init__(self, low_TR: Tensor, up_VR: Tensor, scale_V: Tensor | None) -> None:
        self.low_TR, self.up_VR, self.scale_V = low_TR, up_VR, scale_V
        self._dlow_TR = torch.empty_like(low_TR)
        self._dup_VR = torch.zeros_like(up_VR, dtype=torch.float32)
        self._dscale_V = None if scale_V is None else torch.zeros_like(scale_V)
        self._unscaled_NV: Tensor | None = None

    def add_(self, logits_NV: Tensor, chunk: slice, buffer: Callable[[], Tensor]) -> None:
        """Add to logits; `buffer` gives memory for a copy of them, where they are scaled."""
        logits_NV.addmm_(self.low_TR[chunk], self.up_VR.T)
        if self.scale_V is not None:
            self._unscaled_NV = buffer().copy_(logits_NV)
            logits_NV.mul_(self.scale_V)

    def collect_(self, dlogits_NV: Tensor, chunk: slice) -> None:
        """Add up gradients; turn those of the logits into those before they were scaled."""
        if self.scale_V is not None:
            assert self._dscale_V is not None
            assert self._unscaled_NV is not None
            self._dscale_V += self._unscaled_NV.mul_(dlogits_NV).sum(0, dtype=torch.float32)
            dlogits_NV.mul_(self.scale_V)
        torch.mm(dlogits_NV, self.up_VR, out=self._dlow_TR[chunk])
        self._dup_VR += torch.mm(dlogits_NV.T, self.low_TR[chunk])

    def gradients(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return those of the three tensors, in their dtypes."""
        return self._dlow_TR, self._dup_VR.to(self.up_VR.dtype), self._dscale_V

"""The embedding, whose gradient is added by hand and not by autograd.

Shapes: B batch, S tokens, T tokens of a batch, V vocabulary, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """Rows of a matrix (V, D), by token, times `scale`."""

    def __init__(self, vocab_size: int, width: int, *, scale: float = 1.0) -> None:
        super().__init__(vocab_size, width)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return self.scaled_(F.embedding(input, self.weight))

    @torch.no_grad()
    def add_gradient(self, tokens_BS: Tensor, grad_BSD: Tensor) -> None:
        """Add the gradient of a lookup to `weight.grad`."""
        weight = self.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        rows_T, sums_TD = _sum_by_token(tokens_BS.flatten(), grad_BSD.flatten(0, 1))
        sums_TD = self.scaled_(sums_TD)
        weight.grad.index_put_((rows_T,), sums_TD.to(weight.dtype), accumulate=True)

    def scaled_(self, x: Tensor) -> Tensor:
        """Scale in place, by a number on the host that is rounded as the models have it."""
        scale = torch.tensor(self.scale, dtype=self.weight.dtype)
        return x if self.scale == 1 else x.mul_(scale)


def _sum_by_token(tokens_T: Tensor, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows_T, sums_TD): each token's summed gradient in fp32, once; zeros fill up to T.

    A frequent token summed in bf16 loses bits with each addition. Shapes do not depend on how many
    tokens differ, so nothing waits for the device.
    """
    sorted_T, order_T = tokens_T.sort(stable=True)
    group_T = F.pad(sorted_T.diff() != 0, (1, 0)).cumsum(0)
    sums_TD = torch.zeros(grad_TD.shape, dtype=torch.float32, device=grad_TD.device)
    sums_TD.index_put_((group_T,), grad_TD[order_T].float(), accumulate=True)
    rows_T = torch.zeros_like(tokens_T).scatter_(0, group_T, sorted_T)
    return rows_T, sums_TD

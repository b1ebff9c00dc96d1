"""Parameter groups: what is decayed and what is not."""

from typing import Any

from torch import nn


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: matrices, and one-dimensional parameters undecayed.

    Matrices, the embedding among them, take the optimizer's `weight_decay`; norm scales and biases
    take 0. The rule is the number of dimensions, not a class name: no kind of norm slips through.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

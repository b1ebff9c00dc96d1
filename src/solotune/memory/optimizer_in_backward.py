"""Optimizer in backward: a parameter steps as soon as its gradient is complete.

Saves:    all gradients but one parameter's (and the embedding's: with tied weights its gradient is
          complete only at the end).
Costs:    nothing but the calls.
Excludes: more than one micro-batch, and clipping: they take the layer-major schedule.
Label:    bit-exact. Figures: docs/optimizer_in_backward.md
"""

from torch import nn

from solotune.memory.stepping import Stepper
from solotune.models import Decoder


def step_in_backward(model: Decoder, stepper: Stepper) -> None:
    """Let every parameter but the embedding step, and drop its gradient, inside backward."""

    def step(parameter: nn.Parameter) -> None:
        stepper.step([parameter])
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad and parameter is not model.embed_tokens.weight:
            parameter.register_post_accumulate_grad_hook(step)

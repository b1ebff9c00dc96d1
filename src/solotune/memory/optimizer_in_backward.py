"""Optimizer in backward: a parameter steps as soon as its gradient is complete.

Saves:    all gradients but one parameter's (and the embedding's: with tied weights its gradient is
          complete only at the end).
Costs:    nothing but the calls.
Excludes: more than one micro-batch, and clipping: they take the layer-major schedule.
Label:    bit-exact. Figures: docs/optimizer_in_backward.md

Shapes: B batch, S tokens, D width.
"""

import math
import weakref

from torch import Tensor, nn

from solotune.data import Batch
from solotune.memory.host import HostMemory
from solotune.memory.stepping import Stepper
from solotune.models import Decoder


def register_steps(model: Decoder, stepper: Stepper) -> None:
    """Let every parameter but the embedding step, and drop its gradient, inside backward.

    For as long as the caller keeps `stepper`. A hook that kept it would keep all parameters alive,
    through the optimizer, in a circle that the garbage collector cannot see.
    """
    stepper_ref = weakref.ref(stepper)

    def step(parameter: nn.Parameter) -> None:
        stepper = stepper_ref()
        assert stepper is not None, "the stepper of a model that steps in backward is gone"
        stepper.step([parameter])
        parameter.grad = None

    embedding = set(model.embed_tokens.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in embedding:
            parameter.register_post_accumulate_grad_hook(step)


def step_in_backward(
    model: Decoder, stepper: Stepper, batch: Batch, x_BSD: Tensor, loss: Tensor, *, host: HostMemory
) -> float:
    """Run backward, in which the registered parameters step, then step the embedding.

    Returns the loss, read before backward moves the first weight: weights stay where it is not
    finite or there is no target.
    """
    (value,) = host.read(loss)
    if batch.num_targets and math.isfinite(value):
        loss.backward()
        model.add_embedding_gradient([(batch.tokens_BS, x_BSD.grad)])
        stepper.step(model.embed_tokens.parameters())
        model.embed_tokens.zero_grad(set_to_none=True)
    return value

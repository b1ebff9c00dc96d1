"""Dropout whose mask is keyed by the micro-batch and the layer, and made again in backward.

Recomputation, the layer-major schedule and a resumed run drop the same numbers. No mask is saved,
and neither is what was dropped from: the input of the layer is enough.

Two operators opaque to autograd and compile: a generator inside a compiled block would break it.
The keys are tensors on the host; as numbers they would compile it anew for each batch and layer.

Shapes: T tokens, I in, R rank.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_key(name: str) -> Tensor:
    """Return what tells a layer's masks from those of the others."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest) >> 1, device="cpu")


def drop(x: Tensor, batch_key: Tensor, layer_key: Tensor, p: float) -> Tensor:
    """Return x with a share `p` of its numbers 0 and the others divided by 1 - p."""
    return _drop(x, batch_key, layer_key, p)


def drop_and_project(
    x_TI: Tensor, weight_RI: Tensor, batch_key: Tensor, layer_key: Tensor, p: float
) -> Tensor:
    """Return drop(x) @ weight^T, (T, R); saves x alone."""
    return _project(x_TI, weight_RI, batch_key, layer_key, p)


def _dropped(x: Tensor, batch_key: Tensor, layer_key: Tensor, p: float) -> Tensor:
    text = f"{int(batch_key)} {int(layer_key)}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    generator = torch.Generator(x.device).manual_seed(int.from_bytes(digest))
    # Filled in the order of memory, so never in the strides of a gradient.
    kept = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return kept.bernoulli_(1 - p, generator=generator).mul_(x).mul_(1 / (1 - p))


@torch.library.custom_op("solotune::drop", mutates_args=())
def _drop(x: Tensor, batch_key: Tensor, layer_key: Tensor, p: float) -> Tensor:
    return _dropped(x, batch_key, layer_key, p)


@_drop.register_fake
def _(x, batch_key, layer_key, p):
    return x.new_empty(x.shape)


def _keep_keys(ctx, inputs, output) -> None:
    _, *keys, ctx.p = inputs
    ctx.save_for_backward(*keys)


def _drop_gradient(ctx, grad):
    return _drop(grad, *ctx.saved_tensors, ctx.p), None, None, None


_drop.register_autograd(_drop_gradient, setup_context=_keep_keys)


@torch.library.custom_op("solotune::drop_and_project", mutates_args=())
def _project(
    x_TI: Tensor, weight_RI: Tensor, batch_key: Tensor, layer_key: Tensor, p: float
) -> Tensor:
    return F.linear(_dropped(x_TI, batch_key, layer_key, p), weight_RI)


@_project.register_fake
def _(x_TI, weight_RI, batch_key, layer_key, p):
    return x_TI.new_empty((len(x_TI), len(weight_RI)))


@torch.library.custom_op("solotune::drop_and_project_backward", mutates_args=())
def _project_backward(
    grad_TR: Tensor,
    x_TI: Tensor,
    weight_RI: Tensor,
    batch_key: Tensor,
    layer_key: Tensor,
    p: float,
    wants_x: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, empty where it is not wanted, and of the weight."""
    dweight_RI = grad_TR.T @ _dropped(x_TI, batch_key, layer_key, p)
    if not wants_x:
        return x_TI.new_empty(0), dweight_RI
    return _dropped(grad_TR @ weight_RI, batch_key, layer_key, p), dweight_RI


@_project_backward.register_fake
def _(grad_TR, x_TI, weight_RI, batch_key, layer_key, p, wants_x):
    dx = x_TI.new_empty(x_TI.shape if wants_x else 0)
    return dx, weight_RI.new_empty(weight_RI.shape)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.p = inputs
    ctx.save_for_backward(*tensors)


def _project_gradient(ctx, grad_TR):
    wants_x = ctx.needs_input_grad[0]
    dx_TI, dweight_RI = _project_backward(grad_TR, *ctx.saved_tensors, ctx.p, wants_x)
    return dx_TI if wants_x else None, dweight_RI, None, None, None


_project.register_autograd(_project_gradient, setup_context=_keep)

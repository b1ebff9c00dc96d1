"""The product with a weight in 4 bits, and its gradient.

Each is an operator of its own, so that the dense weight lives inside it alone: were it seen by
autograd or by torch.compile, one of them would keep it from forward to backward.

Shapes: ... any, I in, O out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from solotune.adapters.nf4 import SCALES_BLOCK, FourBit, bitsandbytes, pack
from solotune.errors import ConfigError

_FEW = 32  # rows: on a card they go through a kernel that makes no dense weight at all


def dense_weight(packed: Tensor, layout: FourBit, dtype: torch.dtype) -> Tensor:
    """Return the weight as numbers, (O, I); there is no gradient."""
    return _dense(packed, dtype, *_values(layout))


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, layout: FourBit) -> Tensor:
    """Return x @ weight.T + bias, (..., O), in the dtype of x (..., I); saves `packed` alone."""
    return _linear(x, packed, bias, *_values(layout))


def _values(layout: FourBit) -> tuple[int, int, str, int, bool]:
    return (
        layout.out_features,
        layout.in_features,
        layout.kind,
        layout.block_size,
        layout.double,
    )


@torch.library.custom_op("solotune::four_bit_dense", mutates_args=())
def _dense(
    packed: Tensor,
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    kind: str,
    block_size: int,
    double: bool,
) -> Tensor:
    layout = FourBit(out_features, in_features, kind, block_size, double)
    return _dequantize(packed, layout, dtype)


@_dense.register_fake
def _(packed, dtype, out_features, in_features, kind, block_size, double):
    return packed.new_empty((out_features, in_features), dtype=dtype)


@torch.library.custom_op("solotune::four_bit_linear", mutates_args=())
def _linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    kind: str,
    block_size: int,
    double: bool,
) -> Tensor:
    layout = FourBit(out_features, in_features, kind, block_size, double)
    if x.numel() > _FEW * in_features:
        return F.linear(x, _dequantize(packed, layout, x.dtype), bias)
    codes, state = _quant_state(packed, layout, x.dtype)
    with torch.no_grad():
        # Lying on its side, as releases before 0.50 want it; newer ones take both.
        return bitsandbytes().matmul_4bit(x, codes.t(), state, bias=bias)


@_linear.register_fake
def _(x, packed, bias, out_features, in_features, kind, block_size, double):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("solotune::four_bit_linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor,
    packed: Tensor,
    out_features: int,
    in_features: int,
    kind: str,
    block_size: int,
    double: bool,
) -> Tensor:
    layout = FourBit(out_features, in_features, kind, block_size, double)
    return grad @ _dequantize(packed, layout, grad.dtype)


@_linear_backward.register_fake
def _(grad, packed, out_features, in_features, kind, block_size, double):
    return grad.new_empty((*grad.shape[:-1], in_features))


def _keep(ctx, inputs, output) -> None:
    _, packed, _, *ctx.layout = inputs
    ctx.save_for_backward(packed)


def _gradients(ctx, grad: Tensor):
    (packed,) = ctx.saved_tensors
    wants_x, _, wants_bias, *rest = ctx.needs_input_grad
    grad_x = _linear_backward(grad, packed, *ctx.layout) if wants_x else None
    grad_bias = grad.flatten(0, -2).sum(0) if wants_bias else None
    return grad_x, None, grad_bias, *(None for _ in rest)


_linear.register_autograd(_gradients, setup_context=_keep)


def _dequantize(packed: Tensor, layout: FourBit, dtype: torch.dtype) -> Tensor:
    codes, state = _quant_state(packed, layout, dtype)
    return bitsandbytes().functional.dequantize_4bit(codes, state)


def _quant_state(packed: Tensor, layout: FourBit, dtype: torch.dtype):
    """Return a packed weight as bitsandbytes knows it; nothing is copied."""
    quant_state = bitsandbytes().functional.QuantState
    codes, scales_K, values, scales_of_scales, scale_values, mean = layout.parts(packed)
    state2 = None
    if layout.double:
        state2 = quant_state(
            scales_of_scales, code=scale_values, blocksize=SCALES_BLOCK, dtype=torch.float32
        )
    state = quant_state(
        scales_K,
        shape=torch.Size(layout.shape),
        code=values,
        blocksize=layout.block_size,
        quant_type=layout.kind,
        dtype=dtype,
        offset=mean,
        state2=state2,
    )
    return codes.view(-1, 1), state


def check_works(device: torch.device) -> None:
    """Raise ConfigError where 4-bit weights cannot be made or used on `device`."""
    layout = FourBit(64, 64)
    packed = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    try:
        pack(torch.ones(layout.shape, device=device), packed, layout)
        dense_weight(packed, layout, torch.float32)
    except ConfigError:
        raise
    except Exception as error:  # a library without kernels for this device says so in many ways
        raise ConfigError(
            f"bitsandbytes cannot work on {device} ({str(error).strip().splitlines()[0]}): see "
            "`python -m bitsandbytes`, or set quantize_base=null"
        ) from error

"""What kernels do inside: operations counted, and memory held that no operator returns.

Shapes: T tokens of a batch, H heads, G key/value heads, K head width, N numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
Tensors = Sequence[Tensor]
Pairs = float  # of query and key that attention computes in one head


def flops(func: Any, inputs: Tensors, pairs: Pairs) -> int:
    """Return the floating-point operations of matrix products and attention; of others 0."""
    count = _FLOPS.get(func)
    return count(inputs, pairs) if count else 0


def _product(inputs: Tensors, _: Pairs) -> int:
    left, right = inputs[-2:]  # a bias stands before them
    return 2 * left.numel() * right.size(-1)


def _linear(inputs: Tensors, _: Pairs) -> int:
    return 2 * inputs[0].numel() * inputs[1].size(0)


def _product_out(inputs: Tensors, _: Pairs) -> int:
    left, right = inputs[:2]
    return 2 * left.numel() * right.size(-1)


def _attention(inputs: Tensors, pairs: Pairs) -> int:
    return int(4 * pairs * math.prod(inputs[0].shape[-2:]))


def _attention_backward(inputs: Tensors, pairs: Pairs) -> int:
    return int(10 * pairs * math.prod(inputs[0].shape[-2:]))


_FLOPS: dict[Any, Callable[[Tensors, Pairs], int]] = {
    _aten.mm.default: _product,
    _aten.matmul.default: _product,
    _aten.linear.default: _linear,
    _aten.mm.out: _product_out,
    _aten.addmm.default: _product,
    _aten.bmm.default: _product,
    _aten.baddbmm.default: _product,
    _aten._flash_attention_forward.default: _attention,
    _aten._flash_attention_backward.default: _attention_backward,
}


def held_inside(func: Any, inputs: Tensors, results: Tensors, kind: str) -> int:
    """Return the bytes that an operator takes and gives back before it returns."""
    held = _HELD.get((kind, func))
    return held(inputs, results) if held else 0


def _flash_backward(inputs: Tensors, _: Tensors) -> int:
    """The gradient of queries in fp32, row sums, and with grouped heads dk and dv of each head.

    Source: PyTorch's flash_attn/flash_api.cpp, mha_varlen_bwd.
    """
    query_THK, key_TGK, bounds = inputs[1], inputs[2], inputs[6]
    tokens, heads, width = query_THK.shape
    rows = tokens + 128 * (bounds.numel() - 1)
    rounded = -(-width // 32) * 32
    held = 4 * rows * heads * (rounded + 1)
    if key_TGK.size(1) != heads:
        held += 2 * tokens * heads * width * query_THK.element_size()
    return held


def _converted(inputs: Tensors, _: Tensors) -> int:
    """Operands of another dtype: a CPU converts them whole, a card as it reads."""
    whole = [tensor for tensor in inputs if tensor.dim()]
    wide = max((t.element_size() for t in whole if t.is_floating_point()), default=0)
    return sum(wide * t.numel() for t in whole if 0 < t.element_size() < wide)


def _reduced(inputs: Tensors, results: Tensors) -> int:
    """An operand of a narrower dtype than its sum: a CPU converts it whole, a card as it reads.

    Source: PyTorch's aten/src/ATen/native/ReduceOpsUtils.h, make_reduction.
    """
    pairs = zip(inputs, results, strict=False)  # of a list of norms, one after another
    wider = ((i, r) for i, r in pairs if i.element_size() < r.element_size())
    return max((i.numel() * r.element_size() for i, r in wider), default=0)


def _sorted(inputs: Tensors, _: Tensors) -> int:
    return 4 * inputs[0].nbytes


_HELD: dict[tuple[str, Any], Callable[[Tensors, Tensors], int]] = {
    ("cuda", _aten._flash_attention_backward.default): _flash_backward,
    ("cuda", _aten.sort.stable): _sorted,
}
for _name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"):
    _HELD["cpu", getattr(_aten, _name).Tensor] = _converted
for _name in ("add", "sub", "mul", "div"):
    _HELD["cpu", getattr(_aten, _name).out] = _converted
for _reduction in (
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
    *(_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar),
):
    _HELD["cpu", _reduction] = _reduced


def is_entered(func: Any, kind: str) -> bool:
    """Whether an operator that is opaque on fake tensors has a kernel in Python to be followed."""
    if func.namespace == "solotune":
        return True
    name = func._schema.name
    is_update = name.startswith("bitsandbytes::optimizer_update_")  # on a card it holds nothing
    return name == "bitsandbytes::gemm_4bit" or (is_update and kind == "cpu")

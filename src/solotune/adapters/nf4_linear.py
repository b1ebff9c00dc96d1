"""The 4-bit base of QLoRA: the linear layers of the blocks hold their weights in NF4.

Saves:    12 of 16 bits of each of these weights: 4.13 bits are left, scales included.
Costs:    each product makes its weight dense first, in forward and again in backward; the numbers
          are rounded to 16 values a block. These weights are not trained.
Excludes: full fine-tuning of the blocks.
Label:    approximate. Figures: docs/qlora.md

Shapes: O out, I in.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solotune.adapters.nf4 import FourBit
from solotune.adapters.nf4_product import dense_weight, linear
from solotune.errors import CheckpointError
from solotune.models.decoder import Decoder
from solotune.models.linear import Linear


class NF4Linear(Linear):
    """A linear layer whose weight is one flat uint8 parameter, frozen; a bias stays as it is.

    `dtype` is that of the weight as numbers; a product is computed in its input's.
    """

    def __init__(self, layout: FourBit, *, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a dense weight
        self.in_features, self.out_features = layout.in_features, layout.out_features
        self.layout, self.dtype = layout, dtype
        packed = torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = bias

    def forward(self, input: Tensor, context: Any = None) -> Tensor:
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):  # which does not know this operator
            input = input.to(torch.get_autocast_dtype(device_type))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return linear(input, self.weight, bias, self.layout)

    def dense_weight(self) -> Tensor:
        """Return the weight as numbers, (O, I)."""
        return dense_weight(self.weight, self.layout, self.dtype)

    def extra_repr(self) -> str:
        kind = self.layout.kind
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {kind}"


def quantize_linears(
    model: Decoder,
    to: Literal["nf4"] | None = "nf4",
    *,
    stored: Mapping[str, FourBit] | None = None,
) -> list[str]:
    """Let linear layers of the blocks have 4-bit weights, on meta; returns their names.

    With `stored` (checkpoint.stored_four_bit: by name in the folder) exactly those that the folder
    holds so; otherwise all, or none where `to` is None. Embedding and head stay. Comes after
    `set_dtype` and before adapters and weights.
    """
    if not stored and to is None:
        return []
    names = []
    for name, module in list(model.named_modules()):
        if not name.startswith("layers.") or type(module) is not Linear:
            continue
        shape = module.out_features, module.in_features
        layout = FourBit(*shape)
        if stored:
            key = model.to_hf_key(f"{name}.weight")
            if key not in stored:
                continue
            layout = stored[key]
            if layout.shape != shape:
                raise CheckpointError(
                    f"{key} has the shape {list(layout.shape)} where config.json asks for "
                    f"{list(shape)}: the two do not belong together"
                )
        weight = module.weight
        assert weight.is_meta, f"{name} has weights already: they are quantised while they load"
        parent, _, attribute = name.rpartition(".")
        replacement = NF4Linear(layout, bias=module.bias, dtype=weight.dtype)
        setattr(model.get_submodule(parent), attribute, replacement.train(module.training))
        names.append(name)
    return names


def four_bit_linears(model: nn.Module) -> dict[str, NF4Linear]:
    """Return the layers with 4-bit weights, by the name of that weight."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, NF4Linear)
    }

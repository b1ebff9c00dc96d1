"""A linear layer, or the embedding, with a low-rank addition to its frozen weight.

An adapted layer is what it was before with a class of here mixed in: its parameters keep their
names, and a layer in 4 bits stays one. Mathematics and names are PEFT's.

The factors are multiplied in the dtype of the activations, whatever they are held in: fp32 is for
the small updates, and a product in fp32 would cost as much as the layer's own.

Shapes: ... any, T tokens, I in, O out, R rank, V vocabulary, D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solotune.adapters.lora_dropout import drop, drop_and_project, layer_key
from solotune.device_kind import device_kind
from solotune.models.embedding import Embedding
from solotune.models.linear import Linear
from solotune.models.output import AdaptedOutput

_PIECE = 2**22  # numbers of a weight that are in fp32 at once, on a CPU


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What one layer gets: the rank and dtype of its matrices, and how they are used."""

    rank: int
    scaling: float
    dropout: float
    dora: bool
    dtype: torch.dtype


class Factor(nn.Module):
    """A matrix with a name of its own: `lora_A.weight`."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _new(rows, columns, dtype=dtype)


class LoRALinear(Linear):
    """x (W + scaling * B A)^T; with DoRA its rows are scaled to a trained length."""

    lora_A: Factor  # (R, I)
    lora_B: Factor  # (O, R)
    lora_magnitude_vector: nn.Parameter | None  # (O,)
    scaling: float
    dropout: float

    def add_adapter(self, name: str, addition: Addition) -> None:
        """Add the parameters, on meta; `name` is the layer's in the model."""
        self.scaling, self.dropout = addition.scaling, addition.dropout
        self.layer_key = layer_key(name)
        self.lora_A = Factor(addition.rank, self.in_features, addition.dtype)
        self.lora_B = Factor(self.out_features, addition.rank, addition.dtype)
        magnitude = _new(self.out_features, dtype=torch.float32) if addition.dora else None
        self.register_parameter("lora_magnitude_vector", magnitude)

    def forward(self, input: Tensor, context: Any = None) -> Tensor:
        batch_key = None if context is None or not self.dropout else context.key
        input_TI = input.flatten(0, -2)
        y_TO = super().forward(input_TI)  # no view: it is added to in place
        up_RO = self.lora_B.weight.to(y_TO.dtype).T
        if self.lora_magnitude_vector is not None:
            y_TO = self._forward_dora(input_TI, y_TO, up_RO, batch_key)
        else:
            low_TR = self._down(input_TI.to(y_TO.dtype), batch_key)
            y_TO = y_TO.addmm_(low_TR, up_RO, alpha=self.scaling)
        return y_TO.unflatten(0, input.shape[:-1])

    @property
    def output(self) -> AdaptedOutput:
        """What a loss takes of an output layer."""

        def down(hidden: Tensor, key: int | None) -> Tensor:
            on_host = None if key is None or not self.dropout else torch.tensor(key, device="cpu")
            return self._down(hidden, on_host)

        scale_V = None if self.lora_magnitude_vector is None else self.row_scale()
        return AdaptedOutput(self.weight, down, self.lora_B.weight * self.scaling, scale_V)

    def _down(self, x: Tensor, batch_key: Tensor | None) -> Tensor:
        """Return x A^T, (..., R), of what is left of x."""
        down_RI = self.lora_A.weight.to(x.dtype)
        if batch_key is None:
            return F.linear(x, down_RI)
        return drop_and_project(x, down_RI, batch_key, self.layer_key, self.dropout)

    def _forward_dora(
        self, input_TI: Tensor, y_TO: Tensor, up_RO: Tensor, batch_key: Tensor | None
    ) -> Tensor:
        """Return the layer's result, given that of the base, `y_TO`, which may be overwritten.

        With dropout, as PEFT has it: y + (scale - 1) * W drop(x) + scale * scaling * B A drop(x).
        """
        dtype, rest_TO = y_TO.dtype, None
        bias = None if self.bias is None else self.bias.to(dtype)
        if batch_key is not None:
            input_TI = drop(input_TI, batch_key, self.layer_key, self.dropout)
            rest_TO, y_TO = y_TO, super().forward(input_TI)
        product_TO = y_TO if bias is None else y_TO - bias
        if rest_TO is not None:
            rest_TO = rest_TO - product_TO
        low_TR = self._down(input_TI.to(dtype), None)
        sum_TO = product_TO.addmm_(low_TR, up_RO, alpha=self.scaling)
        scaled_TO = sum_TO * self.row_scale()  # in fp32: the scale is near 1
        if rest_TO is not None:
            return (scaled_TO + rest_TO).to(dtype)
        return scaled_TO.to(dtype) if bias is None else (scaled_TO + bias).to(dtype)

    def row_scale(self) -> Tensor:
        """Return trained length / length of each row of W + scaling * B A, (O,), in fp32.

        The length takes no gradient. It is computed without the sum itself.
        """
        assert self.lora_magnitude_vector is not None
        with torch.no_grad(), torch.autocast(self.lora_B.weight.device.type, enabled=False):
            weight_OI, up_OR = self.dense_weight(), self.lora_B.weight.float()
            down_RI = self.lora_A.weight
            cross_OR = weight_OI @ down_RI.to(weight_OI.dtype).T
            square_O = row_squares(weight_OI)
            square_O += 2 * self.scaling * (cross_OR * up_OR).sum(1)
            gram_RR = down_RI.float() @ down_RI.float().T
            square_O += self.scaling**2 * ((up_OR @ gram_RR) * up_OR).sum(1)
            length_O = square_O.clamp_(min=0).sqrt_()
        return self.lora_magnitude_vector / length_O

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set the trained lengths to those of the weight's rows: a new B is 0.

        The weight may be on another device: a streamed layer's is at home.
        """
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.copy_(row_squares(self.dense_weight()).sqrt_())

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the weight with the adapter in it, (O, I), new and in fp32."""
        weight_OI = self.dense_weight().float()
        up_OR, down_RI = self.lora_B.weight.float(), self.lora_A.weight.float()
        weight_OI = torch.addmm(weight_OI, up_OR, down_RI, alpha=self.scaling)
        if self.lora_magnitude_vector is not None:
            length_O = torch.linalg.vector_norm(weight_OI, dim=1)
            weight_OI.mul_((self.lora_magnitude_vector / length_O).unsqueeze(1))
        return weight_OI


class LoRAEmbedding(Embedding):
    """Rows of W + scaling * (B A)^T; with DoRA its columns are scaled to a trained length."""

    lora_embedding_A: nn.Parameter  # (R, V)
    lora_embedding_B: nn.Parameter  # (D, R)
    lora_magnitude_vector: nn.Parameter | None  # (D,)
    scaling: float

    def add_adapter(self, name: str, addition: Addition) -> None:
        """Add the parameters, on meta; there is no dropout, as in PEFT."""
        self.scaling, rank, dtype = addition.scaling, addition.rank, addition.dtype
        self.lora_embedding_A = _new(rank, self.num_embeddings, dtype=dtype)
        self.lora_embedding_B = _new(self.embedding_dim, rank, dtype=dtype)
        magnitude = _new(self.embedding_dim, dtype=torch.float32) if addition.dora else None
        self.register_parameter("lora_magnitude_vector", magnitude)

    def forward(self, input: Tensor) -> Tensor:
        x_TD = F.embedding(input.flatten(), self.weight)
        low_TR = F.embedding(input.flatten(), self.lora_embedding_A.T).to(x_TD.dtype)
        x_TD = x_TD.addmm_(low_TR, self.lora_embedding_B.to(x_TD.dtype).T, alpha=self.scaling)
        if self.lora_magnitude_vector is not None:
            x_TD = (x_TD * self.column_scale()).to(x_TD.dtype)
        return self.scaled_(x_TD).unflatten(0, input.shape)

    def add_gradient(self, tokens_BS: Tensor, grad_BSD: Tensor) -> None:
        """Add the gradient of a lookup to the adapter's matrices."""
        with torch.enable_grad():
            self(tokens_BS).backward(grad_BSD)

    def column_scale(self) -> Tensor:
        """Return trained length / length of each column of the sum, (D,), in fp32.

        The length takes no gradient.
        """
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():
            square_D = torch.zeros_like(self.lora_magnitude_vector)
            for piece_VD in self._merged_pieces():
                square_D += piece_VD.square_().sum(0)
        return self.lora_magnitude_vector / square_D.sqrt_()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set the trained lengths to those of the columns."""
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.fill_(1)
            self.lora_magnitude_vector.div_(self.column_scale())

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the weight with the adapter in it, (V, D), new and in fp32."""
        weight_VD = torch.cat(list(self._merged_pieces()))
        if self.lora_magnitude_vector is not None:
            weight_VD.mul_(self.column_scale())
        return weight_VD

    def _merged_pieces(self) -> Iterator[Tensor]:
        """Yield some rows at a time of W + scaling * (B A)^T, in fp32."""
        up_RD = self.lora_embedding_B.float().T
        rows = max(1, _PIECE // self.embedding_dim)
        down = self.lora_embedding_A.float().T.split(rows)
        for weight_VD, down_VR in zip(self.weight.split(rows), down, strict=True):
            yield torch.addmm(weight_VD.float(), down_VR, up_RD, alpha=self.scaling)


@cache
def adapted_class(base: type[nn.Module]) -> Any:
    """Return the class of an adapted layer that was of the class `base`; always the same one.

    Blocks share compiled code only where their classes are the same.
    """
    mixin = LoRAEmbedding if issubclass(base, Embedding) else LoRALinear
    if issubclass(mixin, base):
        return mixin
    return type(f"LoRA{base.__name__}", (mixin, base), {})


def row_squares(weight_OI: Tensor) -> Tensor:
    """Return the squared length of each row, (O,), in fp32.

    On CPU some rows at a time: its norm in fp32 copies a bf16 input.
    """
    rows = (
        max(1, _PIECE // weight_OI.size(1)) if device_kind(weight_OI) == "cpu" else len(weight_OI)
    )
    pieces = weight_OI.split(rows)
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32) for piece in pieces]
    return torch.cat(norms).square_()


def _new(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

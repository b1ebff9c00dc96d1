"""Models with random weights, made in no time: memory and speed do not depend on the values."""

import math
from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor, nn

from solotune.models import Decoder
from solotune.training import set_dtype

STD = 0.02  # of the matrices; norms are 1
# Prime, so that no two rows of a matrix start at the same place of the stream.
NUM_RANDOM = 1_048_583


class RandomTensors:
    """Cuts bf16 tensors out of one stream of normal numbers, which begins again where it ends.

    To draw 8 billion numbers would take minutes. No two tensors start at the same place.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        generator = torch.Generator(device).manual_seed(42)
        stream = torch.empty(NUM_RANDOM, dtype=torch.bfloat16, device=device)
        self._stream = stream.normal_(0, STD, generator=generator)

    def cut(self, shape: Sequence[int], index: int) -> Tensor:
        """Return the `index`-th tensor of a model: random, or ones where it is a norm's."""
        if len(shape) == 1:
            return torch.ones(shape[0], device=self._stream.device)
        flat = self._stream.new_empty(math.prod(shape))
        start, done = index * 1_000_003 % NUM_RANDOM, 0
        while done < len(flat):
            piece = self._stream[start : start + len(flat) - done]
            flat[done : done + len(piece)] = piece
            done, start = done + len(piece), 0
        return flat.view(*shape)

    def model(self, build: Callable[[], Decoder]) -> Decoder:
        """Return a decoder in bf16, with norms in fp32, on the stream's device."""
        return self.fill(on_meta(build))

    def fill(self, model: Decoder, *, on_host: Container[object] = ()) -> Decoder:
        """Fill a decoder that is on meta; parameters in `on_host` are moved there, one by one."""
        for index, parameter in enumerate(model.parameters()):
            filled = self.cut(parameter.shape, index).to(parameter.dtype)
            if parameter in on_host:
                filled = filled.cpu()
            torch.utils.swap_tensors(parameter, nn.Parameter(filled))
        return model.train()


def on_meta(build: Callable[[], Decoder]) -> Decoder:
    """Return a decoder in bf16, with norms in fp32, without memory."""
    with torch.device("meta"):
        return set_dtype(build(), torch.bfloat16)

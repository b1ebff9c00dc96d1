"""Random bits for stochastic rounding, keyed by seed, step and parameter, never by call order."""

import hashlib

import torch
from torch import Tensor


class Noise:
    """Draws uniform bytes for one parameter in one step.

    A layer that steps first or last, and a run that was resumed, draw the same ones.
    """

    def __init__(self, device: torch.device, *, seed: int, step: int, parameter: int) -> None:
        # A hash, as the CPU's generator reads the lower 32 bits of its seed alone.
        digest = hashlib.blake2b(f"{seed} {step} {parameter}".encode(), digest_size=7).digest()
        self._generator = torch.Generator(device).manual_seed(int.from_bytes(digest))

    def bytes_like(self, tensor: Tensor, *, each: int = 1) -> Tensor:
        """Return uint8 (each: 2 int16) of a flat tensor's length, every value equally likely.

        64 bits a draw: on CPU a draw costs as much as a division.
        """
        num_bytes = tensor.numel() * each
        words = torch.empty(-(-num_bytes // 8), dtype=torch.int64, device=tensor.device)
        words.random_(-(2**63), None, generator=self._generator)
        found = words.view(torch.uint8)[:num_bytes]
        return found if each == 1 else found.view(torch.int16)

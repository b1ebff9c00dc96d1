"""Random bits for stochastic rounding, keyed by seed, step, parameter and place, never by order.

A hash of a counter: no generator, so that a compiled kernel makes its bits where it needs them, and
every device makes the same ones.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

# Two rounds of multiply and shift: constants of lowbias32 (Chris Wellons, hash-prospector). A
# second key between them: two steps of a parameter share no run of numbers.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
_NEXT_WORD = 0x3C6EF372


def noise_keys(
    device: torch.device, *, seed: int, step: int, parameter: int, starts: Sequence[int]
) -> Tensor:
    """Return int32 keys (pieces, 2) of the pieces of a flat parameter that begin at `starts`."""
    digest = hashlib.blake2b(f"{seed} {step} {parameter}".encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4]), int.from_bytes(digest[4:])
    rows = [((first + start) % 2**31, second % 2**31) for start in starts]
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)


class Noise:
    """Draws uniform bits for the numbers of one piece, of a `shape`, in one step.

    A layer that steps first or last, and a run that was resumed, draw the same ones.
    """

    def __init__(self, shape: torch.Size, key: Tensor) -> None:
        self._shape = shape
        self._first, self._second = key.unbind()
        self._words = 0
        self._left = 0  # bits of the word that nobody has yet

    def bits(self, count: int) -> Tensor:
        """Return int32 numbers from 0 to 2**count - 1, every one equally likely; count up to 31."""
        if self._left < count:
            self._word = self._new_word()
            self._left = 32
        self._left -= count
        return (self._word >> self._left).bitwise_and_(2**count - 1)

    def _new_word(self) -> Tensor:
        number = self._shape.numel()
        word = torch.arange(number, dtype=torch.int32, device=self._first.device)
        word = word.view(self._shape).add_(self._first)
        word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
        word.bitwise_xor_(self._second + self._words * _NEXT_WORD)
        word.bitwise_xor_((word >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
        self._words += 1
        return word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))

"""What a card's allocator reserves for a sequence of allocations: the holes between them too.

As PyTorch's with expandable segments, which a run sets: one growing range for small blocks and one
for large ones, the best fitting hole first, neighbours joined. Copies on a side stream give their
memory back a little later than here.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

GRANULE = 512  # bytes: what a block is rounded up to
_SMALL = 2**20  # the largest block of the range for small ones
_PAGE_SMALL, _PAGE_LARGE = 2 * 2**20, 20 * 2**20  # what a range grows by


class Block(NamedTuple):
    """A block's beginning (sign 1) or end (-1)."""

    name: int
    num_bytes: int
    sign: int


def rounded(num_bytes: int, granule: int = GRANULE) -> int:
    return -(-num_bytes // granule) * granule


class _Range:
    """Addresses from 0 to `mapped`, with the holes below `end`."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.mapped = self.end = 0
        self._holes: list[tuple[int, int]] = []  # (bytes, start)
        self._size_at: dict[int, int] = {}  # of a hole by its start
        self._start_before: dict[int, int] = {}  # of a hole by its end

    def take(self, num_bytes: int) -> int:
        """Return the start of a block."""
        place = bisect_left(self._holes, (num_bytes, 0))
        if place < len(self._holes):
            size, start = self._holes[place]
            self._remove(start, size)
            if size > num_bytes:
                self._add(start + num_bytes, size - num_bytes)
            return start
        start = self._start_before.get(self.end, self.end)  # a hole at the end grows
        if start != self.end:
            self._remove(start, self.end - start)
        self.end = start + num_bytes
        self.mapped = max(self.mapped, rounded(self.end, self.page))
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Make a block a hole, joined with those around it."""
        after = start + num_bytes
        if after in self._size_at:
            size = self._size_at[after]
            self._remove(after, size)
            num_bytes += size
        if start in self._start_before:
            before = self._start_before[start]
            self._remove(before, start - before)
            start, num_bytes = before, num_bytes + start - before
        self._add(start, num_bytes)

    def _add(self, start: int, size: int) -> None:
        insort(self._holes, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, start))]
        del self._size_at[start], self._start_before[start + size]


def reserved_bytes(steps: Iterable[Iterable[Block]]) -> list[int]:
    """Return what is reserved after the blocks of each step."""
    small, large = _Range(_PAGE_SMALL), _Range(_PAGE_LARGE)
    starts: dict[int, int] = {}
    reserved = []
    for blocks in steps:
        for name, num_bytes, sign in blocks:
            size = rounded(num_bytes)
            pool = small if size <= _SMALL else large
            if size and sign > 0:
                starts[name] = pool.take(size)
            elif size and name in starts:
                pool.give(starts.pop(name), size)
        reserved.append(small.mapped + large.mapped)
    return reserved

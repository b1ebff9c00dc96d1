"""Best-fit decreasing: which samples share a row, found in O(N * capacity / 64) bit operations."""

import numpy as np


def best_fit(lengths_N: np.ndarray, *, capacity: int) -> np.ndarray:
    """The pack of each sample, for `lengths_N` in descending order and all at most `capacity`.

    Each sample goes into the open pack with the least room that still holds it. The packs with a
    certain room left are a stack, and one integer has the bit r set where the stack of room r is
    not empty, so that the best fit is the lowest set bit from the length on.
    """
    packs_N = np.empty(len(lengths_N), np.int64)
    open_packs: dict[int, list[int]] = {}
    rooms = 0
    count = 0
    for i, length in enumerate(lengths_N.tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            stack = open_packs[room]
            pack = stack.pop()
            if not stack:
                rooms &= ~(1 << room)
        else:
            room, pack, count = capacity, count, count + 1
        packs_N[i] = pack
        left = room - length
        if left:
            open_packs.setdefault(left, []).append(pack)
            rooms |= 1 << left
    return packs_N

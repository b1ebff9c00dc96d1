"""What a card's allocator would reserve: holes are used again, joined, and counted."""

import random

from solotune.plan.allocator import Block, reserved_bytes

MIB = 2**20


def reserved(*events: tuple[int, int, int]) -> int:
    return reserved_bytes([[Block(*event) for event in events]])[0]


def test_ranges_grow_by_whole_pages() -> None:
    assert reserved((1, 5 * MIB, 1)) == 20 * MIB
    assert reserved((1, 100, 1)) == 2 * MIB
    assert reserved((1, 15 * MIB, 1), (2, 15 * MIB, 1)) == 40 * MIB


def test_a_hole_is_used_again_and_neighbours_are_joined() -> None:
    two = [(1, 10 * MIB, 1), (2, 10 * MIB, 1), (3, 20 * MIB, 1)]
    freed = [(1, 10 * MIB, -1), (2, 10 * MIB, -1)]
    assert reserved(*two, *freed, (4, 20 * MIB, 1)) == 40 * MIB


def test_a_hole_that_is_too_small_makes_the_range_grow() -> None:
    events = [(1, 10 * MIB, 1), (2, 20 * MIB, 1), (1, 10 * MIB, -1), (3, 12 * MIB, 1)]
    assert reserved(*events) == 60 * MIB  # 42 of them used


def test_reserved_is_never_less_than_what_is_allocated() -> None:
    source, live, events, highest, now = random.Random(0), {}, [], 0, 0
    for block in range(3000):
        if live and source.random() < 0.48:
            chosen = source.choice(list(live))
            size = live.pop(chosen)
            events.append(Block(chosen, size, -1))
            now -= -(-size // 512) * 512
        size = source.choice([300, 40_000, 700_000, 3 * MIB, 17 * MIB])
        live[block] = size
        events.append(Block(block, size, 1))
        now += -(-size // 512) * 512
        highest = max(highest, now)
    found = reserved_bytes([events])[0]
    assert highest <= found < 1.2 * highest

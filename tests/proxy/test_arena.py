"""Blocks never overlap, never get lost, and wait their turn."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from gpusup.proxy.arena import GRAIN, Allocator, Arena
from gpusup.proxy.errors import ArenaFull, InputTooLarge


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_never_overlaps_and_ends_whole(seed: int) -> None:
    rng = random.Random(seed)
    allocator = Allocator(64 * GRAIN + 5)
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            allocator.give(*held.pop(rng.randrange(len(held))))
        else:
            size = rng.randrange(1, 12 * GRAIN)
            offset = allocator.take(size)
            if offset is not None:
                held.append((offset, size))
        used = sorted((o, -(-s // GRAIN) * GRAIN) for o, s in held)
        pieces = sorted(used + allocator.extents())
        assert pieces[0][0] == 0
        for (start, size), (after, _) in itertools.pairwise(pieces):
            assert start + size == after
        assert sum(size for _, size in pieces) == allocator.total
        assert allocator.free == sum(size for _, size in allocator.extents())
        starts = [o for o, _ in allocator.extents()]
        ends = {o + s for o, s in allocator.extents()}
        assert not ends & set(starts), "neighbours are joined"
    for block in held:
        allocator.give(*block)
    assert allocator.extents() == [(0, allocator.total)]


def test_what_is_free_cannot_be_given_back() -> None:
    allocator = Allocator(8 * GRAIN)
    offset = allocator.take(GRAIN)
    assert offset == 0
    allocator.give(0, GRAIN)
    with pytest.raises(ValueError, match="not leased"):
        allocator.give(0, GRAIN)
    with pytest.raises(ValueError, match="not leased"):
        allocator.give(7 * GRAIN, 2 * GRAIN)


async def test_a_full_arena_makes_the_next_one_wait_in_order() -> None:
    arena = Arena(4 * GRAIN)
    first = await arena.lease(4 * GRAIN, 1)
    second = asyncio.create_task(arena.lease(3 * GRAIN, 5))
    await asyncio.sleep(0)
    third = asyncio.create_task(arena.lease(GRAIN, 5))
    await asyncio.sleep(0)
    assert arena.waiting == 2
    first.release()
    leases = await asyncio.gather(second, third)
    assert arena.free == 0
    for lease in leases:
        lease.release()
    assert arena.free == arena.total
    arena.close()


async def test_waiting_for_a_block_ends_with_503_and_lets_smaller_ones_pass() -> None:
    arena = Arena(4 * GRAIN)
    first = await arena.lease(3 * GRAIN, 1)
    large = asyncio.create_task(arena.lease(4 * GRAIN, 0.01))
    await asyncio.sleep(0)
    small = asyncio.create_task(arena.lease(GRAIN, 5))
    with pytest.raises(ArenaFull) as caught:
        await large
    assert caught.value.retry_after_s == 1
    (await small).release()
    first.release()
    assert arena.free == arena.total
    arena.close()


async def test_one_that_leaves_while_it_waits_keeps_nothing() -> None:
    arena = Arena(GRAIN)
    first = await arena.lease(1, 1)
    waiting = asyncio.create_task(arena.lease(1, 5))
    await asyncio.sleep(0)
    first.release()  # it is given to the waiting one ...
    waiting.cancel()  # ... which leaves before it knows
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert arena.free == arena.total
    arena.close()


async def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    arena = Arena(4 * GRAIN)
    with pytest.raises(InputTooLarge, match="20000 bytes is over the 16384"):
        await arena.lease(20000, 1)
    arena.close()


async def test_a_block_is_free_when_the_last_holder_lets_go() -> None:
    arena = Arena(4 * GRAIN)
    lease = await arena.lease(10, 1)
    lease.hold()
    lease.release()
    assert arena.free == 3 * GRAIN
    lease.release()
    assert arena.free == 4 * GRAIN
    arena.close()

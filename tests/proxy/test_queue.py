"""Who is next, and whose time is over."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from gpusup.proxy.queue import Deadlines, Queue, rank


@dataclass(eq=False)
class Waiting:
    priority: int
    arrived: float
    waiting: bool = False


def drain(queue: Queue[Waiting], now: float = 0.0) -> list[Waiting]:
    found = []
    while (entry := queue.head(now)) is not None:
        queue.take(entry)
        found.append(entry)
    return found


def test_priority_first_then_arrival() -> None:
    queue: Queue[Waiting] = Queue(5.0)
    entries = [Waiting(2, 0), Waiting(1, 1), Waiting(2, 2), Waiting(1, 3)]
    for entry in entries:
        queue.push(entry)
    assert drain(queue, 4) == [entries[1], entries[3], entries[0], entries[2]]


def test_nobody_waits_longer_than_the_bound_for_the_sake_of_others() -> None:
    queue: Queue[Waiting] = Queue(5.0)
    old, older, urgent = Waiting(4, 1), Waiting(3, 0), Waiting(1, 9)
    for entry in (old, older, urgent):
        queue.push(entry)
    assert drain(queue, 9) == [older, old, urgent]


def test_what_comes_back_goes_to_the_front() -> None:
    queue: Queue[Waiting] = Queue(5.0)
    first, second, third = Waiting(2, 0), Waiting(2, 1), Waiting(2, 2)
    queue.push(second)
    queue.push(third)
    queue.push(first, front=True)
    assert drain(queue) == [first, second, third]


def test_who_was_removed_may_stand_in_another_queue() -> None:
    one: Queue[Waiting] = Queue(5.0)
    other: Queue[Waiting] = Queue(5.0)
    entries = first, second, third = [Waiting(2, n) for n in range(3)]
    for entry in entries:
        one.push(entry)
    one.remove(second)
    one.remove(second)
    other.push(second)
    assert list(one) == drain(one) == [first, third]
    assert drain(other) == [second]


def test_absent_priority_ranks_as_two_and_absurd_ones_last() -> None:
    assert [rank(p) for p in (0, 1, 2, 3, 2**31)] == [2, 1, 2, 3, 16]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_loses_and_doubles_nobody(seed: int) -> None:
    rng = random.Random(seed)
    queue: Queue[Waiting] = Queue(5.0)
    inside: set[Waiting] = set()
    now = 0.0
    for _ in range(5000):
        now += rng.random()
        match rng.randrange(4):
            case 0 | 1:
                entry = Waiting(rng.randrange(1, 5), now)
                queue.push(entry, front=rng.random() < 0.2)
                inside.add(entry)
            case 2 if inside:
                entry = rng.choice(list(inside))
                queue.discard(entry)
                inside.discard(entry)
            case _:
                head = queue.head(now)
                assert (head is None) == (not inside)
                if head is not None:
                    assert head in inside
                    queue.take(head)
                    inside.discard(head)
        assert len(queue) == len(inside)
        assert set(queue) == inside
    assert set(drain(queue, now)) == inside


def test_those_who_left_do_not_pile_up_behind_a_head_that_stays() -> None:
    queue: Queue[Waiting] = Queue(5.0)
    queue.push(Waiting(2, 0))
    for at in range(10_000):
        entry = Waiting(2, at)
        queue.push(entry)
        queue.discard(entry)
    assert len(queue._lines[2]) < 200


def test_deadlines_are_due_once_and_only_if_not_removed() -> None:
    deadlines: Deadlines[str] = Deadlines(0.01)
    assert deadlines.next_at() is None
    key = deadlines.add("a", 1.0)
    deadlines.add("b", 1.0)
    deadlines.add("c", 2.0)
    deadlines.remove("a", key)
    at = deadlines.next_at()
    assert at is not None
    assert 1.0 <= at <= 1.02
    assert deadlines.due(0.99) == []
    assert deadlines.due(1.02) == ["b"]
    assert deadlines.due(5.0) == ["c"]
    assert deadlines.next_at() is None

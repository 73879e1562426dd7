"""The batcher's promises: windows, keys, rows, order, starvation, the dead."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.worker.batcher import Batcher, Unit


@dataclass(eq=False)
class Thing:
    name: int = 0
    cancelled: bool = False


def unit(
    name: int = 0,
    *,
    key: str = "a",
    rows: int = 1,
    arrived: float = 0.0,
    deadline: float = math.inf,
    rank: int = 2,
) -> Unit:
    return Unit(Thing(name), key, rows, arrived, deadline, rank)


def names(units: list[Unit]) -> list[int]:
    return [each.what.name for each in units]  # type: ignore[attr-defined]


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(max_rows=8, wait=0.01, starvation=5.0)


def test_one_lone_request_never_waits(batcher: Batcher) -> None:
    batcher.add(unit(1))
    assert names(batcher.take(0.0, idle=True)) == [1]


def test_at_a_busy_device_the_window_ends_when_the_oldest_has_waited(batcher: Batcher) -> None:
    batcher.add(unit(1, arrived=0.0))
    batcher.add(unit(2, arrived=0.009))
    assert batcher.take(0.009, idle=False) == []
    assert batcher.next_window() == 0.01
    assert names(batcher.take(0.01, idle=False)) == [1, 2]


def test_a_full_batch_does_not_wait_for_the_window(batcher: Batcher) -> None:
    for name in range(9):
        batcher.add(unit(name))
    assert names(batcher.take(0.0, idle=False)) == list(range(8))
    assert batcher.take(0.0, idle=False) == []
    assert batcher.rows == 1


def test_an_idle_device_waits_for_what_is_being_decoded_but_not_beyond_the_window(
    batcher: Batcher,
) -> None:
    batcher.add(unit(1))
    assert batcher.take(0.001, idle=True, coming=1) == []
    assert names(batcher.take(0.01, idle=True, coming=1)) == [1]


def test_rows_are_counted_and_not_requests(batcher: Batcher) -> None:
    for name in range(4):
        batcher.add(unit(name, rows=5))
    assert [names(batcher.take(0.0, idle=True)) for _ in range(4)] == [[0], [1], [2], [3]]


def test_more_rows_than_a_batch_takes_are_refused_with_both_numbers(batcher: Batcher) -> None:
    with pytest.raises(ValueError, match=r"9 rows.* 1 to 8"):
        batcher.add(unit(rows=9))


def test_kinds_are_never_mixed(batcher: Batcher) -> None:
    for name in range(4):
        batcher.add(unit(name, key="ab"[name % 2]))
    assert names(batcher.take(0.0, idle=True)) == [0, 2]
    assert names(batcher.take(0.0, idle=True)) == [1, 3]


def test_the_highest_priority_and_then_the_earliest_deadline_go_first(batcher: Batcher) -> None:
    batcher.max_rows = 1
    batcher.add(unit(1, rank=2, deadline=9.0))
    batcher.add(unit(2, rank=2, deadline=3.0))
    batcher.add(unit(3, rank=1, deadline=10.0))
    batcher.add(unit(4, key="other", rank=2, deadline=2.0))
    order = [names(batcher.take(0.0, idle=True)) for _ in range(4)]
    assert order == [[3], [4], [2], [1]]


def test_a_low_priority_is_served_within_the_starvation_bound(batcher: Batcher) -> None:
    """Saturated with priority 1: two new ones come in while one is served."""
    batcher.max_rows = 1
    batcher.add(unit(0, rank=9, arrived=0.0))
    now, serial = 0.0, 1
    while now < 20.0:
        for _ in range(2):
            batcher.add(unit(serial, rank=1, arrived=now))
            serial += 1
        if names(batcher.take(now, idle=True)) == [0]:
            break
        now += 0.1
    assert now <= 5.0 + 0.1


def test_starvation_counts_across_kinds(batcher: Batcher) -> None:
    batcher.add(unit(1, key="rare", rank=9, arrived=0.0))
    for name in range(2, 30):
        batcher.add(unit(name, rank=1, arrived=4.9))
    assert 1 not in names(batcher.take(4.95, idle=True))
    assert names(batcher.take(5.0, idle=True)) == [1]


def test_what_expired_never_starts(batcher: Batcher) -> None:
    batcher.add(unit(1, deadline=1.0))
    batcher.add(unit(2, deadline=2.0))
    assert batcher.next_deadline() == 1.0
    assert names(batcher.take(1.0, idle=True)) == [2]
    assert names(batcher.met()) == [1]
    assert batcher.met() == []


def test_a_sweep_gives_out_the_expired_and_the_cancelled_and_keeps_the_rest(
    batcher: Batcher,
) -> None:
    gone, late, fine = unit(1), unit(2, deadline=1.0), unit(3, deadline=7.0)
    for each in (gone, late, fine):
        batcher.add(each)
    gone.what.cancelled = True
    assert names(batcher.sweep(1.0)) == [1, 2]
    assert batcher.rows == 1
    assert batcher.next_deadline() == 7.0
    assert names(batcher.take(1.0, idle=True)) == [3]
    assert batcher.rows == 0


def test_two_hundred_cancelled_requests_leave_nothing_behind(batcher: Batcher) -> None:
    units = [unit(name) for name in range(200)]
    for each in units:
        batcher.add(each)
        each.what.cancelled = True
    batcher.add(unit(999))
    assert names(batcher.take(0.0, idle=True)) == [999]
    assert len(batcher.met()) == 200
    assert batcher.rows == 0
    assert batcher.waiting() == []
    assert batcher.oldest() == math.inf


def test_small_ones_do_not_overtake_a_large_one_for_ever(batcher: Batcher) -> None:
    batcher.add(unit(0, rows=1))
    batcher.add(unit(1, rows=8))
    for name in range(2, 20):
        batcher.add(unit(name, rows=1))
    assert names(batcher.take(0.0, idle=True)) == [0]
    assert names(batcher.take(0.0, idle=True)) == [1]


def test_a_batch_keeps_within_what_the_memory_allows_for_its_kind() -> None:
    batcher = Batcher(
        max_rows=8, wait=0.0, starvation=5.0, limit=lambda key: 2 if key == "big" else 100
    )
    for name in range(6):
        batcher.add(unit(name, key="big"))
        batcher.add(unit(name + 10, key="small"))
    assert sorted(len(batcher.take(0.0, idle=True)) for _ in range(4)) == [2, 2, 2, 6]


def test_a_unit_too_large_for_the_limit_goes_alone_rather_than_never() -> None:
    batcher = Batcher(max_rows=8, wait=0.0, starvation=5.0, limit=lambda key: 2)
    batcher.add(unit(1, rows=4))
    assert names(batcher.take(0.0, idle=True)) == [1]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_walk(seed: int) -> None:
    """Whatever happens: each unit leaves exactly once, batches are of one kind and size, and
    nothing that is dead starts."""
    chance = random.Random(seed)
    batcher = Batcher(max_rows=8, wait=0.01, starvation=0.5)
    inside: set[int] = set()
    left: set[int] = set()
    things: dict[int, Unit] = {}
    now, serial = 0.0, 0
    for _ in range(200):
        now += chance.choice((0.0, 0.001, 0.02, 0.3))
        match chance.randrange(5):
            case 0 | 1:
                serial += 1
                each = unit(
                    serial,
                    key=chance.choice("abc"),
                    rows=chance.randint(1, 8),
                    arrived=now,
                    deadline=chance.choice((math.inf, now + 0.05, now + 1.0)),
                    rank=chance.choice((1, 2, 2, 3)),
                )
                things[serial] = each
                inside.add(serial)
                batcher.add(each)
            case 2:
                if inside:
                    things[chance.choice(sorted(inside))].what.cancelled = True
            case 3:
                dead = [
                    t
                    for n, t in things.items()
                    if n in inside and (t.what.cancelled or t.deadline <= now)
                ]
                batch = batcher.take(now, idle=chance.random() < 0.5, coming=chance.randrange(2))
                assert len({each.key for each in batch}) <= 1
                assert sum(each.rows for each in batch) <= 8
                assert not any(each.what.cancelled or each.deadline <= now for each in batch)
                starving = [t for t in things.values() if now - t.arrived >= 0.5 and not t.gone]
                if starving and not dead:
                    assert min(b.arrived for b in batch) <= min(s.arrived for s in starving)
                leave(names(batch), inside, left)
                leave(names(batcher.met()), inside, left)
            case _:
                leave(names(batcher.sweep(now)), inside, left)
                assert all(not t.what.cancelled for n, t in things.items() if n in inside)
        assert batcher.rows == sum(things[name].rows for name in inside)
    while batcher.rows:
        leave(names(batcher.take(now, idle=True)), inside, left)
        leave(names(batcher.met()), inside, left)
    assert inside == set()


def leave(gone: list[int], inside: set[int], left: set[int]) -> None:
    for name in gone:
        assert name in inside
        assert name not in left
        inside.discard(name)
        left.add(name)


def test_what_is_not_worth_it_now_stays_first_in_line(batcher: Batcher) -> None:
    units = [unit(n, arrived=0.0) for n in range(6)]
    for each in units:
        batcher.add(each)
    asked: list[tuple[object, int]] = []

    def portion(key: object, rows: int) -> int:
        asked.append((key, rows))
        return 4

    assert batcher.take(9.0, idle=True, portion=portion) == units[:4]
    assert asked == [(units[0].key, 6)]
    assert batcher.take(9.0, idle=True) == units[4:]
    assert batcher.rows == 0

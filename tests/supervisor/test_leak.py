from __future__ import annotations

import random

from gpusup.supervisor.leak import LeakWatch, fit

MIB = 2**20


def watched(curve: list[tuple[int, int]], limit: int = MIB) -> LeakWatch:
    watch = LeakWatch(limit)
    for second, (requests, allocated) in enumerate(curve):
        watch.note(requests, allocated, float(second))
    return watch


def test_steady_growth_is_an_alarm_with_its_evidence() -> None:
    watch = watched([(n, 500 * MIB + n * 5 * MIB // 1000) for n in range(0, 3000, 10)])
    leak = watch.leak()
    assert leak is not None
    assert 4.9 * MIB < leak.per_thousand < 5.1 * MIB
    assert "per thousand" in leak.text
    assert "limit is 1MiB" in leak.text


def test_noise_between_batches_is_no_leak() -> None:
    chance = random.Random(1)
    curve = [(n, 500 * MIB + chance.choice([0, 0, 1, 80]) * MIB) for n in range(0, 3000, 10)]
    assert watched(curve).leak() is None


def test_a_leak_is_seen_through_the_noise() -> None:
    chance = random.Random(2)
    curve = [
        (n, 500 * MIB + chance.choice([0, 0, 1, 80]) * MIB + n * 10 * MIB // 1000)
        for n in range(0, 3000, 10)
    ]
    assert watched(curve).leak() is not None


def test_a_cache_that_fills_and_then_rests_is_no_leak() -> None:
    curve = [(n, 500 * MIB + min(n, 800) * MIB // 10) for n in range(0, 3000, 10)]
    assert watched(curve).leak() is None


def test_growth_below_the_limit_is_no_alarm_but_has_a_slope() -> None:
    watch = watched([(n, n * MIB // 10_000) for n in range(0, 3000, 10)])
    assert watch.leak() is None
    slope = watch.per_thousand()
    assert slope is not None
    assert 0 < slope < MIB


def test_nothing_is_said_before_there_is_enough_to_say_it_from() -> None:
    watch = watched([(n, n * MIB) for n in range(0, 300, 10)])
    assert watch.slope() is None
    assert watch.leak() is None
    assert fit([(1, 1), (1, 2), (1, 3)]) is None


def test_a_quiet_night_proves_nothing() -> None:
    watch = LeakWatch(MIB)
    for minute in range(1000):
        watch.note(5, minute * MIB, 60.0 * minute)
    assert watch.slope() is None


def test_a_busy_first_minute_is_no_verdict_and_a_rise_of_load_is_no_leak() -> None:
    watch = LeakWatch(MIB)
    for quarter in range(200):  # 15,000 requests a second; the load rises for 10 s
        watch.note(quarter * 3750, 500 * MIB + min(quarter, 40) * 50 * MIB, quarter / 4)
        assert watch.leak() is None
    for quarter in range(200, 2000):
        watch.note(quarter * 3750, 2500 * MIB, quarter / 4)
    assert watch.leak() is None


def test_a_slow_leak_on_a_busy_box_is_seen_over_its_whole_life() -> None:
    watch = LeakWatch(10_000)
    for quarter in range(2000):
        watch.note(quarter * 3750, 500 * MIB + quarter * 3750 * 20, quarter / 4)
    assert watch.leak() is not None

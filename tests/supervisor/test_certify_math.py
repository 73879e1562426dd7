"""The arithmetic that a verdict hangs on."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from gpusup.supervisor.certify_math import (
    LOST,
    Sample,
    arrivals,
    growth,
    keeps,
    lows,
    over_time,
    percentile,
    ratio,
    summary,
    variation,
)


def samples(latencies: list[float], *, status: int = 200, apart: float = 0.01) -> list[Sample]:
    return [
        Sample(n * apart, n * apart, n * apart + latency, status)
        for n, latency in enumerate(latencies)
    ]


def test_arrivals_come_at_the_rate_and_at_random() -> None:
    moments = list(itertools.takewhile(lambda at: at < 100, arrivals(50, random.Random(1))))
    assert len(moments) == pytest.approx(5000, rel=0.06)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.1)  # as a Poisson process has it


def test_no_arrivals_at_no_rate() -> None:
    with pytest.raises(ValueError, match="above 0"):
        next(arrivals(0, random.Random(1)))


def test_percentiles_are_readings_not_averages() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.999) == 7
    assert math.isnan(percentile([], 0.5))


def test_latency_counts_from_when_it_was_due_not_when_it_was_sent() -> None:
    late = Sample(10.0, 12.0, 12.5, 200)
    assert late.latency == 2.5
    assert late.lag == 2.0


def test_a_lost_request_is_no_quick_one() -> None:
    found = summary([*samples([0.01] * 98), *samples([0.0] * 2, status=LOST)], 100)
    assert found.lost == 2
    assert found.p50 == pytest.approx(0.01)
    assert found.p99 == math.inf
    assert not found.clean


def test_refusals_and_failures_are_told_apart() -> None:
    mixed = [
        Sample(0, 0, 1, 200),
        Sample(0, 0, 1, 429, "QUEUE_FULL"),
        Sample(0, 0, 1, 500, "MODEL_FAILED"),
        Sample(0, 0, 1, LOST, "timeout"),
    ]
    found = summary(mixed, 4)
    assert (found.good, found.refused, found.failed, found.lost) == (1, 1, 1, 1)
    assert found.codes == {"429 QUEUE_FULL": 1, "500 MODEL_FAILED": 1, "0 timeout": 1}


def test_a_rate_is_not_kept_while_answers_come_ever_later() -> None:
    backlog = samples([0.01 + n * 0.005 for n in range(200)])  # the last one after a second
    found = summary(backlog, 100)
    assert found.growing
    assert not keeps(found, 0.99, 2.0, [s.latency for s in backlog])
    steady = samples([0.01] * 200)
    assert keeps(summary(steady, 100), 0.99, 2.0, [s.latency for s in steady])
    assert not keeps(summary(steady, 100), 0.99, 0.005, [s.latency for s in steady])


def test_a_change_within_the_noise_has_an_interval_that_says_so() -> None:
    rng = random.Random(3)
    calm = [0.1 + rng.random() * 0.05 for _ in range(8)]
    same = [0.1 + rng.random() * 0.05 for _ in range(8)]
    found = ratio(same, calm)
    assert found.low < 1 < found.high
    slower = ratio([value * 1.6 for value in calm], calm)
    assert slower.low > 1.15


def test_one_window_proves_no_change() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        ratio([1.0], [1.0, 1.1])


def test_only_the_lowest_reading_of_a_stretch_counts() -> None:
    saw = [(float(n), 100.0 + (n % 10) * 7) for n in range(600)]
    assert {value for _, value in lows(saw)} == {100.0}


def test_a_leak_is_significant_and_a_full_cache_is_not() -> None:
    leak = [(float(n), 1e8 + n * 64 * 1024) for n in range(1000)]
    assert growth(leak).exceeds(2**20)
    cache = [(float(n), 1e8 + min(n, 300) * 64 * 1024) for n in range(1000)]
    assert not growth(cache).exceeds(2**20)
    rng = random.Random(5)
    noise = [(float(n), 1e8 + rng.random() * 1e6) for n in range(1000)]
    assert not growth(noise).exceeds(2**20)


def test_too_few_readings_prove_nothing() -> None:
    grown = growth([(0.0, 1.0), (1.0, 2.0)])
    assert grown.whole is None
    assert not grown.exceeds(0.0)


def test_variation_is_of_the_largest() -> None:
    assert variation([100.0, 97.0, 98.0]) == pytest.approx(0.03)
    assert variation([]) == 0
    assert variation([0.0, 0.0]) == 0


def test_windows_over_time_leave_out_what_was_lost() -> None:
    found = over_time(
        [Sample(0.1, 0.1, 0.2, 200), Sample(0.2, 0.2, 0.2, LOST), Sample(1.1, 1.1, 1.4, 200)],
        1.0,
        0.0,
    )
    assert [round(row[0], 3) for row in found] == [0.5, 1.5]
    assert found[1][1] == pytest.approx(0.3)

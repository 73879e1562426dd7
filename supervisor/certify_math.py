"""The arithmetic of `gpusup certify`: arrivals, percentiles, intervals. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .leak import Slope, fit

#: Outcome of a request that was never answered, in place of an HTTP status.
LOST = 0
#: The generator had too many requests open and did not send this one: no answer either.
UNSENT = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Seconds by time.monotonic; latency counts from `due`, not from `sent`."""

    due: float
    sent: float
    ended: float
    status: int
    code: str = ""  # of an error, as the server named it
    version: str = ""

    @property
    def latency(self) -> float:
        return self.ended - self.due if self.status > 0 else math.inf

    @property
    def lag(self) -> float:
        """By how much the generator itself was late."""
        return max(0.0, self.sent - self.due)

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Moments after the start of a Poisson process. They never wait for an answer: users don't.

    Raises ValueError for a rate that is not above 0.
    """
    if rate <= 0:
        raise ValueError(f"the rate is {rate:g}, it must be above 0")
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def percentile(values: Sequence[float], share: float) -> float:
    """By the nearest rank, of sorted or unsorted values; NaN of none. `share`: 0.99 for p99."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of one stretch of load. Seconds; a percentile is infinite where its rank was lost."""

    offered: float  # requests a second
    requests: int
    good: int
    refused: int  # 429 and 503: the server said that and why
    failed: int  # any other status
    lost: int  # no answer at all
    p50: float
    p95: float
    p99: float
    worst: float
    lag_p99: float
    growing: bool
    codes: dict[str, int]

    @property
    def clean(self) -> bool:
        return self.requests > 0 and self.good == self.requests


def summary(samples: Sequence[Sample], offered: float) -> Summary:
    latencies = sorted(s.latency for s in samples)
    codes: dict[str, int] = {}
    for sample in samples:
        if not sample.good:
            key = f"{sample.status} {sample.code}".strip()
            codes[key] = codes.get(key, 0) + 1
    refused = sum(1 for s in samples if s.status in (429, 503))
    good = sum(1 for s in samples if s.good)
    lost = sum(1 for s in samples if s.status <= 0)
    return Summary(
        offered=offered,
        requests=len(samples),
        good=good,
        refused=refused,
        failed=len(samples) - good - refused - lost,
        lost=lost,
        p50=percentile(latencies, 0.5),
        p95=percentile(latencies, 0.95),
        p99=percentile(latencies, 0.99),
        worst=latencies[-1] if latencies else math.nan,
        lag_p99=percentile([s.lag for s in samples], 0.99),
        growing=is_growing(samples),
        codes=codes,
    )


def is_growing(samples: Sequence[Sample]) -> bool:
    """Whether answers came ever later: then the rate is not kept, however short the test was.

    The median of the last quarter against that of the first; small differences are noise.
    """
    ordered = sorted(samples, key=lambda s: s.due)
    if len(ordered) < 20:
        return False
    quarter = len(ordered) // 4
    first = median([s.latency for s in ordered[:quarter]])
    last = median([s.latency for s in ordered[-quarter:]])
    return last > 2 * first + 0.05


def keeps(found: Summary, share: float, limit_s: float, latencies: Sequence[float]) -> bool:
    """Whether a stretch kept the SLA: all answered well, in time, and no backlog growing."""
    return found.clean and not found.growing and percentile(latencies, share) <= limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of two medians; `low`..`high` holds it with 95 % confidence."""

    value: float
    low: float
    high: float


def ratio(after: Sequence[float], before: Sequence[float], seed: int = 1) -> Ratio:
    """median(after) / median(before), with a bootstrap interval.

    Give one figure for each of several windows, taken in turns: single requests of one window are
    no independent observations, so an interval from them would be far too narrow.
    Raises ValueError for fewer than two on either side.
    """
    if len(after) < 2 or len(before) < 2:
        raise ValueError(f"{len(after)} and {len(before)} windows, at least 2 and 2 are wanted")
    rng = random.Random(seed)
    drawn = sorted(
        _middle(rng.choices(after, k=len(after)))
        / max(_middle(rng.choices(before, k=len(before))), 1e-9)
        for _ in range(2000)
    )
    return Ratio(
        value=_middle(after) / max(_middle(before), 1e-9),
        low=drawn[int(0.025 * len(drawn))],
        high=drawn[int(0.975 * len(drawn))],
    )


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def lows(points: Sequence[tuple[float, float]], stretches: int = 30) -> list[tuple[float, float]]:
    """The lowest reading of each stretch: the one nearest to rest. `points`: (requests, value)."""
    if len(points) <= stretches:
        return list(points)
    size = len(points) / stretches
    parts = [points[int(n * size) : int((n + 1) * size)] for n in range(stretches)]
    return [min(part, key=lambda point: point[1]) for part in parts if part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Per thousand requests, after the first quarter (caches fill then). None: too few readings."""

    whole: Slope | None
    later: Slope | None

    def exceeds(self, limit: float) -> bool:
        """Significantly above: over the whole, and still over the later half."""
        slopes = (self.whole, self.later)
        return all(s is not None and s.low > limit for s in slopes)


def growth(points: Sequence[tuple[float, float]]) -> Growth:
    settled = list(points)[len(points) // 4 :]
    thin = lows([(x / 1000, y) for x, y in settled])
    return Growth(whole=fit(thin), later=fit(thin[len(thin) // 2 :]))


def variation(values: Sequence[float]) -> float:
    """(largest - smallest) / largest; 0 of none."""
    top = max(values, default=0.0)
    return (top - min(values)) / top if top > 0 else 0.0


def over_time(
    samples: Sequence[Sample], width_s: float, start: float
) -> list[tuple[float, float, float, float]]:
    """(middle of the window after `start`, p50, p95, p99) of answered requests, by due time."""
    windows: dict[int, list[float]] = {}
    for sample in samples:
        if sample.status > 0:
            windows.setdefault(int((sample.due - start) / width_s), []).append(sample.latency)
    return [
        ((number + 0.5) * width_s, *(percentile(found, p) for p in (0.5, 0.95, 0.99)))  # type: ignore[misc]
        for number, found in sorted(windows.items())
    ]

"""Does a worker's resting memory grow with the requests it serves? Pure.

Allocated bytes are noted with the number of requests served so far; of every stretch of requests
only the lowest reading counts, since that is the one nearest to rest. A line through those lows
has a slope with an uncertainty. It is a leak only where even the careful reading of the slope is
above the limit, over the whole window and over its later half too: memory that a cache takes
while it fills, or a step at the first big request, is no leak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpusup.conf.units import format_size

#: Student's t for a two-sided 95 % interval, by degrees of freedom; beyond the table 2.0 will do.
_T95: Final = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Bytes per request; `low`..`high` holds it with 95 % confidence."""

    value: float
    low: float
    high: float
    points: int


def fit(points: Sequence[tuple[float, float]]) -> Slope | None:
    """Least squares through (requests, bytes). None with fewer than 3 points or no spread."""
    n = len(points)
    if n < 3:
        return None
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 0:
        return None
    value = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in points)
    freedom = n - 2
    t = _T95[freedom] if freedom < len(_T95) else 2.0
    margin = t * math.sqrt(rest / freedom / spread)
    return Slope(value=value, low=value - margin, high=value + margin, points=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """The evidence. `per_thousand`: bytes per thousand requests, the best estimate."""

    per_thousand: float
    text: str


class LeakWatch:
    """One worker, from its start. Counted in requests: a quiet night proves nothing either way.

    When the points are full, neighbours are merged and stretches become twice as long, so that the
    whole life is always covered and a busy minute can't stand for it.
    """

    def __init__(
        self, slope_limit: int, *, stretch: int = 50, window: int = 40, least_s: float = 60.0
    ) -> None:
        """`slope_limit`: bytes per thousand requests. `stretch`: requests to one point at first.
        `least_s`: no verdict on less than this (graphs are captured, caches filled)."""
        self.slope_limit = slope_limit
        self.stretch = stretch
        self._window = window
        self._least_s = least_s
        self._lows: list[tuple[float, float]] = []
        self._bin = -1
        self._low = (0.0, math.inf)
        self._began: float | None = None
        self._now = 0.0

    def note(self, requests: int, allocated: int, now: float) -> None:
        """`requests`: served since the worker's start. `allocated`: bytes now. Best at rest, but
        under load too: the lowest reading of a stretch is what counts."""
        if self._began is None:
            self._began = now
        self._now = now
        position = requests // self.stretch
        if position != self._bin:
            if self._bin >= 0 and self._low[1] < math.inf:
                self._lows.append(self._low)
                if len(self._lows) >= self._window:
                    self._merge()
                    position = requests // self.stretch
            self._bin = position
            self._low = (float(requests), float(allocated))
        elif allocated < self._low[1]:
            self._low = (float(requests), float(allocated))

    def _merge(self) -> None:
        pairs = zip(self._lows[::2], self._lows[1::2], strict=False)
        self._lows = [min(pair, key=lambda point: point[1]) for pair in pairs]
        self.stretch *= 2

    def slope(self) -> Slope | None:
        """Bytes per request; None until there are enough points."""
        return fit(self._lows) if len(self._lows) >= 8 else None

    def per_thousand(self) -> float | None:
        slope = self.slope()
        return None if slope is None else slope.value * 1000

    def leak(self) -> Leak | None:
        """The alarm, or None."""
        if self._began is None or self._now - self._began < self._least_s:
            return None
        whole = self.slope()
        later = fit(list(self._lows)[len(self._lows) // 2 :])
        if whole is None or later is None:
            return None
        low = min(whole.low, later.low) * 1000
        if low <= self.slope_limit:
            return None
        first, last = self._lows[0], self._lows[-1]
        requests, grown = int(last[0] - first[0]), int(last[1] - first[1])
        per_thousand = whole.value * 1000
        return Leak(
            per_thousand=per_thousand,
            text=(
                f"resting memory grew by {format_size(grown)} over {requests} requests: "
                f"{format_size(round(per_thousand))} per thousand (at least "
                f"{format_size(round(low))}), the limit is {format_size(self.slope_limit)}"
            ),
        )

"""What this proxy counts between two reports to the supervisor, which adds them up."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from gpusup.conf.metrics import METRICS
from gpusup.supervisor.wire import Observed, Sample

Labels = tuple[str, ...]

#: Newest answers of a model from which its percentiles are taken, and how old they may be.
_KEPT = 2048
_KEPT_S = 60.0


class Counts:
    """`add` and `observe` only remember; buckets are counted ten times a second, many at once."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], float] = {}
        self._values: dict[tuple[str, Labels], list[float]] = {}
        self._recent: dict[str, deque[tuple[float, float]]] = {}

    def add(self, name: str, labels: Labels = (), value: float = 1.0) -> None:
        key = (name, labels)
        self._counters[key] = self._counters.get(key, 0.0) + value

    def observe(self, name: str, labels: Labels, value: float) -> None:
        key = (name, labels)
        values = self._values.get(key)
        if values is None:
            self._values[key] = [value]
        else:
            values.append(value)

    def answered(self, model: str, now: float, seconds: float) -> None:
        """For the percentiles of the last minute, by the newest few thousand answers."""
        recent = self._recent.get(model)
        if recent is None:
            recent = self._recent[model] = deque(maxlen=_KEPT)
        recent.append((now, seconds))

    def changed(self) -> bool:
        return bool(self._counters or self._values)

    def drain(self) -> tuple[list[Sample], list[Observed]]:
        counters = [Sample(name, labels, value) for (name, labels), value in self._counters.items()]
        self._counters.clear()
        histograms = []
        for (name, labels), values in self._values.items():
            values.sort()
            counts = []
            below = 0
            for edge in METRICS[name].buckets:
                upto = bisect_right(values, edge)
                counts.append(upto - below)
                below = upto
            counts.append(len(values) - below)
            histograms.append(Observed(name, labels, tuple(counts), sum(values)))
        self._values.clear()
        return counters, histograms

    def latency(self, now: float) -> dict[str, tuple[float, float]]:
        """Model -> (p50, p99), seconds."""
        found = {}
        for model, recent in self._recent.items():
            while recent and recent[0][0] < now - _KEPT_S:
                recent.popleft()
            if recent:
                values = sorted(seconds for _, seconds in recent)
                found[model] = (
                    values[len(values) // 2],
                    values[min(len(values) - 1, int(len(values) * 0.99))],
                )
        return found

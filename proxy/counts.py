"""What this proxy counts between two reports to the supervisor, which adds them up."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from gpusup.conf.metrics import METRICS
from gpusup.supervisor.wire import ModelStats, Observed, Sample
from gpusup.worker.wire import Answer

Labels = tuple[str, ...]
_Done = tuple[int, float, float, Answer]

#: Newest answers of a model from which its percentiles are taken, and how old they may be.
_KEPT = 2048
_KEPT_S = 60.0


class Counts:
    """`add`, `observe` and `done` only remember; all is worked out at a report, many at once."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], float] = {}
        self._values: dict[tuple[str, Labels], list[float]] = {}
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._done: dict[tuple[str, str], list[_Done]] = {}
        self._failed: dict[tuple[str, str], tuple[int, float]] = {}

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

    def done(
        self, model: str, version: str, rows: int, queue_s: float, total_s: float, answer: Answer
    ) -> None:
        """One answered request. Seconds: in this proxy's queue, and in the server in all."""
        done = self._done.get((model, version))
        if done is None:
            done = self._done[model, version] = []
        done.append((rows, queue_s, total_s, answer))

    def failed(self, model: str, version: str, code: str, seconds: float) -> None:
        self.add("gpusup_requests_total", (model, code))
        count, total = self._failed.get((model, version), (0, 0.0))
        self._failed[model, version] = (count + 1, total + seconds)

    def changed(self) -> bool:
        return bool(self._counters or self._values or self._done)

    def drain(
        self, now: float, wall: float
    ) -> tuple[list[Sample], list[Observed], list[ModelStats]]:
        """All since the last time. `now` is monotonic, `wall` seconds since the epoch."""
        stats = [
            self._sum_up(model, version, done, now, wall)
            for (model, version), done in self._done.items()
        ]
        self._done.clear()
        for (model, version), (count, seconds) in self._failed.items():
            stats.append(ModelStats(model, version, fail=count, fail_s=seconds))
        self._failed.clear()
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
        return counters, histograms, stats

    def _sum_up(
        self, model: str, version: str, done: list[_Done], now: float, wall: float
    ) -> ModelStats:
        rows = sum(d[0] for d in done)
        answers = [d[3] for d in done]
        labels = (model,)
        totals = [d[2] for d in done]
        for name, values in (
            ("gpusup_request_seconds", totals),
            ("gpusup_queue_seconds", [d[1] for d in done]),
            ("gpusup_batch_wait_seconds", [a.queue_s for a in answers]),
            ("gpusup_compute_seconds", [a.compute_s for a in answers]),
            ("gpusup_batch_rows", [float(a.batch_rows) for a in answers]),
        ):
            self._values.setdefault((name, labels), []).extend(values)
        self.add("gpusup_requests_total", (model, "ok"), len(done))
        self.add("gpusup_rows_total", (model, version), rows)
        recent = self._recent.setdefault(model, deque(maxlen=_KEPT))
        recent.extend((now, seconds) for seconds in totals)
        batches: dict[int, tuple[float, float]] = {}
        for mine, _, _, answer in done:
            size = max(answer.batch_rows, mine)
            share, seconds = batches.get(size, (0.0, 0.0))
            part = mine / size
            batches[size] = (share + part, seconds + answer.compute_s * part)
        return ModelStats(
            model,
            version,
            success=len(done),
            success_s=sum(totals),
            rows=rows,
            queue_s=sum(d[1] for d in done) + sum(a.queue_s for a in answers),
            decode_s=sum(a.decode_s for a in answers),
            compute_s=sum(a.compute_s for a in answers),
            encode_s=sum(a.encode_s for a in answers),
            last=wall,
            batches=batches,
        )

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

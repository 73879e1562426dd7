"""Adds up what proxies and workers count, so that a total never falls when one of them dies. Pure.

A proxy reports increments. A worker reports totals since its start: what is new is the difference,
and a new generation starts from zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gpusup.conf.metrics import METRICS
from gpusup.worker.wire import Counters

from .wire import ModelStats, Observed, ProxyReport, Sample

Labels = tuple[str, ...]

#: Of one metric. Labels are bounded by the configuration; this is for the day when they are not.
MOST_SERIES: Final = 5000
#: Of one model, for counters by version: the latest used. What went before is summed up as one,
#: since a model that is swapped every day would otherwise add a series every day.
VERSIONS_KEPT: Final = 8
OLDER: Final = "older"


@dataclass(slots=True)
class Histogram:
    """`counts` per bucket, not cumulative, +Inf last."""

    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True)
class _Duration:
    count: int = 0
    seconds: float = 0.0

    def shown(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


@dataclass(slots=True)
class _Stats:
    """One model version, in the words of the v2 statistics extension."""

    rows: int = 0
    last: float = 0.0
    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    decode: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    encode: _Duration = field(default_factory=_Duration)
    batches: dict[int, list[float]] = field(default_factory=dict)

    def add(self, more: ModelStats) -> None:
        self.rows += more.rows
        self.last = max(self.last, more.last)
        for duration, count, seconds in (
            (self.success, more.success, more.success_s),
            (self.fail, more.fail, more.fail_s),
            (self.queue, more.success, more.queue_s),
            (self.decode, more.success, more.decode_s),
            (self.compute, more.success, more.compute_s),
            (self.encode, more.success, more.encode_s),
        ):
            duration.count += count
            duration.seconds += seconds
        for rows, (share, seconds) in more.batches.items():
            entry = self.batches.setdefault(rows, [0.0, 0.0])
            entry[0] += share
            entry[1] += seconds


class Tally:
    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self.reports: dict[str, ProxyReport] = {}  # the latest of each living proxy
        self._stats: dict[tuple[str, str], _Stats] = {}
        self._workers: dict[str, tuple[int, Counters]] = {}
        self._executed: dict[tuple[str, str], int] = {}

    # -- what comes in ----------------------------------------------------------------------------

    def count(self, name: str, labels: Labels = (), by: float = 1.0) -> None:
        """One of the supervisor's own events. An unknown name or a wrong number of labels is
        dropped: a metric is no reason to fail."""
        metric = METRICS.get(name)
        if metric is None or metric.kind != "counter" or len(labels) != len(metric.labels):
            return
        if not 0 <= by < float("inf"):
            return
        series = self.counters.setdefault(name, {})
        if "version" in metric.labels:
            _fold(series, labels)
        if labels in series or len(series) < MOST_SERIES:
            series[labels] = series.get(labels, 0.0) + by

    def observe(self, name: str, labels: Labels, counts: tuple[int, ...], total: float) -> None:
        metric = METRICS.get(name)
        if (
            metric is None
            or metric.kind != "histogram"
            or len(labels) != len(metric.labels)
            or len(counts) != len(metric.buckets) + 1
        ):
            return
        series = self.histograms.setdefault(name, {})
        if labels not in series:
            if len(series) >= MOST_SERIES:
                return
            series[labels] = Histogram([0] * len(counts))
        histogram = series[labels]
        histogram.counts = [a + b for a, b in zip(histogram.counts, counts, strict=True)]
        histogram.sum += total

    def proxy_said(self, proxy: str, report: ProxyReport) -> None:
        for sample in report.counters:
            self._sample(sample)
        for observed in report.histograms:
            self._observed(observed)
        for stats in report.stats:
            key = (stats.model, stats.version)
            self._stats[key] = mine = self._stats.pop(key, None) or _Stats()
            mine.add(stats)
            _forget(self._stats, stats.model)
        self.reports[proxy] = report

    def _sample(self, sample: Sample) -> None:
        self.count(sample.name, tuple(sample.labels), sample.value)

    def _observed(self, observed: Observed) -> None:
        self.observe(observed.name, tuple(observed.labels), tuple(observed.counts), observed.sum)

    def proxy_gone(self, proxy: str) -> None:
        """Its gauges end; what it counted stays."""
        self.reports.pop(proxy, None)

    def worker_said(
        self, slot: str, generation: int, model: str, version: str, now: Counters
    ) -> None:
        known, before = self._workers.get(slot, (-1, Counters()))
        if generation < known:
            return
        if generation > known:
            before = Counters()
        self._workers[slot] = (generation, now)
        self.count("gpusup_worker_ooms_total", (slot,), max(0, now.ooms - before.ooms))
        busy = max(0.0, now.busy_s - before.busy_s)
        self.count("gpusup_worker_busy_seconds_total", (slot,), busy)
        executed = max(0, now.batches - before.batches)
        key = (model, version)
        self._executed[key] = self._executed.pop(key, 0) + executed
        _forget(self._executed, model)

    # -- what goes out ----------------------------------------------------------------------------

    def value(self, name: str, labels: Labels = ()) -> float:
        return self.counters.get(name, {}).get(labels, 0.0)

    # -- an upgrade in place ----------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        return {
            "counters": {n: [[list(k), v] for k, v in s.items()] for n, s in self.counters.items()},
            "histograms": {
                n: [[list(k), h.counts, h.sum] for k, h in s.items()]
                for n, s in self.histograms.items()
            },
            "reports": msgspec.to_builtins(self.reports),
            "stats": [[*key, msgspec.to_builtins(stats)] for key, stats in self._stats.items()],
            "workers": msgspec.to_builtins(self._workers),
            "executed": [[*key, count] for key, count in self._executed.items()],
        }

    def restore(self, exported: Mapping[str, Any]) -> None:
        for name, rows in exported["counters"].items():
            self.counters[name] = {tuple(labels): value for labels, value in rows}
        for name, rows in exported["histograms"].items():
            self.histograms[name] = {
                tuple(k): Histogram(counts, total) for k, counts, total in rows
            }
        self.reports = msgspec.convert(exported["reports"], dict[str, ProxyReport])
        for model, version, stats in exported["stats"]:
            self._stats[model, version] = msgspec.convert(stats, _Stats)
        self._workers = msgspec.convert(exported["workers"], dict[str, tuple[int, Counters]])
        for model, version, count in exported["executed"]:
            self._executed[model, version] = count

    def _from_metrics(self, model: str, version: str) -> _Stats:
        """What the metrics know of a version whose proxies report no statistics of their own.

        They time by model, so the times are given to the version in proportion to its rows.
        """
        rows = self.counters.get("gpusup_rows_total", {})
        mine = rows.get((model, version), 0.0)
        every = sum(n for labels, n in rows.items() if labels[0] == model)
        stats = _Stats(rows=round(mine))
        if not every:
            return stats
        share = mine / every
        for duration, name in (
            (stats.success, "gpusup_request_seconds"),
            (stats.queue, "gpusup_queue_seconds"),
            (stats.compute, "gpusup_compute_seconds"),
        ):
            histogram = self.histograms.get(name, {}).get((model,))
            if histogram is not None:
                duration.count = round(sum(histogram.counts) * share)
                duration.seconds = histogram.sum * share
        stats.decode.count = stats.encode.count = stats.success.count
        outcomes = self.counters.get("gpusup_requests_total", {})
        failed = sum(n for (m, code), n in outcomes.items() if m == model and code != "ok")
        stats.fail.count = round(failed * share)
        return stats

    def v2_stats(
        self, model: str, version: str, memory: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """One entry of `model_stats` in the v2 statistics, complete also where nothing ran yet.

        `memory`: device name -> bytes that the model's workers hold there.
        """
        stats = self._stats.get((model, version)) or self._from_metrics(model, version)
        nothing = {"count": 0, "ns": 0}
        return {
            "name": model,
            "version": version,
            "last_inference": round(stats.last * 1000),
            "inference_count": stats.rows,
            "execution_count": self._executed.get((model, version), 0),
            "inference_stats": {
                "success": stats.success.shown(),
                "fail": stats.fail.shown(),
                "queue": stats.queue.shown(),
                "compute_input": stats.decode.shown(),
                "compute_infer": stats.compute.shown(),
                "compute_output": stats.encode.shown(),
                "cache_hit": dict(nothing),
                "cache_miss": dict(nothing),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": {"count": round(share), "ns": 0},
                    "compute_infer": {"count": round(share), "ns": round(seconds * 1e9)},
                    "compute_output": {"count": round(share), "ns": 0},
                }
                for rows, (share, seconds) in sorted(stats.batches.items())
            ],
            "memory_usage": [
                {"type": "CPU" if device.startswith("cpu") else "GPU", "id": _number(device),
                 "byte_size": size}
                for device, size in sorted((memory or {}).items())
            ],
        }  # fmt: skip


def _fold(series: dict[Labels, float], labels: Labels) -> None:
    """Make `labels` (model, version) the latest used; sum up versions beyond those kept."""
    if labels in series:
        series[labels] = series.pop(labels)
        return
    mine = [key for key in series if key[0] == labels[0] and key[1] != OLDER]
    for key in mine[: max(0, len(mine) - VERSIONS_KEPT + 1)]:
        older = (labels[0], OLDER)
        series[older] = series.get(older, 0.0) + series.pop(key)


def _forget(table: dict[tuple[str, str], Any], model: str) -> None:
    mine = [key for key in table if key[0] == model]
    for key in mine[: max(0, len(mine) - VERSIONS_KEPT)]:
        del table[key]


def _number(device: str) -> int:
    digits = "".join(c for c in device.split("-")[0] if c.isdigit())
    return int(digits) if digits else 0

"""Everything that conf/metrics.py lists, as Prometheus text.

Counters and histograms come from the tally; gauges from what is the case now (`Facts`), so that a
series ends with the thing it speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gpusup.conf.metrics import METRICS, Metric
from gpusup.worker.wire import Memory

from .backoff import Cause
from .probe_wire import DeviceSample
from .tally import Labels, Tally
from .watermark import worst_band
from .wire import Band, DeviceInfo

_BANDS: tuple[Band, ...] = ("normal", "queue", "shed", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is the case at the moment of the scrape.

    `workers`: slot -> its last word on memory. `worker_device`: slot -> device. `ready`: (model,
    version) -> workers that serve. `slots`: slot -> state. `standbys`: slot -> whether one is
    ready. `leak_slopes`: slot -> bytes per thousand requests. `limits`:
    where a band begins, share of the device. `build`: version of gpusup, of Python, of torch.
    """

    devices: Sequence[DeviceInfo] = ()
    samples: Mapping[str, DeviceSample] = field(default_factory=dict)
    workers: Mapping[str, Memory] = field(default_factory=dict)
    worker_device: Mapping[str, str] = field(default_factory=dict)
    ready: Mapping[tuple[str, str], int] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    standbys: Mapping[str, bool] = field(default_factory=dict)
    leak_slopes: Mapping[str, float] = field(default_factory=dict)
    models: Sequence[str] = ()
    limits: Mapping[Band, float] = field(default_factory=dict)
    build: tuple[str, str, str] = ("", "", "")


def render(tally: Tally, facts: Facts) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(tally, facts))
    return generate_latest(registry).decode()


class _Snapshot(Collector):
    def __init__(self, tally: Tally, facts: Facts) -> None:
        self._tally = tally
        self._gauges = dict(gauges(tally, facts))
        self._zeros = dict(zeros(facts))

    def collect(self) -> Iterator[Any]:
        for metric in METRICS.values():
            match metric.kind:
                case "counter":
                    yield self._counter(metric)
                case "histogram":
                    yield self._histogram(metric)
                case "gauge":
                    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                    for labels, value in self._gauges.get(metric.name, {}).items():
                        family.add_metric(labels, value)
                    yield family

    def _counter(self, metric: Metric) -> CounterMetricFamily:
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        # What can be named beforehand is there from the start: the first hang must be a rise
        # from 0 to 1, since nobody's rate() sees a series that begins at 1.
        series = {**self._zeros.get(metric.name, {}), **self._tally.counters.get(metric.name, {})}
        for labels, value in series.items():
            family.add_metric(labels, value)
        return family

    def _histogram(self, metric: Metric) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        edges = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, histogram in self._tally.histograms.get(metric.name, {}).items():
            upto = 0
            buckets: list[tuple[str, float]] = []
            for edge, count in zip(edges, histogram.counts, strict=True):
                upto += count
                buckets.append((edge, float(upto)))
            family.add_metric(labels, buckets, histogram.sum)
        return family


def gauges(tally: Tally, facts: Facts) -> Iterator[tuple[str, dict[Labels, float]]]:
    """Metric name -> labels -> value. What can't be told has no series; it is never 0 instead."""
    reports = tally.reports
    queued: dict[Labels, float] = {(model,): 0.0 for model in facts.models}
    in_flight: dict[Labels, float] = {(slot,): 0.0 for slot in facts.slots}
    leased: dict[Labels, float] = {(device.name,): 0.0 for device in facts.devices}
    for report in reports.values():
        _add(queued, report.queued)
        _add(in_flight, report.in_flight)
        _add(leased, report.leased)
    yield "gpusup_queued_requests", queued
    yield "gpusup_in_flight_requests", in_flight
    yield "gpusup_leased_bytes", leased
    yield "gpusup_connections", {(n,): float(r.connections) for n, r in reports.items()}
    yield "gpusup_arena_free_bytes", {(n,): float(r.arena_free) for n, r in reports.items()}

    bands: dict[Labels, float] = {}
    for device in facts.devices:
        now = worst_band(device.name, reports.values()) if device.known else "unknown"
        bands |= {(device.name, band): float(band == now) for band in _BANDS}
    yield "gpusup_device_band", bands
    yield "gpusup_device_memory_bytes", dict(_device_memory(facts))
    yield (
        "gpusup_device_watermark_ratio",
        {(d.name,): d.watermark for d in facts.devices if d.known},
    )
    yield "gpusup_watermark_limit_ratio", {(band,): at for band, at in facts.limits.items()}
    yield "gpusup_device_unknown", {(d.name,): float(not d.known) for d in facts.devices}
    samples = facts.samples.values()
    yield (
        "gpusup_device_utilization_ratio",
        {(s.name,): s.utilisation for s in samples if s.utilisation is not None},
    )
    yield (
        "gpusup_device_temperature_celsius",
        {(s.name,): s.temperature for s in samples if s.temperature is not None},
    )
    yield (
        "gpusup_device_power_watts",
        {(s.name,): s.power for s in samples if s.power is not None},
    )

    yield "gpusup_slot_state", {(slot, state): 1.0 for slot, state in facts.slots.items()}
    yield "gpusup_slot_standby", {(slot,): float(up) for slot, up in facts.standbys.items()}
    kinds = ("allocated", "reserved", "peak", "static")
    yield (
        "gpusup_worker_memory_bytes",
        {
            (slot, kind): float(getattr(memory, kind))
            for slot, memory in facts.workers.items()
            for kind in kinds
        },
    )
    yield "gpusup_leak_slope_bytes", {(s,): v for s, v in facts.leak_slopes.items()}
    yield "gpusup_model_ready_workers", {key: float(n) for key, n in facts.ready.items()}
    yield "gpusup_build_info", {facts.build: 1.0}


def zeros(facts: Facts) -> Iterator[tuple[str, dict[Labels, float]]]:
    """Counters whose labels are known before anything has happened."""
    devices = [device.name for device in facts.devices]
    yield "gpusup_probe_restarts_total", {(): 0.0}
    yield "gpusup_proxy_restarts_total", {(): 0.0}
    for name in ("starts", "hangs", "ooms", "busy_seconds"):
        yield f"gpusup_worker_{name}_total", {(slot,): 0.0 for slot in facts.slots}
    yield (
        "gpusup_worker_exits_total",
        {(slot, cause): 0.0 for slot in facts.slots for cause in Cause},
    )
    yield (
        "gpusup_swaps_total",
        {(model, end): 0.0 for model in facts.models for end in ("done", "failed", "rolled-back")},
    )
    yield "gpusup_requests_total", {(model, "ok"): 0.0 for model in facts.models}
    yield "gpusup_shed_total", {(m, device): 0.0 for m in facts.models for device in devices}


def _add(series: dict[Labels, float], more: Mapping[str, int]) -> None:
    for name, value in more.items():
        series[name,] = series.get((name,), 0.0) + value


def _device_memory(facts: Facts) -> Iterator[tuple[Labels, float]]:
    for device in facts.devices:
        if device.source == "none":
            continue
        here = [m for s, m in facts.workers.items() if facts.worker_device.get(s) == device.name]
        yield (device.name, "total"), float(device.total)
        yield (device.name, "free"), float(device.free)
        yield (device.name, "allocated"), float(sum(memory.allocated for memory in here))
        yield (device.name, "reserved"), float(sum(memory.reserved for memory in here))
        yield (device.name, "foreign"), float(device.foreign)

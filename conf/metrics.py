"""Every metric there is: name, kind, labels, help, buckets. Pure data; all parts count by it.

Labels hold only what the configuration bounds (models, slots, devices, causes, route templates,
status codes), never what a client sent. Names follow Prometheus' practice: base units, `_total`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


#: OpenTelemetry's advice for http.server.request.duration, plus two finer ones for GPUs.
SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
ROWS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

METRICS: Final = {
    m.name: m
    for m in (
        Metric("http_server_request_duration_seconds", "histogram",
               ("http_route", "http_request_method", "http_response_status_code"),
               "Time from the request's head to the end of its answer.", SECONDS),
        Metric("gpusup_requests_total", "counter", ("model", "code"), "Answered requests by outcome."),
        Metric("gpusup_request_seconds", "histogram", ("model",), "Whole time in the server.", SECONDS),
        Metric("gpusup_queue_seconds", "histogram", ("model",), "Time in the proxy's queue.", SECONDS),
        Metric("gpusup_batch_wait_seconds", "histogram", ("model",), "Time in the worker before its batch.", SECONDS),
        Metric("gpusup_compute_seconds", "histogram", ("model",), "Time of its batch on the device.", SECONDS),
        Metric("gpusup_batch_rows", "histogram", ("model",), "Rows of the batch a request was in.", ROWS),
        Metric("gpusup_rows_total", "counter", ("model", "version"), "Rows computed."),
        Metric("gpusup_degraded_total", "counter", ("model", "step"), "Requests served degraded."),
        Metric("gpusup_shed_total", "counter", ("model", "device"), "Requests refused in the shed band."),
        Metric("gpusup_client_disconnects_total", "counter", ("model", "when"), "Clients gone before their answer."),
        Metric("gpusup_retries_total", "counter", ("model", "why"), "Requests sent to a second worker."),
        Metric("gpusup_refused_total", "counter", ("why",), "Requests refused before any model saw them."),
        Metric("gpusup_queued_requests", "gauge", ("model",), "Requests waiting in the proxies."),
        Metric("gpusup_in_flight_requests", "gauge", ("slot",), "Requests at a worker."),
        Metric("gpusup_leased_bytes", "gauge", ("device",), "Device memory promised to work in flight."),
        Metric("gpusup_connections", "gauge", ("proxy",), "Open client connections."),
        Metric("gpusup_arena_free_bytes", "gauge", ("proxy",), "Unleased bytes of the proxy's arena."),
        Metric("gpusup_device_band", "gauge", ("device", "band"), "1 for the band the device is in."),
        Metric("gpusup_device_memory_bytes", "gauge", ("device", "state"),
               "Device memory: total, free, allocated, reserved, foreign."),
        Metric("gpusup_device_watermark_ratio", "gauge", ("device",), "Effective use, 0 to 1."),
        Metric("gpusup_watermark_limit_ratio", "gauge", ("band",), "Effective use at which a band begins."),
        Metric("gpusup_device_utilization_ratio", "gauge", ("device",), "Busy time by NVML."),
        Metric("gpusup_device_temperature_celsius", "gauge", ("device",), "Temperature by NVML."),
        Metric("gpusup_device_power_watts", "gauge", ("device",), "Power draw by NVML."),
        Metric("gpusup_device_unknown", "gauge", ("device",), "1 while the device's memory can't be read."),
        Metric("gpusup_device_xid_total", "counter", ("device", "xid"), "GPU faults reported by the driver."),
        Metric("gpusup_probe_restarts_total", "counter", (), "Probe processes replaced."),
        Metric("gpusup_slot_state", "gauge", ("slot", "state"), "1 for the state the slot's worker is in."),
        Metric("gpusup_slot_standby", "gauge", ("slot",), "1 while a standby is ready to take the worker's place."),
        Metric("gpusup_worker_starts_total", "counter", ("slot",), "Workers started, standbys included."),
        Metric("gpusup_worker_exits_total", "counter", ("slot", "cause"), "Workers that ended, by cause, standbys included."),
        Metric("gpusup_worker_hangs_total", "counter", ("slot",), "Workers killed for lack of progress."),
        Metric("gpusup_worker_ooms_total", "counter", ("slot",), "Out-of-memory events contained in a worker."),
        Metric("gpusup_worker_memory_bytes", "gauge", ("slot", "kind"), "allocated, reserved, peak, static."),
        Metric("gpusup_worker_busy_seconds_total", "counter", ("slot",), "Time the worker computed."),
        Metric("gpusup_leak_slope_bytes", "gauge", ("slot",), "Growth of resting memory per thousand requests."),
        Metric("gpusup_swaps_total", "counter", ("model", "outcome"), "Changes of a model's version."),
        Metric("gpusup_model_ready_workers", "gauge", ("model", "version"), "Ready workers."),
        Metric("gpusup_proxy_restarts_total", "counter", (), "Proxies replaced."),
        Metric("gpusup_build_info", "gauge", ("version", "python", "torch"), "1."),
    )
}  # fmt: skip

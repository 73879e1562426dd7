"""/metrics of a service at work: every family filled, plausible, and bounded."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from gpusup.conf.metrics import METRICS
from gpusup.supervisor.tally import OLDER, VERSIONS_KEPT

from .service import HANDLERS, Service, running

CONFIG = f"""
[models.double]
handler = "{HANDLERS}:Double"
retry = "safe"

[models.die]
handler = "{HANDLERS}:Die"
devices = ["cpu0"]
required = false
"""

#: Only GPUs have these; a box without them says nothing rather than 0.
ONLY_GPU = {
    "gpusup_device_utilization_ratio",
    "gpusup_device_temperature_celsius",
    "gpusup_device_power_watts",
    "gpusup_device_xid_total",
}
#: These appear once there is something to say.
LATER = {
    "gpusup_degraded_total",
    "gpusup_client_disconnects_total",
    "gpusup_retries_total",
    "gpusup_refused_total",
    "gpusup_leak_slope_bytes",
}

#: Series of a box with two devices and two models, with room to spare.
MOST_SERIES = 700


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG) as service:
        yield service


def scrape(service: Service) -> dict[str, Family]:
    reply = service.get("/metrics")
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {f.name: f for f in text_string_to_metric_families(reply.body.decode())}


def family(found: dict[str, Family], name: str) -> Family:
    return found[name.removesuffix("_total")]


def value(found: dict[str, Family], name: str, suffix: str = "", **labels: str) -> float:
    """The sum over what matches."""
    return float(
        sum(
            s.value
            for s in family(found, name).samples
            if s.name == name + suffix and labels.items() <= s.labels.items()
        )
    )


def series(found: dict[str, Family]) -> int:
    return sum(len(f.samples) for f in found.values())


def test_every_metric_has_its_type_its_labels_and_a_plausible_value(service: Service) -> None:
    for number in range(50):
        assert service.predict("double", str(number).encode()).status == 200
    assert service.predict("double", b"no number").status == 400
    assert service.predict("die", b"666").status == 502
    assert service.predict("nothing", b"1").status == 404

    def counted() -> bool:
        """Proxies report when something happened, each in its own time."""
        found = scrape(service)
        answered = value(found, "gpusup_requests_total", model="double", code="ok")
        lost = value(found, "http_server_request_duration_seconds", "_count",
                     http_response_status_code="404")  # fmt: skip
        return (answered, lost) == (50, 1)

    service.until(counted)
    service.until(lambda: service.slot("cpu0.1")["state"] == "ready")
    found = scrape(service)

    for metric in METRICS.values():
        one = family(found, metric.name)
        assert one.type == metric.kind, metric.name
        assert one.documentation == metric.help
        for sample in one.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
            assert sample.value >= 0 or metric.name == "gpusup_leak_slope_bytes", sample
        if metric.name not in ONLY_GPU | LATER:
            assert one.samples, metric.name
    assert not [n for n in found if n not in {m.removesuffix("_total") for m in METRICS}]

    seconds = value(found, "gpusup_request_seconds", "_sum", model="double")
    assert value(found, "gpusup_request_seconds", "_count", model="double") == 50
    assert 0 < seconds < 60
    for part in ("gpusup_queue_seconds", "gpusup_batch_wait_seconds", "gpusup_compute_seconds"):
        assert value(found, part, "_count", model="double") == 50
        assert value(found, part, "_sum", model="double") <= seconds
    assert value(found, "gpusup_batch_rows", "_sum", model="double") >= 50
    assert value(found, "gpusup_rows_total", model="double", version="1") == 50
    assert value(found, "gpusup_requests_total", model="double", code="INVALID_INPUT") == 1
    assert value(found, "http_server_request_duration_seconds", "_count",
                 http_response_status_code="404") == 1  # fmt: skip

    for device in ("cpu0", "cpu1"):
        memory = {
            state: value(found, "gpusup_device_memory_bytes", device=device, state=state)
            for state in ("total", "free", "allocated", "reserved", "foreign")
        }
        assert memory["total"] == 2 * 2**30
        assert 0 < memory["allocated"] <= memory["reserved"] < memory["total"]
        assert 0 < memory["free"] < memory["total"]
        watermark = value(found, "gpusup_device_watermark_ratio", device=device)
        assert watermark == pytest.approx(1 - memory["free"] / memory["total"], abs=0.02)
        assert value(found, "gpusup_device_band", device=device, band="normal") == 1
        assert value(found, "gpusup_device_band", device=device) == 1
    assert value(found, "gpusup_worker_exits_total", slot="cpu0.1", cause="crash") == 1
    assert value(found, "gpusup_worker_starts_total", slot="cpu0.1") == 2
    assert value(found, "gpusup_worker_hangs_total") == 0
    assert value(found, "gpusup_model_ready_workers", model="double") == 2
    assert value(found, "gpusup_slot_state", state="ready") == 3
    assert value(found, "gpusup_arena_free_bytes", proxy="proxy0") == 256 * 2**20
    assert value(found, "gpusup_build_info") == 1


def test_counters_outlive_the_proxy_that_counted(service: Service) -> None:
    before = scrape(service)
    pid = service.status()["proxies"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    service.until(
        lambda: (p := service.status()["proxies"][0])["pid"] != pid and p["state"] == "serving"
    )
    after = scrape(service)
    for name, metric in METRICS.items():
        if metric.kind == "counter":
            assert value(after, name) >= value(before, name), name
    assert value(after, "gpusup_proxy_restarts_total") == 1


def test_clients_can_not_make_series(service: Service) -> None:
    scrape(service)
    before = series(scrape(service))
    chance = random.Random(5)
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    for number in range(2000):
        word = "".join(chance.choices(string.ascii_letters, k=8))
        method, path = [
            ("GET", f"/{word}/{number}"),
            ("POST", f"/predictions/{word}"),
            ("POST", f"/v2/models/{word}/versions/{number}/infer"),
            (word.upper(), f"/predictions/double/{number}"),
        ][number % 4]
        connection.request(method, path, b"1" if method == "POST" else None)
        reply = connection.getresponse()
        assert 400 <= reply.status < 500, (method, path, reply.read())
        reply.read()
    connection.close()
    service.until(
        lambda: value(scrape(service), "http_server_request_duration_seconds", "_count") > 2000
    )
    found = scrape(service)
    methods = {
        s.labels["http_request_method"]
        for s in found["http_server_request_duration_seconds"].samples
    }
    assert methods <= {"GET", "POST", "_OTHER"}
    # A handful of (route, method, status), each a histogram.
    assert series(found) - before < 12 * 20
    assert series(found) < MOST_SERIES


def test_many_swaps_leave_few_versions(service: Service) -> None:
    swaps = VERSIONS_KEPT + 3
    for version in range(2, swaps + 2):
        change = service.change("/models/double/reload", {"version": str(version)})
        assert change["state"] == "done", change
        assert service.predict("double", b"1").status == 200
    service.until(
        lambda: value(scrape(service), "gpusup_rows_total", model="double",
                      version=str(swaps + 1)) == 1
    )  # fmt: skip
    found = scrape(service)
    versions = {
        s.labels["version"]
        for s in family(found, "gpusup_rows_total").samples
        if s.labels["model"] == "double"
    }
    assert len(versions) == VERSIONS_KEPT + 1
    assert OLDER in versions
    assert value(found, "gpusup_rows_total", model="double") >= 50 + swaps
    assert value(found, "gpusup_swaps_total", model="double", outcome="done") == swaps
    assert len(family(found, "gpusup_model_ready_workers").samples) <= 3
    assert series(found) < MOST_SERIES


def test_each_series_is_there_once(service: Service) -> None:
    lines = service.get("/metrics").body.decode().splitlines()
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert samples
    assert len(samples) == len(set(samples))


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool (Debian's package prometheus)"
)
def test_promtool_finds_nothing_wrong(service: Service) -> None:
    text = service.get("/metrics").body
    asked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (asked.returncode, asked.stdout + asked.stderr) == (0, b"")

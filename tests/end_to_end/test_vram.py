"""Admission against measured memory, on CPU slots: the same code as for a GPU's."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .service import HANDLERS, Reply, Service, running

#: 1 KiB per value: a row of 65536 values takes 64 MiB while it is computed.
MIB = 1024
CONFIG = f"""
[devices]
cpu_slots = 1
cpu_memory = "320MiB"

[watermark]
queue_per_slot = 5

[models.grows]
handler = "{HANDLERS}:Grows"
settings = {{ seconds = 0.2 }}
buckets = [[{MIB}], [{64 * MIB}], [{128 * MIB}]]
max_rows = 4
wait = "0ms"
"""


#: A neighbour rests at two thirds of the device: beside it 100 MiB more reach the shed mark.
LADDER = f"""
[devices]
cpu_slots = 1
cpu_memory = "1000MiB"

[models.hoard]
handler = "{HANDLERS}:Allocates"
settings = {{ weights_mib = 540 }}
static = "650MiB"

[models.ladder]
handler = "{HANDLERS}:Grows"
settings = {{ seconds = 0.3 }}
static = "200MiB"
buckets = [[{100 * MIB}]]
max_rows = 1
degrade = [{{ step = "lower_precision", limit = 2 }}]
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG) as service:
        yield service


def ask(service: Service, values: int, model: str = "grows", rows: int = 1) -> Reply:
    import struct

    data = struct.pack("<f", 1.0) * (values * rows)
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [rows, values],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return service.request(
        "POST",
        f"/v2/models/{model}/infer",
        head + data,
        {"Inference-Header-Content-Length": str(len(head))},
    )


def together(count: int, one: Any) -> list[Reply]:
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda: replies.append(one())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == count
    return replies


def test_the_cost_of_a_request_was_measured_at_warm_up(service: Service) -> None:
    profiles = list((service.folder / "state" / "profiles").glob("grows@1.cpu*"))
    assert profiles
    peaks = json.loads(profiles[0].read_text())
    text = json.dumps(peaks)
    assert f"{128 * MIB}" in text


def test_a_burst_is_queued_refused_with_retry_after_or_answered_and_nobody_dies(
    service: Service,
) -> None:
    pids = service.pids()
    replies = together(40, lambda: ask(service, 128 * MIB))
    counts = Counter(r.status for r in replies)
    assert set(counts) <= {200, 429, 503}, counts
    assert counts[200] >= 2
    assert counts[429] + counts[503] >= 1
    for reply in replies:
        if reply.status != 200:
            assert int(reply.headers["Retry-After"]) >= 1
            assert reply.json()["code"]
    assert service.pids() == pids
    # All that was promised is back.
    service.until(lambda: not any(leases(service)), 5)


def leases(service: Service) -> list[int]:
    _, found = service.control("GET", "/leases")
    return [
        size
        for part in (found["leases"], found["in_flight"])
        for by in part.values()
        for size in by.values()
    ]


def calm(service: Service) -> bool:
    device = service.status()["devices"][0]
    return bool(device["band"] == "normal" and device["watermark"] < 0.65)


def test_small_requests_are_served_when_the_large_ones_have_gone(service: Service) -> None:
    service.until(lambda: calm(service), 10)
    replies = together(12, lambda: ask(service, MIB))
    assert {r.status for r in replies} == {200}


def test_an_item_that_cannot_fit_is_413_with_both_numbers(service: Service) -> None:
    pids = service.pids()
    # No bucket is that large and its memory was never measured: the worker itself finds out.
    reply = ask(service, 400 * MIB)
    assert reply.status in (413, 503), reply.body
    assert sum(c.isdigit() for c in reply.json()["error"]) >= 2
    assert service.pids() == pids
    assert ask(service, MIB).status == 200


def test_the_device_comes_back_by_itself_after_a_large_request(service: Service) -> None:
    assert ask(service, 128 * MIB).status == 200
    service.until(lambda: calm(service), 10)
    assert ask(service, 128 * MIB).status == 200


def test_what_is_shed_goes_down_the_ladder_and_says_so(short_path: Path) -> None:
    with running(short_path, LADDER) as service:
        service.until(lambda: service.status()["devices"][0]["watermark"] > 0.75, 10)
        replies = together(12, lambda: ask(service, 100 * MIB, "ladder"))
        degraded = [r for r in replies if r.headers.get("Gpusup-Degraded")]
        shed = [r for r in replies if r.status == 503]
        assert len(degraded) >= 2
        assert len(degraded) + len(shed) == 12, Counter(r.status for r in replies)
        for reply in degraded:
            assert (reply.status, reply.headers["Gpusup-Degraded"]) == (200, "lower_precision")
        for reply in shed:
            assert reply.json()["code"] == "SHED"
            assert {"watermark", "projected", "free_bytes", "total_bytes"} <= set(reply.json())
            assert int(reply.headers["Retry-After"]) >= 1
        records = service.folder / "state" / "records"
        service.until(lambda: list(records.glob("*cpu0*.json")), 5)
        record = json.loads(next(records.glob("*cpu0*.json")).read_text())
        assert record["workers"][0]["allocated"] > 0


@pytest.mark.slow
def test_a_leak_raises_an_alarm_with_evidence(short_path: Path) -> None:
    config = f"""
[leak]
slope_limit = "1MiB"
[devices]
cpu_slots = 1
[models.leaky]
handler = "{HANDLERS}:Leaky"
settings = {{ kib = 256 }}
"""
    with running(short_path, config) as service:
        for _ in range(700):
            assert service.predict("leaky", b"1").status == 200

        def alarmed() -> bool:
            _, found = service.control("GET", "/events")
            return any(e["kind"] == "leak" for e in found["events"])

        service.until(
            lambda: alarmed() or (service.predict("leaky", b"1").status == 200 and None), 90
        )
        service.until(lambda: list((service.folder / "state" / "records").glob("*leak*")), 5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[watermark]\nqueue = 0.95\n", ("0.95", "0.92")),
        ('[devices]\ncpu_memory = "-1GiB"\n', ("cpu_memory",)),
        ("[devices]\ncpu_memory = 1000\n", ("cpu_memory",)),
        (
            f'[devices]\nuse = ["cpu0"]\ncpu_memory = "1GiB"\n[models.m]\n'
            f'handler = "{HANDLERS}:Echo"\nstatic = "3GiB"\n',
            ("3", "1"),
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers_before_anything_starts(
    short_path: Path, config: str, words: tuple[str, ...]
) -> None:
    import subprocess
    import sys

    path = short_path / "bad.toml"
    path.write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "gpusup.supervisor", "check", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr

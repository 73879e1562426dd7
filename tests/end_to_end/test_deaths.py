"""The other processes may die too: proxies, the probe, what workers started, and their output.

Tests 4, 5, 9 and 10 of the list that supervision has to pass, as far as no GPU is needed.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from .load import Load, figure
from .service import HANDLERS, Service, running

FAKE_NVML = Path(__file__).parents[1] / "supervisor" / "fake_nvml.py"
GIB = 2**30

CONFIG = f"""
[server]
proxies = 2

[devices]
use = ["cpu0", "cpu1", "gpu0"]

[probe]
library = "{FAKE_NVML}:Fake"
interval = "20ms"
call_limit = "300ms"

[watermark]
stale_after = "500ms"

[supervision]
proxy_limit = "4s"

[models.double]
handler = "{HANDLERS}:Double"
devices = ["cpu0", "cpu1"]
retry = "safe"

[models.sleeper]
handler = "{HANDLERS}:Sleeper"
devices = ["cpu1"]
settings = {{ seconds = 0.3 }}

[models.chatty]
handler = "{HANDLERS}:Chatty"
devices = ["cpu0"]

[models.flood]
handler = "{HANDLERS}:Flood"
devices = ["cpu0"]
settings = {{ mib = 32 }}
budget = "30s"

[models.forks]
handler = "{HANDLERS}:Forks"
devices = ["cpu0"]
settings = {{ file = "FOLDER/forked" }}
"""


def gpu(**more: Any) -> str:
    device = {
        "uuid": "GPU-00000000-aaaa",
        "bus": "00000000:01:00.0",
        "total": 24 * GIB,
        "free": 20 * GIB,
        "processes": [],
    }
    return json.dumps({"devices": [device | more]})


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    driver = folder / "driver.json"
    driver.write_text(gpu())
    env = {"GPUSUP_FAKE_NVML": str(driver)}
    with running(folder, CONFIG.replace("FOLDER", str(folder)), env=env) as service:
        yield service


def set_driver(service: Service, text: str) -> None:
    path = service.folder / "driver.json"
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def proxies(service: Service) -> dict[str, dict[str, Any]]:
    return {p["name"]: p for p in service.status()["proxies"]}


def both_serve(service: Service) -> bool:
    return [p["state"] for p in proxies(service).values()] == ["serving"] * 2


def slot_of(service: Service, model: str) -> dict[str, Any]:
    return next(s for s in service.status()["slots"] if s["model"] == model)


def pid_of(service: Service, title: str) -> int:
    processes = service.processes()
    return int(next(p.pid for p in processes if " ".join(p.cmdline()).startswith(title)))


# -- proxies --------------------------------------------------------------------------------------


def test_a_killed_proxy_loses_only_what_was_inside_and_is_back_soon(service: Service) -> None:
    service.until(lambda: both_serve(service))
    before = proxies(service)
    with Load(service, "/predictions/double", clients=16) as load:
        load.wait_for(200)
        inside = proxies(service)["proxy0"]["connections"]
        killed = time.monotonic()
        os.kill(before["proxy0"]["pid"], signal.SIGKILL)
        service.until(lambda: proxies(service)["proxy0"]["restarts"] > 0 and both_serve(service))
        back = time.monotonic() - killed
        load.wait_for(200)
    lost = load.bad()
    figure(f"proxy back after {back:.2f} s, {len(lost)} of {inside} connections inside it lost")
    assert {seen.status for seen in lost} <= {0}
    assert len(lost) <= inside
    assert all(seen.began <= killed + 1.0 for seen in lost)
    after = proxies(service)
    assert after["proxy1"]["pid"] == before["proxy1"]["pid"]
    assert after["proxy0"]["pid"] != before["proxy0"]["pid"]


def test_a_stopped_proxy_is_found_and_replaced_while_the_other_serves(service: Service) -> None:
    service.until(lambda: both_serve(service))
    before = proxies(service)
    with Load(service, "/predictions/double", clients=16) as load:
        load.wait_for(200)
        inside = proxies(service)["proxy0"]["connections"]
        stopped = time.monotonic()
        os.kill(before["proxy0"]["pid"], signal.SIGSTOP)
        service.until(lambda: proxies(service)["proxy0"]["pid"] != before["proxy0"]["pid"])
        found = time.monotonic() - stopped
        service.until(lambda: both_serve(service))
        load.wait_for(200)
    lost = load.bad()
    figure(f"stopped proxy replaced after {found:.2f} s, {len(lost)} of {inside} inside it lost")
    assert found > 3.5
    assert {seen.status for seen in lost} <= {0}
    assert len(lost) <= inside + 1  # one may have been accepted and not counted yet
    assert proxies(service)["proxy1"]["pid"] == before["proxy1"]["pid"]
    assert "proxy0 hangs: not a word for 4 s" in service.whole_log()


def test_a_proxy_replaced_under_load_resets_nobody(service: Service) -> None:
    service.until(lambda: both_serve(service))
    seen: list[int] = []
    with Load(service, "/predictions/double", clients=8) as load:
        load.wait_for(100)
        for name in ("proxy0", "proxy1"):
            done = service.change(f"/proxies/{name}/restart")
            assert done["state"] == "done", done
            figure(f"{name} replaced in {done['took_s']:.2f} s")
        for _ in range(50):  # a connection each
            seen.append(service.predict("double", b"1").status)
        load.wait_for(100)
    assert set(seen) == {200}
    assert load.bad() == []
    slowest = max(s.ended - s.began for s in load.seen)
    figure(f"two proxies replaced, {len(load.seen)} requests, slowest {slowest:.3f} s")


def test_a_request_inside_a_stopped_supervisor_is_not_needed(service: Service) -> None:
    """Clients of a kept connection are served while the supervisor does nothing at all."""
    assert service.process
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        for _ in range(20):
            connection.request("POST", "/predictions/double", b"4")
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())["value"]) == (200, 8)
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
        connection.close()


# -- the probe ------------------------------------------------------------------------------------


def device(service: Service) -> dict[str, Any]:
    return next(d for d in service.status()["devices"] if d["name"] == "gpu0")


def test_a_stuck_probe_is_replaced_and_nothing_else_notices(service: Service) -> None:
    service.until(lambda: device(service)["known"])
    pids = service.pids()
    os.kill(pid_of(service, "gpusup: probe"), signal.SIGSTOP)
    began = time.monotonic()
    answers = []

    def unknown() -> bool:
        known = device(service)["known"]
        answers.append(time.monotonic())
        return not known

    service.until(unknown, 20)
    assert service.predict("double", b"2").status == 200
    service.until(lambda: device(service)["known"], 30)
    took = time.monotonic() - began
    slowest = max((b - a for a, b in pairwise(answers)), default=0.0)
    figure(f"probe replaced in {took:.2f} s; status meanwhile within {slowest:.3f} s")
    assert slowest < 2.0
    assert service.pids() == pids
    assert service.control("GET", "/support")[1]["probe"]["restarts"] >= 1


def test_a_driver_that_is_gone_and_back_is_found_again(service: Service) -> None:
    service.until(lambda: device(service)["known"])
    pids = service.pids()
    set_driver(service, json.dumps({"gone": True, "devices": []}))
    service.until(lambda: not device(service)["known"], 20)
    assert service.control("GET", "/support")[1]["probe"]["reason"] == "driver not loaded"
    assert service.predict("double", b"2").status == 200
    set_driver(service, gpu())
    service.until(lambda: device(service)["known"], 40)
    assert service.pids() == pids


def test_a_fault_of_a_device_is_told_with_its_sentence(service: Service) -> None:
    pids = service.pids()
    set_driver(service, gpu(all_trouble="lost"))
    service.until(lambda: device(service)["fault"], 20)
    set_driver(service, gpu())
    service.until(lambda: not device(service)["fault"], 20)
    texts = [e["text"] for e in service.control("GET", "/events")[1]["events"]]
    assert any("the driver reports the GPU as usable" in text for text in texts)
    assert service.pids() == pids


# -- what workers print and start -----------------------------------------------------------------


def test_output_without_end_or_sense_blocks_nobody_and_stays_bounded(service: Service) -> None:
    assert service.process
    supervisor = psutil.Process(service.process.pid)
    for _ in range(20):
        assert service.predict("chatty", b"1").status == 200
    before = supervisor.memory_info().rss
    logged = service.log_path.stat().st_size
    began = time.monotonic()
    for number in range(3):
        assert service.predict("flood", b"666").status == 200, number
    took = time.monotonic() - began
    service.until(
        lambda: "left out" in service.ctl("logs", slot_of(service, "flood")["slot"]).stdout
    )
    grown = supervisor.memory_info().rss - before
    figure(f"96 MiB of junk taken in {took:.2f} s, supervisor grew by {grown / 2**20:.1f} MiB")
    assert grown < 48 * 2**20
    assert service.log_path.stat().st_size - logged < 2**20
    log = service.ctl("logs", slot_of(service, "chatty")["slot"]).stdout
    assert "junk" in log
    assert "\x1b" not in log
    assert max(map(len, log.splitlines())) < 5000
    assert slot_of(service, "chatty")["generation"] == 1


def test_what_a_worker_started_is_gone_with_it(service: Service) -> None:
    slot = slot_of(service, "forks")
    pids = [int(line) for line in (service.folder / "forked").read_text().split()]
    assert len(pids) == 2
    worker = psutil.Process(slot["pid"])
    family = [psutil.Process(pid) for pid in pids] + worker.children(recursive=True)
    assert len(family) >= 3
    os.kill(slot["pid"], signal.SIGKILL)
    service.until(lambda: slot_of(service, "forks")["generation"] > slot["generation"])
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    service.wait_ready()
    assert service.ctl("restart", slot["slot"]).returncode == 0


def test_somebody_elses_exit_code_is_nobodys_fault(service: Service) -> None:
    """An orphan that comes to us and ends with 78 is collected without a word."""
    slot = slot_of(service, "forks")
    orphan = int((service.folder / "forked").read_text().split()[-2])
    assert psutil.pid_exists(orphan)
    os.kill(orphan, signal.SIGKILL)
    service.until(lambda: not psutil.pid_exists(orphan), 20)
    assert slot_of(service, "forks")["pid"] == slot["pid"]
    assert service.status()["state"] == "ready"

"""New code in the same process: workers, proxies and connections stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .load import Load, figure
from .service import HANDLERS, Service, running

CONFIG = f"""
[server]
proxies = 2

[models.double]
handler = "{HANDLERS}:Double"
retry = "safe"

[models.slow]
handler = "{HANDLERS}:SlowLoad"
devices = ["cpu1"]
on_demand = true
settings = {{ seconds = 3 }}
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG) as service:
        yield service


def proxies(service: Service) -> dict[str, int]:
    return {p["name"]: p["pid"] for p in service.status()["proxies"]}


def upgrade(service: Service) -> None:
    done = service.ctl("reexec")
    assert done.returncode == 0, done.stdout + done.stderr + service.log()


def test_an_upgrade_under_load_keeps_every_process_and_loses_no_request(service: Service) -> None:
    assert service.process
    before = service.pids(), proxies(service), service.process.pid
    assert len(before[0]) == 2
    assert len(before[1]) == 2
    zygotes = [p.pid for p in service.processes() if "zygote" in p.cmdline()[0]]
    with Load(service, "/predictions/double", clients=8) as load:
        load.wait_for(50)
        upgrade(service)
        load.wait_for(50)
        upgrade(service)
        load.wait_for(50)
    assert load.bad() == []
    status = service.status()
    assert (service.pids(), proxies(service), status["pid"]) == before
    assert status["state"] == "ready"
    assert {s["generation"] for s in status["slots"] if s["pid"]} == {1}
    assert [p.pid for p in service.processes() if "zygote" in p.cmdline()[0]] == zygotes
    assert psutil.Process(before[2]).cmdline()[0].startswith("gpusup: supervisor")
    slowest = max(s.ended - s.began for s in load.seen)
    figure(f"two upgrades, {len(load.seen)} requests, none failed, slowest {slowest:.3f} s")


def test_what_was_counted_and_told_before_is_still_there(service: Service) -> None:
    def total() -> float:
        text = service.get("/metrics").body.decode()
        line = 'gpusup_requests_total{code="ok",model="double"} '
        return float(text.partition(line)[2].split()[0]) if line in text else 0.0

    assert service.predict("double", b"1").status == 200
    counted = service.until(lambda: total() >= 1 and total())
    events = service.control("GET", "/events")[1]["events"]
    assert service.ctl("cordon", "cpu0").returncode == 0
    upgrade(service)
    assert total() >= counted
    again = service.control("GET", "/events")[1]["events"]
    assert [e for e in again if e["serial"] <= events[-1]["serial"]] == events
    assert service.slot("cpu0")["slot_state"] == "cordoned"
    assert service.slot("cpu0")["story"]
    assert service.ctl("uncordon", "cpu0").returncode == 0
    service.wait_ready()


def test_afterwards_death_drain_and_restart_are_seen_as_before(service: Service) -> None:
    upgrade(service)
    slot = next(s for s in service.status()["slots"] if s["model"] == "double")
    os.kill(slot["pid"], signal.SIGKILL)
    service.until(lambda: service.slot(slot["slot"])["generation"] > slot["generation"])
    service.wait_ready()
    assert service.slot(slot["slot"])["last_exit"] == "signal 9"
    assert service.ctl("drain", "cpu0").returncode == 0
    assert service.slot("cpu0")["state"] == "empty"
    assert service.ctl("uncordon", "cpu0").returncode == 0
    service.wait_ready()
    assert service.ctl("restart", slot["slot"]).returncode == 0
    assert service.ctl("restart", "proxy0").returncode == 0
    os.kill(proxies(service)["proxy1"], signal.SIGKILL)
    service.until(lambda: proxies(service).get("proxy1") and service.get("/readyz").status == 200)
    assert service.ctl("reload-model", "double", "--version", "2").returncode == 0
    assert service.predict("double", b"4").json()["version"] == "2"


def test_it_is_refused_while_a_change_is_under_way(service: Service) -> None:
    status, answer = service.control("POST", "/models/slow/load")
    assert status == 200
    refused, text = service.control("POST", "/reexec")
    assert (refused, text["code"], text["change"]) == (409, "conflict", answer["change"])
    assert service.ctl("reexec").returncode == 1
    assert service.control("GET", f"/changes/{answer['change']}?wait=30")[1]["state"] == "done"


def test_a_program_that_cannot_be_loaded_is_refused_and_nothing_happens(short_path: Path) -> None:
    # A module of that name, found before the real one: the fresh interpreter fails on it.
    broken = short_path / "broken"
    broken.mkdir()
    with running(short_path, CONFIG, env={"PYTHONPATH": str(broken)}) as service:
        pids = service.pids()
        (broken / "aiohttp.py").write_text("raise RuntimeError('half an upgrade')")
        done = service.ctl("reexec")
        assert done.returncode == 1
        assert "half an upgrade" in done.stderr
        (broken / "aiohttp.py").unlink()
        assert service.pids() == pids
        assert service.predict("double", b"4").status == 200
        upgrade(service)
        assert service.pids() == pids
        left = service.processes()
        assert service.stop() == 0
        _, alive = psutil.wait_procs(left, timeout=5)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []

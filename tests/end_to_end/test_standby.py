"""A standby is the next worker: the same process, with nothing lost, and gone when it has to be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .load import Load, figure
from .service import Service, running
from .swap_clients import Clients
from .swap_models import model, reload, steps

#: Without healthy minutes between two deaths the second one would wait for its back-off.
BACKOFF = '[supervision.backoff]\nreset_after = "100ms"\n'


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    config = BACKOFF + model(
        folder, "only", 'retry = "safe"', 'devices = ["cpu0"]', "standby = true"
    )
    with running(folder, '[devices]\nuse = ["cpu0"]\n' + config) as service:
        yield service


def held(service: Service) -> dict[str, Any]:
    """The slot, when its standby is prepared."""
    return dict(service.until(lambda: (s := service.slot("cpu0"))["standby"] == "ready" and s))


def metric(service: Service, name: str) -> str:
    lines = service.get("/metrics").body.decode().splitlines()
    return next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + "{"))


def test_at_a_death_the_standby_is_the_new_worker_and_another_one_follows(
    service: Service,
) -> None:
    before = held(service)
    assert before["standby_pid"] not in (0, before["pid"])
    assert metric(service, "gpusup_slot_standby") == "1.0"
    assert service.status()["state"] == "ready"
    assert "standby ready" in service.ctl("status").stdout
    with Load(service, "/predictions/only", clients=8) as load:
        load.wait_for(50)
        os.kill(before["pid"], signal.SIGKILL)
        after = service.until(
            lambda: (
                (s := service.slot("cpu0"))["state"] == "ready" and s["pid"] != before["pid"] and s
            )
        )
        load.wait_for(50)
    assert load.bad() == []
    assert after["pid"] == before["standby_pid"]
    assert after["seconds"]["prepare"] >= 0
    slowest = max(s.ended - s.began for s in load.seen)
    figure(f"worker killed under 8 clients, {len(load.seen)} requests, slowest {slowest:.3f} s")
    following = held(service)
    assert following["pid"] == after["pid"]
    assert following["standby_pid"] not in (before["pid"], after["pid"])
    assert following["generation"] == before["generation"] + 1


@pytest.mark.slow  # decided in pure tests too; each waits until a worker has been well
def test_its_own_death_is_told_and_hurts_nobody(service: Service) -> None:
    before = held(service)
    with Load(service, "/predictions/only", clients=2) as load:
        load.wait_for(10)
        os.kill(before["standby_pid"], signal.SIGKILL)
        lost = service.until(lambda: (s := service.slot("cpu0"))["standby"] != "ready" and s)
        gone = service.until(
            lambda: (s := service.slot("cpu0"))["standby"].startswith("none") and s
        )
        assert "standby" in lost
        assert "the last one ended: signal 9; the next one in" in gone["standby"]
        load.wait_for(10)
    assert load.bad() == []
    assert (gone["pid"], gone["restarts"]) == (before["pid"], before["restarts"])
    events = service.control("GET", "/events")[1]["events"]
    (told,) = [e for e in events if e["kind"] == "standby"]
    assert "cpu0: its standby ended (signal 9), the next one in 5 s" in told["text"]
    assert held(service)["pid"] == before["pid"]


@pytest.mark.parametrize("strategy", ["surge", "in-place"])
def test_a_swap_with_a_standby_there_loses_nothing(service: Service, strategy: str) -> None:
    before = held(service)
    version = 2 if before["version"] == "1" else 1
    with Clients(service, "only") as clients:
        change = reload(service, "only", version, strategy=strategy)
        assert change["state"] == "done", steps(change)
        assert f": {strategy} (" in steps(change)
    assert not clients.problems()
    assert clients.versions() == {"1", "2"}
    assert not psutil.pid_exists(before["standby_pid"])
    after = held(service)
    assert after["version"] == str(version)
    assert len({after["pid"], after["standby_pid"], before["pid"], before["standby_pid"]}) == 4


def test_a_drain_takes_it_along_and_it_comes_back(service: Service) -> None:
    before = held(service)
    assert service.ctl("drain", "cpu0").returncode == 0
    service.until(lambda: not psutil.pid_exists(before["standby_pid"]))
    slot = service.slot("cpu0")
    assert (slot["state"], slot["pid"], slot["standby_pid"]) == ("empty", 0, 0)
    assert slot["standby"] == "none: the slot is cordoned"
    assert service.ctl("uncordon", "cpu0").returncode == 0
    service.wait_ready()
    held(service)


@pytest.mark.slow
def test_an_upgrade_in_place_takes_it_along(service: Service) -> None:
    before = held(service)
    done = service.ctl("reexec")
    assert done.returncode == 0, done.stdout + done.stderr + service.log()
    after = held(service)
    assert (after["pid"], after["standby_pid"]) == (before["pid"], before["standby_pid"])
    os.kill(before["pid"], signal.SIGKILL)
    service.until(
        lambda: (s := service.slot("cpu0"))["state"] == "ready" and s["pid"] != before["pid"]
    )
    assert service.slot("cpu0")["pid"] == before["standby_pid"]


@pytest.mark.slow
def test_the_file_switches_it_on_and_off_and_the_worker_stays(service: Service) -> None:
    before = held(service)
    text = service.config_path.read_text()
    service.config_path.write_text(text.replace("standby = true", "standby = false"))
    assert service.ctl("reload-config").returncode == 0
    service.until(lambda: not psutil.pid_exists(before["standby_pid"]))
    slot = service.slot("cpu0")
    assert (slot["pid"], slot["standby"]) == (before["pid"], "")
    service.config_path.write_text(text)
    assert service.ctl("reload-config").returncode == 0
    assert held(service)["pid"] == before["pid"]


def test_a_stop_leaves_nothing_behind(service: Service) -> None:
    slot = held(service)
    left = service.processes()
    assert {slot["pid"], slot["standby_pid"]} <= {p.pid for p in left}
    assert service.stop() == 0
    _, alive = psutil.wait_procs(left, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []

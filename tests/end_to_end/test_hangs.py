"""Busy is not hung; what hangs is found by its lack of progress, and its clients are answered.

Tests 1 and 2 of the list that supervision has to pass: the GIL held within and beyond the budget,
and a call stuck in C that leaves the heartbeat fine.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.worker.budgets import FEWEST, LEAST_S

from .load import Load, figure
from .service import HANDLERS, Service, running

BUDGET_S = 1.0

CONFIG = f"""
[server]
request_timeout = "20s"

[supervision]
suspect_after = "300ms"
beat_limit = "3s"
canary_idle = "1s"

[supervision.backoff]
initial = "50ms"
limit = "200ms"
crashes = 100

[models.free]
handler = "{HANDLERS}:Hang"
budget = "{BUDGET_S}s"

[models.held]
handler = "{HANDLERS}:HangGil"
budget = "{BUDGET_S}s"

[models.busy]
handler = "{HANDLERS}:GilHolder"
budget = "15s"
devices = ["cpu0"]
settings = {{ seconds = 1.5 }}

[models.canary]
handler = "{HANDLERS}:Unhealthy"
devices = ["cpu1"]
settings = {{ file = "FOLDER/unhealthy" }}

[models.measured]
handler = "{HANDLERS}:Hang"
devices = ["cpu1"]
budget_p99 = 10

[models.queued]
handler = "{HANDLERS}:Sleeper"
devices = ["cpu0"]
max_rows = 1
budget = "5s"
settings = {{ seconds = 0.25 }}
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG.replace("FOLDER", str(folder))) as service:
        yield service


def slots_of(service: Service, model: str) -> list[str]:
    return [s["slot"] for s in service.status()["slots"] if s["model"] == model]


def test_a_held_gil_within_the_budget_makes_it_suspect_and_it_comes_back(service: Service) -> None:
    (slot,) = slots_of(service, "busy")
    before = service.slot(slot)
    with Load(service, "/predictions/busy", lambda client, number: 666.0, clients=1) as load:
        service.until(lambda: service.slot(slot)["state"] == "suspect", 10)
        load.wait_for(1)
    assert load.bad() == []
    service.until(lambda: service.slot(slot)["state"] == "ready", 10)
    after = service.slot(slot)
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])
    assert any("ready -> suspect (no beat for 0.3 s" in move for move in after["story"])
    assert any("suspect -> ready" in move for move in after["story"])


@pytest.mark.parametrize("model", ["free", "held"])
def test_a_hang_is_killed_with_its_stack_and_answered_soon_after_its_budget(
    service: Service, model: str
) -> None:
    slots = slots_of(service, model)
    before = {slot: service.slot(slot) for slot in slots}
    with Load(service, f"/predictions/{model}", clients=4) as others:
        others.wait_for(20)
        began = time.monotonic()
        reply = service.predict(model, b"666")
        took = time.monotonic() - began
        others.wait_for(20)
    figure(f"{model}: hang answered after {took:.3f} s, budget {BUDGET_S:g} s")
    assert reply.status == 502
    assert reply.headers["x-should-retry"] == "false"
    assert BUDGET_S <= took < 3 * BUDGET_S
    # Others may only have met it in the very same batch; all else was served by the other slot.
    assert others.bad(but=(502,)) == []
    assert others.statuses()[502] <= 4
    (hung,) = [s for s in slots if service.slot(s)["generation"] > before[s]["generation"]]
    assert "its budget is 1 s" in service.slot(hung)["last_exit"]
    log = service.ctl("logs", hung).stdout
    assert "most recent call first" in log
    assert "in forward" in log
    service.wait_ready()


def test_a_hang_is_found_by_what_batches_took_long_before_the_budget(service: Service) -> None:
    (slot,) = slots_of(service, "measured")
    with Load(service, "/predictions/measured", clients=1) as load:
        load.wait_for(2 * FEWEST)
    assert load.bad() == []
    reply = service.predict("measured", b"666")
    assert reply.status == 502, reply.body
    service.wait_ready()
    found = re.search(r"its budget is ([\d.]+) s", service.slot(slot)["last_exit"])
    assert found
    assert LEAST_S <= float(found[1]) < ModelConfig(handler="").budget


def test_a_deadline_before_the_budget_is_kept_and_the_worker_is_replaced(service: Service) -> None:
    before = {slot: service.slot(slot)["generation"] for slot in slots_of(service, "free")}
    began = time.monotonic()
    reply = service.predict("free", b"666", **{"X-Request-Timeout": "0.4"})
    took = time.monotonic() - began
    figure(f"deadline of 0.4 s kept after {took:.3f} s")
    assert reply.status == 504, reply.body
    assert 0.4 <= took < BUDGET_S + 1.0
    service.until(lambda: any(service.slot(s)["generation"] > g for s, g in before.items()), 10)
    assert service.predict("free", b"1").status == 200
    service.wait_ready()


def test_a_queue_of_slow_requests_is_no_hang(service: Service) -> None:
    (slot,) = slots_of(service, "queued")
    pid = service.slot(slot)["pid"]
    with Load(service, "/predictions/queued", clients=12) as load:
        load.wait_for(12)
    assert load.bad() == []
    assert service.slot(slot)["pid"] == pid


def test_a_stopped_idle_worker_is_suspect_then_replaced(service: Service) -> None:
    slot = slots_of(service, "queued")[0]
    before = service.slot(slot)
    os.kill(before["pid"], signal.SIGSTOP)
    service.until(lambda: service.slot(slot)["state"] == "suspect", 10)
    service.until(lambda: service.slot(slot)["generation"] > before["generation"], 20)
    assert "no beat" in service.slot(slot)["last_exit"]
    service.wait_ready()


def test_an_idle_worker_whose_canary_fails_is_replaced(service: Service) -> None:
    (slot,) = slots_of(service, "canary")
    before = service.slot(slot)
    marker = service.folder / "unhealthy"
    marker.touch()
    service.until(lambda: service.slot(slot)["generation"] > before["generation"], 20)
    marker.unlink()
    assert "not healthy" in service.slot(slot)["last_exit"]
    service.wait_ready()
    assert service.predict("canary", b"3").status == 200


def test_a_worker_stopped_and_continued_comes_back_as_itself(service: Service) -> None:
    slot = slots_of(service, "queued")[0]
    before = service.slot(slot)
    os.kill(before["pid"], signal.SIGSTOP)
    service.until(lambda: service.slot(slot)["state"] == "suspect", 10)
    os.kill(before["pid"], signal.SIGCONT)
    service.until(lambda: service.slot(slot)["state"] == "ready", 10)
    assert service.slot(slot)["pid"] == before["pid"]


def test_a_stopped_supervisor_kills_nobody_and_causes_no_false_504(service: Service) -> None:
    """Three times as long as beats and the keep-alive may be late."""
    assert service.process
    pids = service.pids()
    with Load(service, "/predictions/free", clients=4) as load:
        load.wait_for(10)
        os.kill(service.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        load.wait_for(50)  # the proxies go on by themselves
        service.until(lambda: time.monotonic() - stopped > 3 * 3.0, 20)
        os.kill(service.process.pid, signal.SIGCONT)
        service.until(lambda: service.try_status().get("state") == "ready", 20)
        load.wait_for(50)
    assert load.bad() == []
    assert service.pids() == pids
    events = service.control("GET", "/events")[1]["events"]
    assert any(e["kind"] == "pause" for e in events)
    left = psutil.Process(service.process.pid).children()
    assert {p.pid for p in left if p.status() == psutil.STATUS_ZOMBIE} == set()

"""Whatever becomes of its worker, a request has one answer, and it is its own.

Test 3 of the list that supervision has to pass: no late answer reaches somebody else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from .load import Load, Seen, figure
from .service import HANDLERS, Service, running

CONFIG = f"""
[server]
request_timeout = "20s"

[supervision.backoff]
initial = "50ms"
limit = "200ms"
crashes = 100

[models.sleeper]
handler = "{HANDLERS}:Sleeper"
max_rows = 1
settings = {{ by_value = true }}

[models.once]
handler = "{HANDLERS}:Count"
max_rows = 1
settings = {{ file = "FOLDER/once", seconds = 0.3 }}

[models.again]
handler = "{HANDLERS}:Count"
max_rows = 1
retry = "safe"
settings = {{ file = "FOLDER/again", seconds = 0.3 }}

[models.segfault]
handler = "{HANDLERS}:Segfault"

[models.deadly]
handler = "{HANDLERS}:Die"
retry = "safe"

[models.echo]
handler = "{HANDLERS}:Double"
retry = "safe"
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG.replace("FOLDER", str(folder))) as service:
        yield service


def slots_of(service: Service, model: str) -> list[str]:
    return [s["slot"] for s in service.status()["slots"] if s["model"] == model]


class Asked:
    """One request in a thread of its own. `answer` waits for it."""

    def __init__(self, service: Service, model: str, value: float) -> None:
        self._seen: list[Seen] = []
        self._thread = threading.Thread(target=self._run, args=(service, model, value), daemon=True)
        self._thread.start()

    def _run(self, service: Service, model: str, value: float) -> None:
        began = time.monotonic()
        reply = service.predict(model, str(value).encode())
        headers = dict(reply.headers)
        self._seen.append(Seen(began, time.monotonic(), value, reply.status, reply.json(), headers))

    def answer(self) -> Seen:
        self._thread.join(30)
        assert self._seen, "no answer"
        return self._seen[0]


def computing(service: Service, file: str, value: float) -> int:
    """The pid of the worker that has begun with this value."""

    def find() -> int:
        path = service.folder / file
        lines = path.read_text().splitlines() if path.exists() else []
        return next((int(x.split()[0]) for x in lines if float(x.split()[1]) == value), 0)

    return int(service.until(find, 20))


def times(service: Service, file: str, value: float) -> int:
    lines = (service.folder / file).read_text().splitlines()
    return sum(float(line.split()[1]) == value for line in lines)


def test_what_was_executing_is_answered_502_at_once_and_not_repeated(service: Service) -> None:
    asked = Asked(service, "once", 11.0)
    pid = computing(service, "once", 11.0)
    died = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    seen = asked.answer()
    figure(f"answered {(seen.ended - died) * 1000:.0f} ms after its worker's death")
    assert (seen.status, seen.body["code"]) == (502, "WORKER_LOST")
    assert seen.headers["x-should-retry"] == "false"
    assert seen.ended - died < 2.0
    assert times(service, "once", 11.0) == 1


def test_what_is_safe_to_repeat_is_repeated(service: Service) -> None:
    service.wait_ready()
    asked = Asked(service, "again", 12.0)
    os.kill(computing(service, "again", 12.0), signal.SIGKILL)
    assert asked.answer().status == 200
    assert times(service, "again", 12.0) == 2


def test_what_had_not_begun_goes_to_another_worker(service: Service) -> None:
    service.wait_ready()
    # Each worker has taken more than the one row that it computes.
    asked = [Asked(service, "once", 100.0 + n) for n in range(4)]
    pid = computing(service, "once", 100.0)
    os.kill(pid, signal.SIGKILL)
    seen = [one.answer() for one in asked]
    assert sorted(s.status for s in seen) == [200, 200, 200, 502]
    assert all(times(service, "once", s.asked) == 1 for s in seen)


def test_an_input_that_was_there_at_two_deaths_is_refused_from_then_on(service: Service) -> None:
    service.wait_ready()
    assert [service.predict("segfault", b"666").status for _ in range(3)] == [502, 502, 422]
    refused = service.predict("segfault", b"666")
    assert (refused.status, refused.json()["code"]) == (422, "INPUT_REFUSED")
    assert service.predict("segfault", b"1").status == 200
    service.wait_ready()
    slots = [service.slot(s) for s in slots_of(service, "segfault")]
    assert sum(slot["generation"] - 1 for slot in slots) == 2
    assert "signal 11" in {slot["last_exit"] for slot in slots}


def test_a_deadly_input_that_may_be_repeated_kills_two_workers_and_no_third(
    service: Service,
) -> None:
    assert service.predict("deadly", b"666").status == 422
    service.wait_ready()
    slots = [service.slot(s) for s in slots_of(service, "deadly")]
    assert sum(slot["generation"] - 1 for slot in slots) == 2


def _more_than(service: Service, before: int) -> bool:
    return times(service, "again", 77.0) > before


def test_an_input_that_was_only_a_witness_is_not_refused(service: Service) -> None:
    """Workers are killed from outside again and again while they compute the same input."""
    for _ in range(3):
        service.wait_ready()
        before = times(service, "again", 77.0) if (service.folder / "again").exists() else 0
        asked = Asked(service, "again", 77.0)
        service.until(partial(_more_than, service, before), 20)
        lines = (service.folder / "again").read_text().splitlines()
        os.kill(int(lines[-1].split()[0]), signal.SIGKILL)
        assert asked.answer().status == 200


def test_answers_never_go_to_somebody_else_while_workers_die(service: Service) -> None:
    service.wait_ready()
    with Load(service, "/predictions/echo", lambda c, n: c * 1e5 + n, clients=8) as load:
        for _ in range(6):
            load.wait_for(30)
            pids = [service.slot(s)["pid"] for s in slots_of(service, "echo")]
            os.kill(next(pid for pid in pids if pid), signal.SIGKILL)
    assert load.bad() == []
    assert [s for s in load.seen if s.body["value"] != 2 * s.asked] == []


def test_a_late_answer_is_nobodys(service: Service) -> None:
    service.wait_ready()
    late = [service.predict("sleeper", b"0.8", **{"X-Request-Timeout": "0.2"}) for _ in range(2)]
    assert [reply.status for reply in late] == [504, 504]
    with Load(service, "/predictions/sleeper", lambda c, n: 0.01 + c / 1000, clients=4) as load:
        load.wait_for(40)
    assert load.bad() == []
    assert [s for s in load.seen if abs(s.body["value"] - s.asked) > 1e-6] == []


def test_a_client_that_left_costs_nothing_any_more(service: Service) -> None:
    """Many that give up at once neither jam the batcher nor leave anything counted or leased."""
    service.wait_ready()

    def give_up(number: int) -> None:
        with pytest.raises(TimeoutError):
            service.request("POST", "/predictions/sleeper", b"0.2", timeout=0.05)

    threads = [threading.Thread(target=give_up, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    began = time.monotonic()
    assert service.predict("sleeper", b"0.01").status == 200
    figure(f"the first one after 40 that left: {time.monotonic() - began:.3f} s")
    assert time.monotonic() - began < 5

    def quiet() -> bool:
        held = service.control("GET", "/leases")[1]
        flights = [n for proxy in held["in_flight"].values() for n in proxy.values()]
        queued = [n for proxy in held["queued"].values() for n in proxy.values()]
        arenas = [a for a in held["arena"].values() if a["free"] != a["total"]]
        return not any(flights) and not any(queued) and not arenas

    service.until(quiet, 10)


@pytest.mark.parametrize("again_while_loading", [False, True])
def test_all_workers_killed_in_one_moment_come_back_and_nothing_waits_for_ever(
    service: Service, again_while_loading: bool
) -> None:
    service.wait_ready()
    with Load(service, "/predictions/echo", lambda c, n: c * 1e5 + n, clients=8) as load:
        load.wait_for(30)
        for _ in range(1 + again_while_loading):
            for pid in service.pids().values():
                with suppress(ProcessLookupError):  # the status may still name the one before
                    os.kill(pid, signal.SIGKILL)
        load.wait_for(60)
    assert load.bad() == []
    slowest = max(s.ended - s.began for s in load.seen)
    figure(f"every worker killed: the slowest of {len(load.seen)} answers took {slowest:.3f} s")
    service.wait_ready()

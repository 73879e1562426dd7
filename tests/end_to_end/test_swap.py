"""Swaps under clients: nobody notices; and whatever goes wrong, the old version goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .service import Service, running
from .swap_clients import Clients
from .swap_models import model, reload, steps, version_of, weights


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    safe = 'retry = "safe"'
    config = (
        model(folder, "pair", safe)
        + model(folder, "only", safe, 'devices = ["cpu0"]', 'hold = "20s"')
        + model(folder, "brief", safe, 'devices = ["cpu1"]', 'hold = "200ms"')
    )
    with running(folder, config) as service:
        yield service


@pytest.fixture
def only(service: Service) -> Service:
    """With the model `only` at version 1."""
    if version_of(service, "only") != "1":
        assert reload(service, "only", 1, set=PLAIN)["state"] == "done"
    return service


PLAIN = {"seconds": 0, "raises": False, "forward_raises": False}


@pytest.mark.parametrize(
    ("name", "strategy"), [("pair", "auto"), ("pair", "in-place"), ("only", "in-place")]
)
@pytest.mark.parametrize("swaps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_swaps_back_and_forth_under_sixteen_clients_lose_nothing(
    service: Service, name: str, strategy: str, swaps: int
) -> None:
    how = "surge" if strategy == "auto" else strategy
    with Clients(service, name) as clients:
        for n in range(swaps):
            change = reload(service, name, 1 + (n + 1) % 2, strategy=strategy)
            assert change["state"] == "done", steps(change)
            assert f": {how} (" in steps(change)
            # Only who leaves an old worker at work takes the time to capture before it serves.
            slots = [s for s in service.status()["slots"] if s["model"] == name]
            assert {"graphs" in s["seconds"] for s in slots} == {how == "surge"}
    assert not clients.problems()
    assert clients.versions() == {"1", "2"}


def test_a_dry_run_prints_the_arithmetic_of_each_slot_and_touches_nothing(service: Service) -> None:
    before, changes = service.pids(), len(service.control("GET", "/changes")[1]["changes"])
    done = service.ctl("reload-model", "pair", "--version", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("surge") == 2
    for words in ("at rest", "for batches", "safety", "wanted", "free"):
        assert words in done.stdout
    done = service.ctl("reload-model", "only", "--strategy", "in-place", "--dry-run", "-o", "json")
    (row,) = json.loads(done.stdout)["plan"]
    assert (row["slot"], row["strategy"]) == ("cpu0.1", "in-place")
    assert "requests are held for up to 20s" in row["why"]
    assert row["need_bytes"] > 0
    assert row["room_bytes"] > 0
    assert service.pids() == before
    assert len(service.control("GET", "/changes")[1]["changes"]) == changes


BAD = {
    "missing": (["--version", "77"], "w-77.safetensors: No such file"),
    "truncated": (["--version", "70"], "bytes expected|bytes, "),
    "shape": (["--version", "71"], "factor has shape [2], [1] is wanted"),
    "too large": (["--version", "2", "--set", "static=5368709120"], "does not fit on cpu0: 5GiB"),
    "golden": (["--version", "2", "--set", "golden=/nowhere.json"], "/nowhere.json"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_version_that_fails_its_check_touches_nothing(only: Service, bad: str) -> None:
    words, expected = BAD[bad]
    if bad == "truncated":
        path = weights(only.folder, 70)
        path.write_bytes(path.read_bytes()[:-8])
    if bad == "shape":
        weights(only.folder, 71, [1.0, 2.0])
    pids = only.pids()
    with Clients(only, "only") as clients:
        done = only.ctl("reload-model", "only", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(part in done.stderr for part in expected.split("|")), done.stderr
    assert "nothing was touched" in done.stderr
    assert only.pids() == pids
    assert not clients.problems()
    assert clients.versions() == {"1"}


@pytest.mark.parametrize("strategy", ["surge", "in-place"])
@pytest.mark.parametrize("how", ["raises", "forward_raises", "golden"])
def test_a_version_that_does_not_pass_the_gate_is_rolled_back_and_exits_with_6(
    only: Service, how: str, strategy: str
) -> None:
    setting = f"{how}=true"
    if how == "golden":
        path = only.folder / "golden.json"
        path.write_text(json.dumps({"inputs": {"x": [[1.0]]}, "outputs": {"y": [[9.0]]}}))
        setting = f"golden={path}"
    with Clients(only, "only") as clients:
        done = only.ctl(
            "reload-model", "only", "--version", "2", "--strategy", strategy, "--set", setting
        )
    assert done.returncode == 6, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not clients.problems()
    assert clients.versions() == {"1"}
    assert version_of(only, "only") == "1"


def test_when_the_old_version_does_not_come_back_everything_says_that_there_is_no_model(
    only: Service,
) -> None:
    old = only.folder / "w-1.safetensors"
    kept = old.read_bytes()
    old.unlink()
    try:
        done = only.ctl(
            "reload-model", "only", "--version", "2", "--strategy", "in-place", "--set", "raises=1"
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "did not come back" in done.stderr
        assert only.ctl("status").returncode == 3
        (found,) = (m for m in only.status()["models"] if m["name"] == "only")
        assert (found["state"], found["ready"]) == ("failed", 0)
        assert "w-1.safetensors" in found["reason"]
        ready = only.until(lambda: (r := only.get("/readyz")).status == 503 and r)
        assert b"only" in ready.body
        assert only.get("/v2/models/only/ready").status == 503
        assert only.get("/v2/health/ready").status == 503
        refused = only.predict("only", b"1")
        assert refused.status == 503
        assert "Retry-After" in refused.headers
        assert only.predict("pair", b"1").status == 200
    finally:
        old.write_bytes(kept)
    assert only.ctl("reset-failed", "only").returncode == 0
    only.wait_ready()
    assert only.predict("only", b"1").json()["version"] == "1"


def test_the_death_of_the_old_worker_during_a_surge_is_nobodys_loss(only: Service) -> None:
    with Clients(only, "only") as clients:
        old = only.pids()["cpu0.1"]
        asked = {"version": "2", "strategy": "surge", "set": {"seconds": 1.0}}
        status, begun = only.control("POST", "/models/only/reload", asked)
        assert status == 200
        only.until(lambda: "is loading" in only.slot("cpu0.1")["successor"])
        os.kill(old, signal.SIGKILL)
        _, change = only.control("GET", f"/changes/{begun['change']}?wait=60")
    assert change["state"] == "done", steps(change)
    assert not clients.problems()


def test_the_death_of_the_successor_brings_the_old_version_back(only: Service) -> None:
    with Clients(only, "only") as clients:
        old = only.slot("cpu0.1")["generation"]
        asked = {"version": "2", "strategy": "in-place", "set": {"seconds": 5.0}}
        status, begun = only.control("POST", "/models/only/reload", asked)
        assert status == 200

        def is_loading() -> Any:
            slot = only.slot("cpu0.1")
            return slot["generation"] > old and slot["phase"] == "weights" and slot["pid"]

        os.kill(only.until(is_loading), signal.SIGKILL)
        _, change = only.control("GET", f"/changes/{begun['change']}?wait=60")
    assert change["state"] == "rolled-back", steps(change)
    assert not clients.problems()
    assert clients.versions() == {"1"}


def test_clients_that_leave_during_the_load_do_not_stop_it(only: Service) -> None:
    asked = {"version": "2", "strategy": "in-place", "set": {"seconds": 1.5}}
    status, begun = only.control("POST", "/models/only/reload", asked)
    assert status == 200
    only.until(lambda: only.slot("cpu0.1")["phase"] == "weights")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            only.request("POST", "/predictions/only", b"1", timeout=0.2)
    _, change = only.control("GET", f"/changes/{begun['change']}?wait=60")
    assert change["state"] == "done", steps(change)
    assert only.predict("only", b"3").json()["value"] == 6


@pytest.mark.parametrize("strategy", ["auto", "in-place"])
def test_a_swap_right_after_a_crash_works(only: Service, strategy: str) -> None:
    os.kill(only.pids()["cpu0.1"], signal.SIGKILL)
    change = reload(only, "only", 2, strategy=strategy)
    assert change["state"] == "done", steps(change)
    assert change["took_s"] < 10
    assert only.predict("only", b"3").json()["value"] == 6


def test_what_cannot_be_held_is_told_when_to_come_again(service: Service) -> None:
    slow = {"seconds": 1.5}
    with Clients(service, "brief") as clients:
        change = reload(service, "brief", 2, strategy="in-place", set=slow)
        assert change["state"] == "done", steps(change)
    refused = [a for a in clients.answers if a.status == 503]
    assert refused
    assert all(int(a.retry_after) >= 1 for a in refused)
    assert {a.status for a in clients.answers} == {200, 503}
    assert all(a.wrong.startswith("status 503") for a in clients.answers if a.wrong)
    # An operator who accepts the gap gets all of them held for so long.
    with Clients(service, "brief") as clients:
        done = service.ctl(
            "reload-model", "brief@1", "--strategy", "in-place", "--allow-gap", "30s"
        )
        assert done.returncode == 0, done.stderr
    assert not clients.problems()
    # The last start took 1.5 s, and the next may too.
    done = service.ctl("reload-model", "brief@2", "--strategy", "in-place", "--allow-gap", "1s")
    assert done.returncode == 1
    assert "the only ready worker of brief" in done.stderr
    assert "--allow-gap accepts 1s" in done.stderr
    assert version_of(service, "brief") == "1"


def test_a_canary_gets_its_share_and_keeps_its_sessions(service: Service) -> None:
    done = service.ctl("reload-model", "pair", "--version", "2", "--canary", "30%")
    assert done.returncode == 0, done.stderr
    change = service.status()["changes"][0]
    assert change["state"] == "waiting"

    def ask(**headers: str) -> str:
        reply = service.predict("pair", b"1", **headers)
        version = str(reply.headers["Gpusup-Model-Version"])
        assert reply.json()["value"] == float(version)
        return version

    got = [ask() for _ in range(200)]
    assert 25 <= got.count("2") <= 100
    for session in map(str, range(20)):
        assert len({ask(**{"Gpusup-Session": session}) for _ in range(4)}) == 1
    sessions = [ask(**{"Gpusup-Session": f"s{n}"}) for n in range(100)]
    assert 10 <= sessions.count("2") <= 50
    # By path, whatever the share is.
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}
    for version in ("1", "2"):
        raw = service.predict(f"pair/{version}", b"2")
        assert (raw.headers["Gpusup-Model-Version"], raw.json()["value"]) == (
            version,
            2 * float(version),
        )
        path = f"/v2/models/pair/versions/{version}/infer"
        v2 = service.request("POST", path, json.dumps({"inputs": [tensor]}).encode()).json()
        assert (v2["model_version"], v2["outputs"][0]["data"]) == (version, [2 * float(version)])
    assert service.predict("pair/7", b"2").status == 404
    with Clients(service, "pair") as clients:
        assert service.ctl("promote", "pair").returncode == 0
    assert not clients.problems()
    assert version_of(service, "pair") == "2"
    assert {ask() for _ in range(20)} == {"2"}
    with Clients(service, "pair") as clients:
        assert service.ctl("rollback", "pair").returncode == 0
    assert not clients.problems()
    assert {ask() for _ in range(20)} == {"1"}


def test_a_canary_can_be_taken_back(service: Service) -> None:
    with Clients(service, "pair") as clients:
        assert service.ctl("reload-model", "pair@2", "--canary", "0.5").returncode == 0
        assert service.ctl("rollback", "pair").returncode == 6
    assert not clients.problems()
    assert version_of(service, "pair") == "1"
    assert service.ctl("promote", "pair").returncode == 1


def test_two_swaps_at_once_are_refused_with_the_id_of_the_first_which_can_be_aborted(
    only: Service,
) -> None:
    began = time.monotonic()
    started = only.ctl(
        "reload-model", "only@2", "--strategy", "surge", "--set", "seconds=30", "--no-wait"
    )
    assert started.returncode == 0
    change = started.stdout.split()[1]
    second = only.ctl("reload-model", "only@3")
    assert second.returncode == 1
    assert f"change {change} " in second.stderr
    status, body = only.control("POST", "/models/only/reload", {"version": "3"})
    assert (status, body["change"]) == (409, change)
    assert only.ctl("abort", change).returncode == 0
    ended = only.ctl("change", change, "--wait", "-o", "json")
    assert ended.returncode == 1
    found = json.loads(ended.stdout)
    assert (found["state"], found["id"], found["kind"]) == ("aborted", change, "reload")
    assert found["steps"]
    assert 0 < found["took_s"] < time.monotonic() - began
    listed = only.ctl("changes").stdout
    assert "aborted" in listed
    assert only.ctl("abort", change).returncode == 1
    assert only.predict("only", b"1").json()["version"] == "1"


def test_events_tell_the_steps_of_a_swap(only: Service) -> None:
    change = reload(only, "only", 2)
    _, found = only.control("GET", "/events?since=0")
    told = [e for e in found["events"] if e["kind"] == "change"]
    mine = [e for e in told if e["change"] == change["id"]]
    assert len(mine) == len(change["steps"])
    assert all(e["model"] == "only" for e in mine)


def test_some_slots_only_are_given_another_version_and_taken_back(service: Service) -> None:
    slots = [s["slot"] for s in service.status()["slots"] if s["model"] == "pair"]
    with Clients(service, "pair") as clients:
        done = service.ctl("reload-model", "pair@2", "--slots", slots[0])
        assert done.returncode == 0, done.stderr
        assert f"{slots[1]} as before" in done.stdout
        service.until(lambda: {a.version for a in clients.answers[-50:]} == {"1", "2"})
        held = {s["slot"]: s["version"] for s in service.status()["slots"]}
        assert (held[slots[0]], held[slots[1]]) == ("2", "1")
        # After a crash it is started with what it was given.
        os.kill(service.pids()[slots[0]], signal.SIGKILL)
        service.until(
            lambda: (s := service.slot(slots[0]))["state"] == "ready" and s["version"] == "2"
        )
        assert service.ctl("rollback", "pair").returncode == 0
    assert not clients.problems()
    assert service.slot(slots[0])["version"] == "1"

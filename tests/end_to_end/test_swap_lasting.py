"""What outlives a swap, and what must not: wanted versions, configurations, leftovers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from .service import Service, running
from .swap_clients import Clients
from .swap_models import model, reload, steps, version_of


def test_wanted_versions_survive_a_restart_of_the_supervisor(folder: Path) -> None:
    config = model(folder, "pair", 'retry = "safe"')
    with running(folder, config) as service:
        assert reload(service, "pair", 2)["state"] == "done"
        assert reload(service, "pair", 3)["state"] == "done"
        slot = service.status()["slots"][0]["slot"]
        assert service.stop() == 0
        service.start()
        answer = service.predict("pair", b"2").json()
        assert (answer["value"], answer["version"]) == (6, "3")
        assert version_of(service, "pair") == "3"
        # Ids go on, and so does what a rollback goes back to.
        done = service.ctl("rollback", "pair")
        assert done.returncode == 0, done.stderr
        assert version_of(service, "pair") == "2"
        assert service.ctl("reload-model", "pair@3", "--slots", slot).returncode == 0
        assert service.stop() == 0
        service.start()
        held = {s["slot"]: s["version"] for s in service.status()["slots"]}
        assert held.pop(slot) == "3"
        assert set(held.values()) == {"2"}


@pytest.fixture
def changing(short_path: Path) -> Any:
    config = model(short_path, "stays", 'devices = ["cpu0"]') + model(
        short_path, "changes", 'devices = ["cpu1"]', 'retry = "safe"'
    )
    with running(short_path, config) as service:
        yield service


def test_a_configuration_read_again_becomes_changes(changing: Service) -> None:
    service = changing
    head, _, _ = service.config_path.read_text().partition("[models.")
    stays = model(service.folder, "stays", 'devices = ["cpu0"]')
    before = service.pids()["cpu0"]

    def write(*models: str) -> None:
        service.config_path.write_text(head + "".join(models))

    # Changed and added.
    write(
        stays,
        model(service.folder, "changes", 'devices = ["cpu1"]', 'retry = "safe"', 'version = "2"'),
        model(service.folder, "comes", 'devices = ["cpu1"]'),
    )
    with Clients(service, "changes") as clients:
        done = service.ctl("reload-config")
        assert done.returncode == 0, done.stdout + done.stderr
    assert not clients.problems()
    assert clients.versions() == {"1", "2"}
    assert service.predict("comes", b"3").json()["value"] == 3
    kinds = {
        (c["kind"], c["model"], c["state"])
        for c in service.control("GET", "/changes")[1]["changes"]
    }
    assert kinds == {("reload", "changes", "done"), ("add", "comes", "done")}
    # Once more, and nothing happens.
    assert "nothing has changed" in service.ctl("reload-config").stdout
    # Broken: refused whole, with the line that names it.
    write(stays, model(service.folder, "changes", 'versoin = "3"'))
    done = service.ctl("reload-config")
    assert done.returncode == 1
    assert "versoin" in done.stderr
    assert service.predict("comes", b"3").status == 200
    # A handler that can't be imported fails its check; the old one goes on.
    bad = model(service.folder, "changes", 'devices = ["cpu1"]').replace(":Stored", ":Nothing")
    write(stays, bad, model(service.folder, "comes", 'devices = ["cpu1"]'))
    done = service.ctl("reload-config")
    assert done.returncode == 1, done.stdout
    assert "Nothing" in done.stderr
    assert service.predict("changes", b"3").json()["version"] == "2"
    # It is still not what the file says, so the next time it is tried again. Removed, by a signal.
    write(stays)
    assert service.process
    service.process.send_signal(signal.SIGHUP)
    service.until(lambda: service.predict("comes", b"3").status == 404)
    service.until(lambda: service.predict("changes", b"3").status == 404)
    service.until(lambda: set(service.pids()) == {"cpu0"})
    assert service.pids()["cpu0"] == before
    assert service.predict("stays", b"3").json()["value"] == 3


def leftovers(service: Service) -> dict[str, int]:
    assert service.process
    supervisor = psutil.Process(service.process.pid)
    every = [supervisor, *supervisor.children(recursive=True)]
    proxies = [p for p in every if "proxy" in " ".join(p.cmdline())]
    room = {d["device"]: d["room"] for d in service.control("GET", "/plan")[1]["devices"]}
    return {
        "supervisor fds": supervisor.num_fds(),
        "proxy fds": sum(p.num_fds() for p in proxies),
        "zombies": sum(p.status() == psutil.STATUS_ZOMBIE for p in every),
        "processes": len(every),
        "files": len(list(service.run_dir.iterdir())),
        "room MiB": round(sum(room.values()) / 2**20 / 64),
    }


@pytest.mark.parametrize("swaps", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_repeated_swaps_leave_nothing_behind(short_path: Path, swaps: int) -> None:
    with running(short_path, model(short_path, "m", 'retry = "safe"')) as service:
        for n in range(2):  # the first ones still learn
            assert reload(service, "m", 2 - n % 2)["state"] == "done"
        assert service.process
        supervisor = psutil.Process(service.process.pid)
        before, resident = leftovers(service), supervisor.memory_info().rss
        for n in range(swaps):
            strategy = ("surge", "in-place")[n % 2]
            change = reload(service, "m", 2 - n % 2, strategy=strategy)
            assert change["state"] == "done", steps(change)
        # Watchers and reapers come by within a few seconds.
        service.until(lambda: leftovers(service) == before, 15)
        grown = supervisor.memory_info().rss - resident
        assert grown < 5 * 2**20, f"{grown} bytes in {swaps} swaps"


def test_many_models_share_a_device_by_taking_turns(short_path: Path) -> None:
    """There is room for two of the three."""
    lines = (
        'devices = ["cpu0"]', "on_demand = true", 'idle_unload = "3s"', 'static = "350MiB"',
        "settings = { mib = 200 }",
    )  # fmt: skip
    config = '[devices]\ncpu_memory = "1000MiB"\n' + "".join(
        model(short_path, name, *lines) for name in ("a", "b", "c")
    )
    with running(short_path, config) as service:
        starts = {n: s["generation"] for n, s in by_model(service).items()}
        assert starts == {"a": 0, "b": 0, "c": 0}
        assert service.get("/readyz").status == 200
        # Concurrent first requests load once, and all wait for it.
        with Clients(service, "a") as clients:
            pass
        assert not clients.problems()
        assert by_model(service)["a"]["generation"] == 1
        # One that leaves does not stop the load; one without time is told so.
        with pytest.raises(TimeoutError):
            service.request("POST", "/predictions/b", b"1", timeout=0.01)
        service.until(lambda: by_model(service)["b"]["state"] == "ready")
        assert service.predict("b", b"2").json()["value"] == 2
        # The third needs room: the one that was used longest ago leaves.
        assert service.predict("b", b"2").status == 200
        assert service.predict("c", b"2").json()["value"] == 2
        states = {n: s["state"] for n, s in by_model(service).items()}
        assert states == {"a": "empty", "b": "ready", "c": "ready"}
        # Idle ones leave by themselves.
        service.until(lambda: not service.pids(), 20)
        assert {m["state"] for m in service.status()["models"]} == {"unloaded"}
        assert service.predict("a", b"2").json()["value"] == 2


def by_model(service: Service) -> dict[str, dict[str, Any]]:
    return {s["model"]: s for s in service.status()["slots"]}


def test_a_stand_in_on_another_device_serves_while_the_only_slot_is_swapped(
    short_path: Path,
) -> None:
    """Too large to be there twice, and the other device has nothing to do."""
    config = model(short_path, "m", 'devices = ["cpu0"]', 'static = "1700MiB"', 'retry = "safe"')
    with running(short_path, config) as service:
        with Clients(service, "m") as clients:
            change = reload(service, "m", 2, set={"seconds": 3.0})
            assert change["state"] == "done", steps(change)
        assert "cpu0: spare" in steps(change)
        assert not clients.problems()
        # Nobody waited for the three seconds that the load took.
        assert max(a.took_s for a in clients.answers) < 2.0
        # The stand-in leaves when it has answered what it had.
        service.until(lambda: {s["slot"] for s in service.status()["slots"]} == {"cpu0"}, 10)


def test_a_supervisor_that_is_killed_in_the_middle_of_a_swap_starts_with_the_old_version(
    short_path: Path,
) -> None:
    with running(short_path, model(short_path, "m", 'devices = ["cpu0"]')) as service:
        asked = {"version": "2", "strategy": "in-place", "set": {"seconds": 30}}
        assert service.control("POST", "/models/m/reload", asked)[0] == 200
        service.until(lambda: service.slot("cpu0")["phase"] == "weights")
        assert service.process
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait()
        service.start()
        assert service.predict("m", b"3").json()["version"] == "1"

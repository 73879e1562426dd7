from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpusup.supervisor.notify import Notify


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_over_a_path_and_over_an_abstract_name(
    abstract: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"/tmp/gpusup-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        notify = Notify.from_environment()
        notify.ready("8 workers\nready")
        notify.status("degraded")
        notify.watchdog()
        notify.extend(12.5)
        notify.reloading()
        notify.stopping("draining")
        got = [systemd.recv(4096).decode() for _ in range(6)]
        notify.close()
    Path(name).unlink(missing_ok=True)
    assert got[0] == f"READY=1\nMAINPID={os.getpid()}\nSTATUS=8 workers ready"
    assert got[1:4] == ["STATUS=degraded", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=12500000"]
    assert got[4].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert got[5] == "STOPPING=1\nSTATUS=draining"


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify = Notify.from_environment()
    notify.ready("x")
    notify.watchdog()
    notify.close()


def test_a_manager_that_is_gone_or_deaf_stops_nobody(tmp_path: Path) -> None:
    notify = Notify("/tmp/gpusup-no-such-socket")
    notify.ready()
    notify.close()
    name = f"\0gpusup-deaf-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(name)
        notify = Notify("@" + name[1:])
        for _ in range(1000):
            notify.watchdog()
        notify.close()


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [("30000000", None, 15.0), ("30000000", "1", 0.0), ("", None, 0.0), ("junk", None, 0.0)],
)
def test_the_watchdog_is_pinged_twice_in_its_time(
    usec: str, pid: str | None, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    assert Notify.from_environment().interval_s == interval

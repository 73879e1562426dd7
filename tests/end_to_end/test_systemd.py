"""The service under a stand-in for systemd: what it tells it, and the port it is given."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .service import HANDLERS, Service

WATCHDOG_S = 1.0
LOAD_S = 4.0

CONFIG = f"""
[models.slow]
handler = "{HANDLERS}:SlowLoad"
devices = ["cpu0"]
settings = {{ seconds = {LOAD_S} }}

[models.env]
handler = "env.py:Env"
devices = ["cpu1"]
required = false
"""

#: Answers with the names of the variables that its process has.
ENV_HANDLER = """
import os
import torch
from gpusup.worker.model import Model

class Env(Model):
    def load(self, device, version):
        pass
    def decode(self, request):
        return torch.zeros(1)
    def forward(self, batch):
        return batch
    def encode(self, row, request):
        return " ".join(os.environ)
"""

#: As systemd does it: descriptor 3, and the pid of the very process that is then exec'ed.
LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "gpusup.socket"}
os.execv(sys.argv[2], sys.argv[2:])
"""


class Manager:
    """Receives what services tell systemd: (monotonic time, sender's pid, text)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[tuple[float, int, str]] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            data, control, _, _ = self._sock.recvmsg(8192, socket.CMSG_SPACE(12))
            if data == b"end":
                return
            pid = struct.unpack("3i", control[0][2])[0]
            self.heard.append((time.monotonic(), pid, data.decode()))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(self._sock.getsockname())
            sock.send(b"end")
        self._reader.join()
        self._sock.close()

    def said(self, line: str, since: float = 0.0) -> list[float]:
        """When a line with that beginning came."""
        return [
            at
            for at, _, text in list(self.heard)
            if at >= since and any(one.startswith(line) for one in text.splitlines())
        ]


class Unit(Service):
    """A service that is started as systemd would start it."""

    def start_under(self, manager: Manager, listener: socket.socket | None = None) -> None:
        command = [sys.executable, "-m", "gpusup.supervisor", "run", str(self.config_path)]
        fds: tuple[int, ...] = ()
        if listener is not None:
            fds = (listener.fileno(),)
            command = [sys.executable, "-c", LAUNCHER, str(fds[0]), *command]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                start_new_session=True,
                cwd=self.folder,
                env={
                    **os.environ,
                    "NOTIFY_SOCKET": manager.address,
                    "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
                },
            )


@contextmanager
def unit(folder: Path, address: str, config: str = CONFIG) -> Iterator[tuple[Unit, Manager]]:
    (folder / "env.py").write_text(ENV_HANDLER)
    service, manager = Unit(folder, config), Manager(address)
    try:
        yield service, manager
    finally:
        service.end()
        manager.close()


@pytest.mark.parametrize("form", ["path", "abstract"])
def test_systemd_hears_how_the_service_is(short_path: Path, form: str) -> None:
    name = str(short_path / "notify")
    with unit(short_path, f"@{name}" if form == "abstract" else name) as (service, manager):
        service.start_under(manager)
        service.until(lambda: manager.said("READY=1"))
        # Port and control socket answer; the model is still loading.
        assert service.get("/livez").status == 200
        status = service.status()
        assert status["state"] == "starting"
        assert manager.said("EXTEND_TIMEOUT_USEC=")[0] <= manager.said("READY=1")[0]
        assert manager.said(f"MAINPID={status['pid']}")

        service.wait_ready()
        loading_s = time.monotonic() - manager.said("READY=1")[0]
        pings = len(manager.said("WATCHDOG=1"))
        # Twice within the limit, also while a model loads; the box may be busy.
        assert pings >= loading_s / WATCHDOG_S, (pings, loading_s)
        assert manager.said("STATUS=starting")
        service.until(lambda: manager.said("STATUS=ready"))

        names = set(service.predict("env", b"x").json().split())
        assert not [n for n in names if re.match("NOTIFY|WATCHDOG|LISTEN", n)]

        began = time.monotonic()
        assert service.stop() == 0
        assert manager.said("STOPPING=1", began)
        assert manager.said("EXTEND_TIMEOUT_USEC=", began)
        assert {pid for _, pid, _ in manager.heard} == {status["pid"]}, "others spoke to systemd"


def test_a_blocked_main_loop_stops_the_pings(short_path: Path) -> None:
    with unit(short_path, str(short_path / "notify")) as (service, manager):
        service.start_under(manager)
        service.wait_ready()
        assert service.process
        os.kill(service.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        service.until(lambda: time.monotonic() > stopped + 2 * WATCHDOG_S)
        assert manager.said("WATCHDOG=1", stopped + WATCHDOG_S / 2) == []
        # What systemd does then; the log gets the stacks of what stood still.
        os.kill(service.process.pid, signal.SIGABRT)
        os.kill(service.process.pid, signal.SIGCONT)
        assert service.process.wait(30) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in service.log()


def test_a_port_that_systemd_holds_refuses_nobody_during_a_restart(short_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        unit(short_path, str(short_path / "notify")) as (service, manager),
    ):
        configured, service.port = service.port, int(listener.getsockname()[1])
        service.start_under(manager, listener)
        service.until(lambda: manager.said("READY=1"))
        assert service.status()["listen"].endswith(f":{service.port}")
        assert service.get("/livez").status == 200
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", configured))
        service.wait_ready()
        names = set(service.predict("env", b"x").json().split())
        assert not [n for n in names if n.startswith("LISTEN")]

        assert service.stop() == 0
        waiting = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        waiting.request("GET", "/livez")
        service.start_under(manager, listener)
        assert waiting.getresponse().status == 200
        waiting.close()

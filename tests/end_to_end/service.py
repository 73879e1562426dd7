"""A running gpusup for tests: started as an operator would, asked over its own sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

HANDLERS = Path(__file__).parents[1] / "handlers.py"
LIMIT_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class _ControlConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Reply:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)


class Service:
    """`folder` holds its configuration, run and state directories. `port` is the front door."""

    def __init__(self, folder: Path, config: str, *, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.run_dir = folder / "run"
        self.config_path = folder / "gpusup.toml"
        self.log_path = folder / "log"
        self._env = env or {}
        server = (
            f'[server]\nlisten = "127.0.0.1:{self.port}"\nrun_dir = "{self.run_dir}"\n'
            f'state_dir = "{folder / "state"}"\n'
        )
        # A test's own [server] keys come right behind ours.
        extra, config = ("", config)
        if config.lstrip().startswith("[server]"):
            head, _, config = config.lstrip().removeprefix("[server]").partition("\n[")
            extra, config = head + "\n", f"[{config}" if config else ""
        self.config_path.write_text(server + extra + config)
        self.process: subprocess.Popen[bytes] | None = None

    # -- life -------------------------------------------------------------------------------------

    def start(self, *, wait_ready: bool = True) -> Service:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpusup.supervisor", "run", str(self.config_path)],
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
                start_new_session=True,
                cwd=self.folder,
            )
        if wait_ready:
            self.wait_ready()
        return self

    def wait_ready(self, limit_s: float = LIMIT_S) -> None:
        def ready() -> bool:
            assert self.process
            assert self.process.poll() is None, self.log()
            status = self.try_status()
            return bool(status) and status["state"] == "ready" and self.get("/readyz").status == 200

        self.until(ready, limit_s)

    def stop(self, limit_s: float = 30.0) -> int:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def end(self) -> None:
        """Whatever the test did, nothing may be left."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def log(self) -> str:
        """Its end, to be shown."""
        return self.whole_log()[-8000:]

    def whole_log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All living descendants of the supervisor."""
        assert self.process
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def until(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """The condition is of another process, so it can only be looked at again and again."""
        end = time.monotonic() + limit_s
        while True:
            if value := condition():
                return value
            assert time.monotonic() < end, f"not within {limit_s:g} s\n{self.log()}"
            time.sleep(0.01)

    # -- the front door ---------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def predict(self, model: str, body: bytes, **headers: str) -> Reply:
        return self.request("POST", f"/predictions/{model}", body, headers)

    def infer(self, model: str, inputs: list[dict[str, Any]], **parameters: Any) -> Reply:
        asked: dict[str, Any] = {"inputs": inputs}
        if parameters:
            asked["parameters"] = parameters
        return self.request("POST", f"/v2/models/{model}/infer", json.dumps(asked).encode())

    # -- control ----------------------------------------------------------------------------------

    def control(
        self, method: str, path: str, body: Any = None, timeout: float = 90.0
    ) -> tuple[int, Any]:
        connection = _ControlConnection(str(self.run_dir / "control.sock"), timeout)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            data = response.read()
            kind = response.headers.get("Content-Type", "")
            return response.status, json.loads(data) if "json" in kind else data.decode()
        finally:
            connection.close()

    def try_status(self) -> dict[str, Any]:
        try:
            status, body = self.control("GET", "/status")
        except OSError:
            return {}
        return dict(body) if status == 200 else {}

    def status(self) -> dict[str, Any]:
        status, body = self.control("GET", "/status")
        assert status == 200, body
        return dict(body)

    def slot(self, name: str) -> dict[str, Any]:
        return next(dict(s) for s in self.status()["slots"] if s["slot"] == name)

    def pids(self) -> dict[str, int]:
        return {s["slot"]: s["pid"] for s in self.status()["slots"] if s["pid"]}

    def change(self, path: str, body: Any = None) -> dict[str, Any]:
        """Ask for a change and wait for its end."""
        status, answer = self.control("POST", path, body)
        assert status == 200, answer
        status, view = self.control("GET", f"/changes/{answer['change']}?wait=60")
        assert status == 200, view
        return dict(view)

    def ctl(self, *words: str, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gpusup.supervisor.ctl", "--socket", str(self.run_dir), *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@contextmanager
def running(
    folder: Path, config: str, *, wait_ready: bool = True, env: dict[str, str] | None = None
) -> Iterator[Service]:
    service = Service(folder, config, env=env)
    try:
        yield service.start(wait_ready=wait_ready)
    finally:
        service.end()

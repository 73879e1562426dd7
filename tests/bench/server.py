"""One server under test: start it, wait until it answers, pin its processes, end all of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from peers import BenchProblem

from gpusup.conf.precedence import follow


def free_port() -> int:
    """The first of five free ports in a row, below the range the kernel hands out."""
    for _ in range(1000):
        first = 20000 + int.from_bytes(os.urandom(2), "big") % 9000
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 5):
                    sock = stack.enter_context(socket.socket())
                    sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise BenchProblem("cannot find five free ports in a row")


def give_priority(pid: int, nice: int) -> None:
    """For a machine that others use too. Below 0 needs root; children started later inherit it."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        follow(pid)  # as our own sessions do, so that the peers are not behind them


@dataclass(kw_only=True)
class Server:
    """`body`, `content_type` are what the load sends; `cores` empty: wherever the kernel likes.

    Raises BenchProblem when it ends early or does not answer 200 within `start_limit_s`.
    """

    name: str
    argv: list[str]
    port: int
    path: str
    body: bytes
    content_type: str
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    cores: str = ""
    start_limit_s: float = 60.0
    nice: int = 0
    start_s: float = 0.0

    def __enter__(self) -> Self:
        self._tag = f"BENCH_TAG={uuid.uuid4().hex}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("BENCH_")}
        name, _, value = self._tag.partition("=")
        env = kept | {"OMP_NUM_THREADS": "1"} | self.env | {name: value}
        pinned = ["taskset", "-c", self.cores] if self.cores else []
        self._out = self.log.open("ab")
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [*pinned, *self.argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=self.log.parent,
        )
        give_priority(self.process.pid, self.nice)
        try:
            self._wait_until_it_answers(began)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - began
        for process in self.tree():  # those that lead a session of their own inherited too little
            with contextlib.suppress(OSError):
                give_priority(process.pid, self.nice)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"

    def ask(self, timeout: float = 10.0) -> tuple[int, bytes]:
        """One request -> status and body. Raises OSError or HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", self.path, self.body, {"Content-Type": self.content_type})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _wait_until_it_answers(self, began: float) -> None:
        last: object = "nothing"
        while time.perf_counter() - began < self.start_limit_s:
            if self.process.poll() is not None:
                raise BenchProblem(
                    f"{self.name} ended with {self.process.returncode}:\n{self.tail()}"
                )
            try:
                last = self.ask()
            except (OSError, http.client.HTTPException) as error:
                last = repr(error)
            else:
                if last[0] == 200:
                    return
            time.sleep(0.02)
        raise BenchProblem(
            f"{self.name} did not answer 200 in {self.start_limit_s:.0f} s; last: {last}\n"
            f"{self.tail()}"
        )

    def tail(self, lines: int = 15) -> str:
        self._out.flush()
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def worker_pid(self) -> int:
        """The process that did the work of one request, as it says itself."""
        _, body = self.ask()
        answer: dict[str, Any] = json.loads(body)
        if "outputs" in answer:  # the V2 protocol
            return int(next(o["data"][0] for o in answer["outputs"] if o["name"] == "pid"))
        return int(answer["pid"])

    def tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def split(self) -> None:
        """The worker alone on core 0; whatever else belongs to the server on core 1."""
        worker = self.worker_pid()
        for process in self.tree():
            core = 0 if process.pid == worker else 1
            with contextlib.suppress(psutil.Error, OSError):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {core})

    def cpu_s(self) -> float:
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _ours(self) -> set[int]:
        """All that was started from here, also what has left the tree; told by its environment."""
        found = {process.pid for process in self.tree()}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self._tag.encode() in Path(f"/proc/{name}/environ").read_bytes():
                        found.add(int(name))
        return found

    def stop(self) -> None:
        """Ask, wait four seconds, kill what is left."""
        ours = self._ours()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(4)
        for _ in range(5):
            left = {pid for pid in self._ours() if pid in ours or pid != self.process.pid}
            if not left:
                break
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._out.close()

"""Starting workers by fork from a process that has torch imported: one such zygote an interpreter.

The zygote is only a short cut. If it can't start, dies, refuses or hangs, the worker is started
as a fresh interpreter instead (launcher.py), and the zygote is tried again later.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gpusup.worker import wire
from gpusup.worker.wire import Spawn, Spawned, SpawnRefused, WorkerSpec, ZygoteReady

from .channel import ENDED, Channel
from .family import MARKER, Family, OnExit, Watch, clean_env, kill
from .launcher import ExecLauncher, Logs, OnFailed, OnStarted, WorkerProcess
from .output import OutputReader

#: An import of torch and a preload may be slow on a cold disk; more is a hang.
START_LIMIT_S: Final = 180.0
#: A fork takes milliseconds, also on a loaded machine.
SPAWN_LIMIT_S: Final = 15.0
_RETRY_FIRST_S: Final = 1.0
_RETRY_LIMIT_S: Final = 60.0

#: A parallel region in the zygote would make every worker hang in its first one.
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

#: Where the output of zygotes is kept, for `gpusupctl logs zygote`.
LOG_NAME: Final = "zygote"


@dataclass(slots=True)
class _Pending:
    """A worker that was asked for and is not there yet."""

    worker: WorkerProcess
    spec: WorkerSpec
    on_started: OnStarted
    on_failed: OnFailed


class Zygote:
    """One zygote process and its successors. Never raises: what fails is started by exec."""

    def __init__(
        self,
        python: str,
        command: Sequence[str],
        family: Family,
        logs: Logs,
        fallback: ExecLauncher,
        on_note: Callable[[str], None],
    ) -> None:
        self.python = python
        self.ready: ZygoteReady | None = None
        self.pid: int | None = None
        self.starts = 0
        self._command = command
        self._family = family
        self._log = logs.of(LOG_NAME)
        self._fallback = fallback
        self._on_note = on_note
        self._loop = asyncio.get_running_loop()
        self._serials = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._checks: dict[int, Callable[[int], None]] = {}
        self._channel: Channel | None = None
        self._output: OutputReader | None = None
        self._watch: Watch | None = None
        self._retry_s = _RETRY_FIRST_S
        self._closed = False

    def start(self) -> None:
        if self._closed or self.pid is not None:
            return
        try:
            pid, link, read_fd = self._start_process()
        except OSError as error:
            self._on_note(f"cannot start the zygote {self.python}: {error.strerror}")
            self._retry()
            return
        self.starts += 1
        self._take(pid, Channel(link, self._hear, self._ended), read_fd)
        self._loop.call_later(START_LIMIT_S, self._too_slow, pid)

    def _start_process(self) -> tuple[int, socket.socket, int]:
        """Its pid, our end of the link, and where its output comes. Raises OSError."""
        with ExitStack() as kept:
            ours, its = socket.socketpair()
            kept.callback(ours.close)
            with its:
                read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                kept.callback(os.close, read_fd)
                try:
                    pid = self._family.spawn(
                        [self.python, *self._command, "--fd", str(its.fileno())],
                        env=clean_env({"PYTHONUNBUFFERED": "1", **_ONE_THREAD}),
                        pass_fds=(its.fileno(),),
                        output_fd=write_fd,
                        new_session=True,
                    )
                finally:
                    os.close(write_fd)
            kept.pop_all()
        return pid, ours, read_fd

    def spawn(self, pending: _Pending) -> None:
        if self._channel is None or self._channel.closed:
            self._exec(pending)
            return
        worker, spec = pending.worker, pending.spec
        serial = next(self._serials)
        try:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self._exec(pending)  # which says what is missing, if it still is
            return
        worker.read_output(read_fd)
        worker.call_off = lambda: self._call_off(serial)
        # What the worker execs is found by this mark, wherever it flees to.
        marked = msgspec.structs.replace(
            spec, env={**spec.env, MARKER: f"{spec.slot}.{spec.generation}"}
        )
        self._pending[serial] = pending
        self._channel.send(
            wire.encode(Spawn(serial, wire.encode(marked))), [worker.page_fd, write_fd]
        )
        os.close(write_fd)
        if self.ready:
            self._loop.call_later(SPAWN_LIMIT_S, self._overdue, serial)

    def check(self, question: bytes, answer_fd: int, on_pid: Callable[[int], None]) -> bool:
        """Fork a look at a model (worker/precheck.py), whose answer goes to `answer_fd`.

        False: there is no zygote that could. Else `on_pid` is told the process, or 0 if there is
        none after all.
        """
        if self._channel is None or self._channel.closed or not self.ready:
            return False
        serial = next(self._serials)
        self._checks[serial] = on_pid
        # A worker's two descriptors are expected; a check has no progress page.
        self._channel.send(wire.encode(Spawn(serial, question, check=True)), [answer_fd, answer_fd])
        self._loop.call_later(SPAWN_LIMIT_S, self._overdue, serial)
        return True

    def close(self) -> None:
        """End the zygote. Its workers live on."""
        self._closed = True
        if self._channel:
            self._channel.close()
        if self.pid is not None:
            kill(self.pid)

    def export(self) -> dict[str, Any] | None:
        """Let go of a zygote that is ready; None if there is none."""
        if self._pending:
            raise ValueError("a worker is just being started")
        channel = self._channel if self._channel and not self._channel.closed else None
        if self.pid is None or not self.ready or not channel or not self._output:
            self.close()
            return None
        self._closed = True
        if self._watch:
            self._watch.cancel()
        return {
            "python": self.python,
            "pid": self.pid,
            "ready": msgspec.to_builtins(self.ready),
            "starts": self.starts,
            "output_fd": self._output.export(),
            **channel.export(),
        }

    def restore(self, exported: Mapping[str, Any]) -> None:
        self.ready = msgspec.convert(exported["ready"], ZygoteReady)
        self.starts = exported["starts"]
        channel = Channel(
            socket.socket(fileno=exported["link_fd"]),
            self._hear,
            self._ended,
            unread=exported["unread"],
            unsent=exported["unsent"],
        )
        # Serials go on far above those of before, so that a late answer matches nothing.
        self._serials = itertools.count(time.monotonic_ns())
        self._take(exported["pid"], channel, exported["output_fd"])

    def _take(self, pid: int, channel: Channel, output_fd: int) -> None:
        self.pid = pid
        self._family.adopt(pid)
        self._channel = channel
        self._output = OutputReader(output_fd, self._log)
        self._watch = self._family.watch(pid, self._gone)

    # -- what the zygote says --------------------------------------------------------------------

    def _hear(self, body: bytes) -> None:
        match wire.decode_from_zygote(body):
            case ZygoteReady() as ready:
                self.ready = ready
                self._retry_s = _RETRY_FIRST_S
                for problem in ready.problems:
                    self._on_note(f"zygote {self.python}: {problem}")
                for serial in self._pending:
                    self._loop.call_later(SPAWN_LIMIT_S, self._overdue, serial)
            case Spawned(serial=serial, pid=pid):
                self._spawned(serial, pid)
            case SpawnRefused(serial=serial, text=text):
                if check := self._checks.pop(serial, None):
                    check(0)
                pending = self._pending.pop(serial, None)
                if pending:
                    self._on_note(f"zygote {self.python} refused: {text}")
                    self._exec(pending)

    def _spawned(self, serial: int, pid: int) -> None:
        if check := self._checks.pop(serial, None):
            check(pid)
            return
        pending = self._pending.pop(serial, None)
        if pending:
            pending.on_started(pid)
            pending.worker.started(pid)
            return
        # Nobody waits for it any more. It is our child all the same.
        self._family.adopt(pid)
        kill(pid)
        self._family.watch(pid, lambda returncode, words: None)

    def _call_off(self, serial: int) -> None:
        pending = self._pending.pop(serial, None)
        if pending:
            pending.worker.never_started()
            self._loop.call_soon(pending.on_failed, "ended before it was started")

    def _overdue(self, serial: int) -> None:
        if serial in self._pending or serial in self._checks:
            self._kill(f"zygote {self.python} forked nothing for {SPAWN_LIMIT_S:g} s")

    def _too_slow(self, pid: int) -> None:
        if self.pid == pid and not self.ready:
            self._kill(f"zygote {self.python} was not ready within {START_LIMIT_S:g} s")

    def _ended(self, why: str) -> None:
        # Dying, or broken: without its socket it is of no use.
        self._kill("" if why == ENDED else f"zygote {self.python}: {why}")

    def _kill(self, why: str) -> None:
        if why:
            self._on_note(why)
        if self.pid is not None:
            kill(self.pid)

    def _gone(self, returncode: int, words: str) -> None:
        if self._channel:
            # Answers that it sent before it died still count.
            self._channel.read_rest()
            self._channel.close()
        if self._output:
            self._output.finish()
        was_ready = self.ready is not None
        self.pid, self.ready, self._channel, self._output = None, None, None, None
        if self._closed:
            return
        how = words or f"exit {returncode}"
        self._on_note(f"zygote {self.python} ended ({how}){'' if was_ready else ' while starting'}")
        checks, self._checks = list(self._checks.values()), {}
        for check in checks:
            check(0)
        waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            self._exec(pending)
        self._retry()

    def _retry(self) -> None:
        self._loop.call_later(self._retry_s, self.start)
        self._retry_s = min(self._retry_s * 2, _RETRY_LIMIT_S)

    def _exec(self, pending: _Pending) -> None:
        pending.worker.call_off = None
        pending.worker.drop_output()
        self._fallback.start(
            pending.worker, pending.spec, self.python, pending.on_started, pending.on_failed
        )


class ZygoteLauncher:
    """A `Launcher` whose workers are forked. `start` early: an import of torch takes seconds."""

    def __init__(
        self,
        family: Family,
        logs: Logs,
        own_python: str,
        *,
        preload: Sequence[str] = (),
        command: Sequence[str] = ("-m", "gpusup.worker.zygote"),
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`preload`: modules imported besides torch. `command`: what follows the interpreter."""
        self._family = family
        self._logs = logs
        self._own_python = own_python
        self._command = [*command, *(["--preload", ",".join(preload)] if preload else [])]
        self._on_note = on_note
        self._exec = ExecLauncher(family, logs, own_python)
        self._zygotes: dict[str, Zygote] = {}

    def start(self, pythons: Iterable[str] = ("",)) -> None:
        """Have a zygote for each of these interpreters; "" is our own."""
        for python in pythons:
            self._of(python)

    def state(self) -> list[dict[str, Any]]:
        return [
            {
                "python": zygote.python,
                "pid": zygote.pid,
                "ready": zygote.ready is not None,
                "torch": zygote.ready.torch if zygote.ready else "",
                "starts": zygote.starts,
                "problems": list(zygote.ready.problems) if zygote.ready else [],
            }
            for zygote in self._zygotes.values()
        ]

    def launch(
        self,
        spec: WorkerSpec,
        python: str,
        on_started: OnStarted,
        on_failed: OnFailed,
        on_exit: OnExit,
    ) -> WorkerProcess:
        worker = WorkerProcess(
            spec.slot, spec.generation, self._logs.of(spec.slot), self._family, on_exit
        )
        self._of(python).spawn(_Pending(worker, spec, on_started, on_failed))
        return worker

    def check(
        self, python: str, question: bytes, answer_fd: int, on_pid: Callable[[int], None]
    ) -> bool:
        return self._of(python).check(question, answer_fd, on_pid)

    def adopt(self, exported: Mapping[str, Any], on_exit: OnExit) -> WorkerProcess:
        return self._exec.adopt(exported, on_exit)

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()

    def export(self) -> dict[str, Any]:
        found = [zygote.export() for zygote in self._zygotes.values()]
        return {"zygotes": [zygote for zygote in found if zygote]}

    def restore(self, exported: Mapping[str, Any]) -> None:
        for one in exported["zygotes"]:
            self._zygotes[one["python"]] = self._make(one["python"])
            self._zygotes[one["python"]].restore(one)

    def _of(self, python: str) -> Zygote:
        python = python or self._own_python
        if python not in self._zygotes:
            self._zygotes[python] = self._make(python)
            self._zygotes[python].start()
        return self._zygotes[python]

    def _make(self, python: str) -> Zygote:
        return Zygote(python, self._command, self._family, self._logs, self._exec, self._on_note)

"""Starting worker processes, as something that is handed in; and each by a fresh interpreter.

`zygotes.py` has the other way. Both make the same `WorkerProcess`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final, Protocol

from gpusup.worker import progress, wire
from gpusup.worker.wire import WorkerSpec

from .actions import SignalName
from .family import MARKER, Family, OnExit, Watch, clean_env, kill_session
from .leftovers import token
from .output import OutputReader, SlotLog

OnStarted = Callable[[int], None]
OnFailed = Callable[[str], None]

_SIGNALS: Final = {
    "TERM": signal.SIGTERM,
    "KILL": signal.SIGKILL,
    "ABRT": signal.SIGABRT,
    "USR2": signal.SIGUSR2,
}


class Launcher(Protocol):
    def launch(
        self,
        spec: WorkerSpec,
        python: str,
        on_started: OnStarted,
        on_failed: OnFailed,
        on_exit: OnExit,
    ) -> WorkerProcess:
        """Start a worker and return at once; the callbacks come later, never from inside. Raises
        OSError where not even a descriptor can be had.

        `python` is the interpreter, "" for our own. First `on_started(pid)` or `on_failed(text)`,
        once; after `on_started`, once, `on_exit(returncode, words)`. The words are the
        signal's name, or the last line it printed before it exited by itself.
        """
        ...

    def adopt(self, exported: Mapping[str, Any], on_exit: OnExit) -> WorkerProcess:
        """Go on with a worker that `WorkerProcess.export` described before an upgrade."""
        ...


class WorkerProcess:
    """One started (or starting) worker: its signals, its progress page, its output."""

    def __init__(
        self,
        slot: str,
        generation: int,
        log: SlotLog,
        family: Family,
        on_exit: OnExit,
        page_fd: int | None = None,
    ) -> None:
        """`page_fd`: of a worker that has its progress page already. Raises OSError."""
        self.slot = slot
        self.generation = generation
        self.log = log
        self.pid: int | None = None
        self.exited = False
        self._family = family
        self._on_exit = on_exit
        self._watch: Watch | None = None
        self._output: OutputReader | None = None
        self._wanted: list[SignalName] = []
        self._first_line = log.count
        #: Set by a launcher that can still call the start off; used for KILL without a pid.
        self.call_off: Callable[[], None] | None = None
        with ExitStack() as kept:
            if page_fd is None:
                page_fd = _page(slot, generation)
                kept.callback(os.close, page_fd)
            self.progress = progress.Reader(os.dup(page_fd))
            kept.pop_all()
        self._page_fd = page_fd

    @property
    def page_fd(self) -> int:
        """The progress page's descriptor, for passing on."""
        return self._page_fd

    def signal(self, name: SignalName) -> None:
        """TERM, ABRT and USR2 go to the worker alone, KILL to all that it started too.

        Quiet if it is gone. Before the pid is known the signal waits for it.
        """
        if self.exited:
            return
        if self.pid is None:
            if name == "KILL" and self.call_off:
                self.call_off()
            else:
                self._wanted.append(name)
        elif name == "KILL":
            kill_session(self.pid, self.slot, self.generation)
        else:
            # The process is not collected before `exited`, so this pid is still its own.
            with suppress(ProcessLookupError):
                os.kill(self.pid, _SIGNALS[name])

    def read_output(self, fd: int) -> None:
        """Take over the read end of the worker's output pipe."""
        self._output = OutputReader(fd, self.log)

    def drop_output(self) -> None:
        """The start is tried in another way, with another pipe."""
        if self._output:
            self._output.close()
            self._output = None

    def started(self, pid: int) -> None:
        """The launcher knows the pid now."""
        self.pid = pid
        self.call_off = None
        self._family.adopt(pid)
        self._watch = self._family.watch(pid, self._gone, self._sweep)
        for name in self._wanted:
            self.signal(name)
        self._wanted.clear()

    def never_started(self) -> None:
        """Nothing runs; let go of everything."""
        self.exited = True
        self._release()

    def forget(self) -> None:
        """Nobody asks for its last values any more."""
        self.progress.close()

    def export(self) -> dict[str, Any]:
        """Let go without ending the worker. A worker without a pid can't be handed on."""
        if self.pid is None or self._output is None:
            raise ValueError(f"the worker of {self.slot} is just being started")
        if self._watch:
            self._watch.cancel()
        self.progress.close()
        return {
            "slot": self.slot,
            "generation": self.generation,
            "pid": self.pid,
            "page_fd": self._page_fd,
            "output_fd": self._output.export(),
        }

    @classmethod
    def restore(
        cls, exported: Mapping[str, Any], log: SlotLog, family: Family, on_exit: OnExit
    ) -> WorkerProcess:
        worker = cls(
            exported["slot"],
            exported["generation"],
            log,
            family,
            on_exit,
            page_fd=exported["page_fd"],
        )
        worker.read_output(exported["output_fd"])
        worker.started(exported["pid"])
        return worker

    def _sweep(self) -> None:
        """The worker is dead and not yet collected: end what it started."""
        assert self.pid is not None
        kill_session(self.pid, self.slot, self.generation)

    def _gone(self, returncode: int, words: str) -> None:
        self.exited = True
        self._release()
        printed = self.log.since(self._first_line)
        if returncode > 0 and not words and printed:
            words = printed[-1].strip()  # of a traceback, the line that names the exception
        self._on_exit(returncode, words)

    def _release(self) -> None:
        if self._output:
            self._output.finish()
        os.close(self._page_fd)
        self._page_fd = -1
        # The mapping stays until `forget`: its last values are evidence.


def _page(slot: str, generation: int) -> int:
    # Its name is how a fork of the worker is known for ours when we are gone (leftovers.py).
    return progress.create(f"{slot}.{generation}@{token()}")


class Logs:
    """Each slot's log, made when first asked for."""

    def __init__(self, lines: int = 200, on_line: Callable[[str, str], None] | None = None) -> None:
        """`on_line(slot, line)` for what is to go to the service's own log."""
        self._lines = lines
        self._on_line = on_line
        self._logs: dict[str, SlotLog] = {}

    def of(self, slot: str) -> SlotLog:
        if slot not in self._logs:
            on_line = self._on_line

            def tell(line: str) -> None:
                if on_line:
                    on_line(slot, line)

            self._logs[slot] = SlotLog(self._lines, tell)
        return self._logs[slot]

    def known(self, slot: str) -> bool:
        return slot in self._logs

    def export(self) -> dict[str, Any]:
        return {slot: log.export() for slot, log in self._logs.items()}

    def restore(self, exported: Mapping[str, Any]) -> None:
        for slot, log in exported.items():
            self.of(slot).restore(log)


def worker_env(spec: WorkerSpec) -> dict[str, str]:
    return clean_env(
        {
            "PYTHONUNBUFFERED": "1",  # what a dying worker printed last is what we want to read
            **spec.env,
            MARKER: f"{spec.slot}.{spec.generation}",
        }
    )


def memory_file(name: str, data: bytes) -> int:
    """A descriptor to read `data` from, at its beginning."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class ExecLauncher:
    """A fresh interpreter for each worker, in a session of its own."""

    def __init__(self, family: Family, logs: Logs, own_python: str) -> None:
        self._family = family
        self._logs = logs
        self._own_python = own_python

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
        self.start(worker, spec, python, on_started, on_failed)
        return worker

    def start(
        self,
        worker: WorkerProcess,
        spec: WorkerSpec,
        python: str,
        on_started: OnStarted,
        on_failed: OnFailed,
    ) -> None:
        loop = asyncio.get_running_loop()
        python = python or self._own_python
        try:
            pid, read_fd = self._spawn(worker, spec, python)
        except OSError as error:
            worker.never_started()
            loop.call_soon(on_failed, f"cannot start {python}: {error.strerror}")
            return
        worker.read_output(read_fd)

        def begin() -> None:
            on_started(pid)
            worker.started(pid)

        loop.call_soon(begin)

    def _spawn(self, worker: WorkerProcess, spec: WorkerSpec, python: str) -> tuple[int, int]:
        """Its pid, and where its output comes. Raises OSError."""
        with ExitStack() as passed, ExitStack() as kept:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            kept.callback(os.close, read_fd)
            passed.callback(os.close, write_fd)
            spec_fd = memory_file("gpusup-spec", wire.encode(spec))
            passed.callback(os.close, spec_fd)
            pid = self._family.spawn(
                [
                    python,
                    "-m",
                    "gpusup.worker",
                    "--spec-fd",
                    str(spec_fd),
                    "--progress-fd",
                    str(worker.page_fd),
                    "--parent",
                    str(os.getpid()),
                ],
                env=worker_env(spec),
                pass_fds=(spec_fd, worker.page_fd),
                output_fd=write_fd,
                new_session=True,
            )
            kept.pop_all()
        return pid, read_fd

    def adopt(self, exported: Mapping[str, Any], on_exit: OnExit) -> WorkerProcess:
        return WorkerProcess.restore(
            exported, self._logs.of(exported["slot"]), self._family, on_exit
        )

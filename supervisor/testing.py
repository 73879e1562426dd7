"""Stand-ins for what the supervisor is handed: a clock that waits for nobody, workers that are
only remembered. Shipped, so that whoever builds on gpusup can test with them too."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from gpusup.worker.progress import Progress
from gpusup.worker.wire import WorkerSpec

from .actions import SignalName
from .family import OnExit
from .launcher import OnFailed, OnStarted
from .output import SlotLog


class FakeClock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ties = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, after_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._now + after_s, next(self._ties), callback))

    def advance(self, seconds: float) -> None:
        until = self._now + seconds
        while self._due and self._due[0][0] <= until:
            self._now, _, callback = heapq.heappop(self._due)
            callback()
        self._now = until


class FakeProgress:
    """Set `now` to what the supervisor is to read."""

    def __init__(self) -> None:
        self.now = Progress(0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0)

    def read(self) -> Progress:
        return self.now

    def close(self) -> None:
        pass


class FakeWorker:
    """A worker that does only what a test says: `start`, `fail`, `exit`."""

    def __init__(
        self, spec: WorkerSpec, on_started: OnStarted, on_failed: OnFailed, on_exit: OnExit
    ) -> None:
        self.spec = spec
        self.slot = spec.slot
        self.generation = spec.generation
        self.pid: int | None = None
        self.exited = False
        self.signals: list[SignalName] = []
        self.progress = FakeProgress()
        self.log = SlotLog(200)
        self._on_started = on_started
        self._on_failed = on_failed
        self._on_exit = on_exit

    def signal(self, name: SignalName) -> None:
        self.signals.append(name)

    def start(self, pid: int = 4711) -> None:
        self.pid = pid
        self._on_started(pid)

    def fail(self, text: str) -> None:
        self.exited = True
        self._on_failed(text)

    def exit(self, returncode: int, words: str = "") -> None:
        self.exited = True
        self._on_exit(returncode, words)

    def export(self) -> dict[str, Any]:
        return {"slot": self.slot, "generation": self.generation, "pid": self.pid}


class FakeLauncher:
    """Launches nothing, and remembers what it was asked to launch."""

    def __init__(self) -> None:
        self.launched: list[FakeWorker] = []

    @property
    def last(self) -> FakeWorker:
        return self.launched[-1]

    def launch(
        self,
        spec: WorkerSpec,
        python: str,
        on_started: OnStarted,
        on_failed: OnFailed,
        on_exit: OnExit,
    ) -> FakeWorker:
        worker = FakeWorker(spec, on_started, on_failed, on_exit)
        self.launched.append(worker)
        return worker

    def adopt(self, exported: Mapping[str, Any], on_exit: OnExit) -> FakeWorker:
        raise NotImplementedError("a fake worker can't be handed on")

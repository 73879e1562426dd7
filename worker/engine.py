"""The engine: what a worker's sockets see of it (entry.EngineLike).

Who runs where: `offer` and its like are called by the sockets' thread and only put things down
(desk.py); batches are formed and computed in the thread that called `run` (loop.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from . import progress, wire
from .desk import Bell, Desk, Pair
from .entry import Entry, Fence
from .loop import Loop
from .running import Running
from .startup import Loaded, Startup

#: Registering memory keeps the device's driver from launching anything for that time, about 0.1 s
#: per GB (vLLM, pull request 51081): first answers come before, others between two arenas.
ARENA_LATER_S: Final = 1.0
ARENA_PAUSE_S: Final = 0.1
#: How old the device's memory may be in what proxies are told; each answer carries it.
_MEMORY_S: Final = 0.01


class Engine:
    """See entry.EngineLike for who may call what."""

    def __init__(self, spec: wire.WorkerSpec, page: progress.Writer, fence: Fence) -> None:
        self._spec = spec
        self._page = page
        self._fence = fence
        self._bell = Bell()
        self._desk = Desk(self._bell.ring)
        self._running = Running(page)
        self._dropped: set[int] = set()
        self._registering = threading.Lock()
        self._memory = wire.Memory()
        self._memory_at = 0.0

    @property
    def on_relief(self) -> Callable[[], None] | None:
        return self._desk.on_relief

    @on_relief.setter
    def on_relief(self, call: Callable[[], None] | None) -> None:
        self._desk.on_relief = call

    @property
    def reply_all(self) -> Callable[[Sequence[Pair]], None] | None:
        return self._desk.reply_all

    @reply_all.setter
    def reply_all(self, call: Callable[[Sequence[Pair]], None] | None) -> None:
        self._desk.reply_all = call

    def load(
        self, tell: Callable[[wire.FromWorkerControl], None], wait_go: Callable[[], None]
    ) -> wire.WorkerReady:
        """Raises LoadProblem."""
        self._loaded: Loaded = Startup(self._spec, self._page, tell, wait_go).run()
        self._device = self._loaded.device
        self._desk.methods = frozenset(self._loaded.ready.methods)
        self._loop = Loop(self._spec, self._loaded, self._desk, self._bell, self._running)
        return self._loaded.ready

    def run(self) -> None:
        """Compute until `stop` and the last answer; fences itself if the device is poisoned."""
        self._loop.run()
        if self._loop.poison:
            self._desk.closed = True
            self._fence(self._loop.poison)

    # -- from any thread ------------------------------------------------------------------------

    def offer(self, entries: Sequence[Entry]) -> None:
        self._desk.offer(entries, time.monotonic())

    def cancel(self, connection: int, ids: Sequence[int]) -> None:
        self._desk.cancel(connection, ids)
        self._loop.texts.wake()
        self._bell.ring()

    def recall(self, connection: int, ids: Sequence[int]) -> None:
        self._desk.recall(connection, ids)
        self._bell.ring()

    def credit(self, connection: int, item: int, count: int) -> None:
        entry = self._desk.find(connection, item)
        if entry is not None:
            self._loop.texts.credit(entry, count)

    def drop(self, connection: int) -> None:
        self._dropped.add(connection)
        self._desk.drop(connection)
        self._loop.leaving.add(connection)
        self._loop.texts.wake()
        self._bell.ring()

    def map_arena(self, connection: int, arena: memoryview) -> None:
        """Registered in a thread of its own, since that takes long; until then, and where it
        fails, copies go through the pool's page-locked slabs. A CPU slot reads it as it is."""
        arenas = self._loop.arenas
        if arenas is None:
            return

        def register() -> None:
            time.sleep(ARENA_LATER_S)
            with self._registering:
                if connection in self._dropped:
                    return
                if arenas.register(connection, arena):
                    self._loop.reception.intake.registered(arenas.connections())
                    if connection in self._dropped:  # meanwhile, and its arena was let go in vain
                        self._loop.leaving.add(connection)
                        self._bell.ring()
                time.sleep(ARENA_PAUSE_S)

        threading.Thread(target=register, name="arena", daemon=True).start()

    def drain(self, when_empty: Callable[[], None]) -> None:
        self._loop.when_empty = when_empty
        self._desk.closed = True
        self._bell.ring()

    def stop(self) -> None:
        self._desk.closed = True
        self._loop.stopping = True
        self._bell.ring()

    def trim(self) -> None:
        self._loop.chores.append(self._device.trim)
        self._bell.ring()

    def load_now(self) -> wire.Load:
        desk = self._desk
        now = time.monotonic()
        if now - self._memory_at > _MEMORY_S:
            self._memory = self._device.memory()
            self._memory_at = now
        memory = self._memory
        rows, running = desk.rows, self._running.rows
        try:
            oldest = self._loop.batcher.oldest()
        except RuntimeError:  # a line came or went just now
            oldest = math.inf
        # On a CPU slot the interpreter and its libraries are not the model's use.
        at_rest = memory.static if self._device.kind == "cpu" else 0
        return wire.Load(
            queued_rows=max(0, rows - running),
            running_rows=running,
            free_rows=max(0, desk.budget_rows - rows),
            oldest_s=0.0 if oldest == math.inf else max(0.0, now - oldest),
            allocated=max(0, memory.allocated - at_rest),
            reserved=memory.reserved,
        )

    def pong(self, serial: int) -> wire.Pong:
        totals = self._loop.totals
        return wire.Pong(
            serial,
            memory=self._device.memory(),
            counters=wire.Counters(
                batches=totals.batches,
                rows=totals.rows,
                ooms=self._loop.containment.ooms,
                failures=totals.failures,
                busy_s=totals.busy_s,
                unsupported=self._desk.unsupported,
            ),
            load=self.load_now(),
            graphs=dict(self._loaded.runner.status),
            peaks=self._loaded.profile.peaks(),
            sizes=self._loop.reception.intake.seen(),
            running=self._running.request_ids(),
        )

    def report(self, kind: str) -> str:
        """Evidence, as text. Any thread: it only reads counters."""
        if kind != "memory_summary":
            return f"no report called {kind}"
        return self._device.summary()

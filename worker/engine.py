"""The engine: takes entries, forms batches, computes them in the main thread, answers.

Who runs where: `offer` and its like are called by the sockets' thread and only put things down;
decoding and encoding run in a crew of threads; everything about the batcher and the device runs
in the thread that called `run`. No exception ends that loop but a poisoned device.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from . import progress, wire
from .answers import Answers, Whole
from .batcher import DEFAULT_RANK, Batcher, Unit
from .compute import Containment, Failure, Flight, Placed, failure_of, one_line
from .crew import Crew
from .entry import Entry, Fence
from .intake import Intake
from .outputs import Outputs
from .pace import Pace
from .pool import Key, TooLarge
from .running import Running, Work
from .startup import Loaded, Startup
from .texts import Texts

_log = logging.getLogger(__name__)

#: An item may have at most so many batches' worth of rows.
MOST_BATCHES: Final = 32
#: Longest sleep of the loop; between sleeps it looks at what nobody rings for.
_LONGEST_S: Final = 1.0
#: A wait shorter than this is not worth a sleep.
_SHORT_S: Final = 100e-6
#: So long without work is a gap in which a graph may be captured.
_GAP_S: Final = 0.03
#: Without gaps, one graph is captured this often.
_CAPTURE_EVERY_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _Launched:
    key: Key
    units: list[Unit]
    rows: int
    work: Work
    flight: Flight
    began: float


@dataclass(slots=True)
class _Totals:
    batches: int = 0
    rows: int = 0
    failures: int = 0
    busy_s: float = 0.0
    unsupported: int = 0


class Engine:
    """See entry.EngineLike for who may call what."""

    def __init__(self, spec: wire.WorkerSpec, page: progress.Writer, fence: Fence) -> None:
        self.on_relief: Callable[[], None] | None = None
        self.reply_all: Callable[[Sequence[tuple[Entry, wire.Answer]]], None] | None = None
        self._spec = spec
        self._page = page
        self._fence = fence
        self._running = Running(page)
        self._lock = threading.Lock()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._inbox: deque[Entry] = deque()
        self._decoded: deque[tuple[Entry, Failure | None]] = deque()
        self._chores: deque[Callable[[], None]] = deque()
        self._live: dict[tuple[int, int], Entry] = {}
        self._rows = 0
        self._coming = 0
        self._flights: deque[_Launched] = deque()
        self._totals = _Totals()
        self._arenas: Any = None
        self._leaving: set[int] = set()
        self._captured = 0.0
        self._stopping = False
        self._draining = False
        self._poison = ""
        self._cancels = False
        self._when_empty: Callable[[], None] | None = None
        self._active = time.monotonic()
        self._budget_rows = 1

    # -- load -----------------------------------------------------------------------------------

    def load(
        self, tell: Callable[[wire.FromWorkerControl], None], wait_go: Callable[[], None]
    ) -> wire.WorkerReady:
        """Raises LoadProblem."""
        loaded = Startup(self._spec, self._page, tell, wait_go).run()
        self._adopt(loaded)
        return loaded.ready

    def _adopt(self, loaded: Loaded) -> None:
        settings = loaded.settings
        self._loaded = loaded
        self._model = loaded.model
        self._device = loaded.device
        self._runner = loaded.runner
        self._methods = frozenset(loaded.methods)
        self._budget = settings.budget
        self._budget_rows = 2 * settings.max_rows
        self._batcher = Batcher(
            max_rows=settings.max_rows,
            wait=settings.wait,
            starvation=settings.starvation,
            limit=self._runner.limit,
        )
        self._pace = Pace()
        self._intake = Intake(loaded.model, settings)
        if loaded.device.kind == "cuda":
            from .cuda_runner import Arenas

            self._arenas = Arenas()
        self._containment = Containment(loaded.runner, loaded.device, limit_s=settings.budget / 2)
        self._crew = Crew(settings.decode_threads, "crew")
        self._texts = Texts(
            loaded.model,
            self._running,
            budget=settings.budget,
            answer=self._answer,
            poisoned=self._poisoned,
        )
        self._answers = Answers(
            loaded.model, settings.outputs, self._crew, self._answer, self._answer_all
        )

    # -- called from any thread -----------------------------------------------------------------

    def offer(self, entries: Sequence[Entry]) -> None:
        refused: list[tuple[Entry, wire.Answer]] = []
        now = time.monotonic()
        with self._lock:
            for entry in entries:
                item = entry.item
                if not entry.arrived:
                    entry.arrived = now
                refusal: wire.Status | None = None
                if self._draining or self._stopping or self._poison:
                    refusal = "draining"
                elif item.method not in self._methods:
                    refusal = "unsupported"
                    self._totals.unsupported += 1
                elif self._rows and self._rows + item.rows > self._budget_rows:
                    # A single item above the budget is taken when there is nothing else.
                    refusal = "busy"
                if refusal is not None:
                    text = f"the model has no {item.method}" if refusal == "unsupported" else ""
                    answer = wire.Answer(item.id, refusal, text=text, started=False)
                    refused.append((entry, answer))
                    continue
                self._rows += item.rows
                self._live[entry.connection, item.id] = entry
                entry.credit = entry.credit or item.credit
                self._inbox.append(entry)
        self._ring()
        if refused:
            self._send(refused)

    def cancel(self, connection: int, ids: Sequence[int]) -> None:
        with self._lock:
            for number in ids:
                entry = self._live.get((connection, number))
                if entry is not None:
                    entry.cancelled = True
            self._cancels = True
        self._texts.wake()
        self._ring()

    def credit(self, connection: int, item: int, count: int) -> None:
        entry = self._live.get((connection, item))
        if entry is not None:
            self._texts.credit(entry, count)

    def drop(self, connection: int) -> None:
        with self._lock:
            ids = [item for owner, item in self._live if owner == connection]
            self._leaving.add(connection)
        self.cancel(connection, ids)

    def map_arena(self, connection: int, arena: memoryview) -> None:
        """Registered in a thread of its own, since that takes long; until then, and where it
        fails, copies go through the pool's page-locked slabs. A CPU slot reads it as it is."""
        if self._arenas is None:
            return

        def register() -> None:
            if self._arenas.register(connection, arena):
                self._intake.registered(self._arenas.connections())

        threading.Thread(target=register, name="arena", daemon=True).start()

    def drain(self, when_empty: Callable[[], None]) -> None:
        with self._lock:
            self._draining = True
            self._when_empty = when_empty
        self._ring()

    def stop(self) -> None:
        self._stopping = True
        self._ring()

    def trim(self) -> None:
        self._chores.append(self._device.trim)
        self._ring()

    def load_now(self) -> wire.Load:
        running = self._running.rows
        memory = self._device.memory()
        rows = self._rows
        try:
            oldest = self._batcher.oldest()
        except RuntimeError:  # a line came or went just now
            oldest = math.inf
        return wire.Load(
            queued_rows=max(0, rows - running),
            running_rows=running,
            free_rows=max(0, self._budget_rows - rows),
            oldest_s=0.0 if math.isinf(oldest) else max(0.0, time.monotonic() - oldest),
            allocated=max(0, memory.allocated - memory.static)
            if self._device.kind == "cpu"
            else memory.allocated,
            reserved=memory.reserved,
        )

    def pong(self, serial: int) -> wire.Pong:
        totals = self._totals
        return wire.Pong(
            serial,
            memory=self._device.memory(),
            counters=wire.Counters(
                batches=totals.batches,
                rows=totals.rows,
                ooms=self._containment.ooms,
                failures=totals.failures,
                busy_s=totals.busy_s,
                unsupported=totals.unsupported,
            ),
            load=self.load_now(),
            graphs=dict(self._runner.status),
            peaks=self._loaded.profile.peaks(),
            sizes=self._intake.seen(),
            running=self._running.request_ids(),
        )

    def report(self, kind: str) -> str:
        if kind != "memory_summary":
            return f"no report called {kind}"
        return self._device.summary()

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        with torch.inference_mode():
            while not self._over():
                try:
                    self._turn()
                except Exception:
                    _log.exception("the engine's loop goes on after an error")
        self._end()

    def _over(self) -> bool:
        if self._poison:
            return True
        return self._stopping and not self._live

    def _end(self) -> None:
        self._loaded.profile.save()
        self._crew.stop()
        self._texts.stop()
        if self._poison:
            self._fence(self._poison)

    def _turn(self) -> None:
        while self._chores:
            self._chores.popleft()()
        while self._inbox:
            self._admit(self._inbox.popleft())
        while self._decoded:
            entry, failure = self._decoded.popleft()
            self._coming -= 1
            self._enqueue(entry, failure)
        now = time.monotonic()
        if self._cancels or now >= self._batcher.next_deadline():
            self._cancels = False
            self._bury(self._batcher.sweep(now))
            self._texts.sweep()
        flights = self._flights
        units: list[Unit] = []
        if len(flights) < self._runner.depth:
            idle = not flights or now >= self._pace.next_due
            units = self._batcher.take(now, idle=idle, coming=self._coming)
            self._bury(self._batcher.met())
        if units:
            self._launch(units, now)
        if len(flights) >= self._runner.depth:
            self._land(flights.popleft())
        elif flights and not units:
            self._between(now)
        elif not units:
            self._rest(now)
        if self._runner.pending():
            self._capture()

    def _between(self, now: float) -> None:
        """One batch computes and no second one is ripe: gather more for as long as the device has
        something to do, but no longer."""
        pause = min(self._pace.next_due, self._batcher.next_window()) - now
        if pause > _SHORT_S and not self._flights[0].flight.done():
            self._bell.acquire(timeout=pause)
        else:
            self._land(self._flights.popleft())

    def _rest(self, now: float) -> None:
        """Nothing to compute: look after the rest, then sleep until the bell or the next term."""
        self._texts.sweep()
        if self._leaving:
            self._let_go()
        when_empty = self._when_empty
        if when_empty is not None and not self._live:
            self._when_empty = None
            when_empty()
        canary_idle = self._spec.canary_idle or math.inf
        if now - self._active >= canary_idle:
            self._canary()
        until = min(
            self._batcher.next_deadline(), self._batcher.next_window(), self._active + canary_idle
        )
        wait = min(_LONGEST_S, max(0.0, until - time.monotonic()))
        if self._runner.pending():
            wait = min(wait, _GAP_S)
        if wait:
            self._bell.acquire(timeout=wait)

    def _capture(self) -> None:
        """Graphs that are still wanted: one in each gap, and one now and then without a gap."""
        now = time.monotonic()
        gap = not self._live and now - self._active >= _GAP_S
        if not gap and now - self._captured < _CAPTURE_EVERY_S:
            return
        while self._flights:
            self._land(self._flights.popleft())
        work = self._running.begin(self._budget, [])
        try:
            self._runner.idle_step()
        except Exception as error:
            self._poisoned(one_line(error))
        finally:
            self._running.end(work)
            self._captured = time.monotonic()

    def _let_go(self) -> None:
        """Unregister arenas of connections that are gone and have nothing left here."""
        with self._lock:
            busy = {connection for connection, _ in self._live}
            gone = self._leaving - busy
            self._leaving -= gone
        if self._arenas is not None:
            for connection in gone:
                self._arenas.unregister(connection)
            self._intake.registered(self._arenas.connections())

    def _canary(self) -> None:
        work = self._running.begin(self._spec.canary_limit, [])
        try:
            self._device.canary()
            healthy = bool(self._model.is_healthy())
            text = "" if healthy else "the model says that it is not healthy"
        except Exception as error:
            text = f"the canary failed: {one_line(error)}"
        finally:
            self._running.end(work)
        self._active = time.monotonic()
        if text:
            self._poisoned(text)

    # -- in -------------------------------------------------------------------------------------

    def _admit(self, entry: Entry) -> None:
        if entry.item.method != "predict":
            self._texts.take(entry)
            return
        if self._dead(entry, time.monotonic()):
            return
        if self._crew.size and self._intake.needs_decode(entry.item):
            self._coming += 1
            self._crew.put(self._decode, entry)
        else:
            self._enqueue(entry, self._prepare(entry))

    def _decode(self, entry: Entry) -> None:
        """In the crew. Whatever happens, the loop hears of it: it counts what is coming."""
        failure: Failure | None = Failure("failed", "not decoded")
        try:
            if entry.cancelled:
                failure = None  # found again, and buried, by `_enqueue`
            else:
                with torch.inference_mode():
                    failure = self._prepare(entry)
        finally:
            self._decoded.append((entry, failure))
            self._ring()

    def _prepare(self, entry: Entry) -> Failure | None:
        began = time.monotonic()
        try:
            self._intake.prepare(entry)
        except TooLarge as error:
            return Failure("too_large", str(error))
        except Exception as error:
            if isinstance(error, RecursionError):
                return Failure("invalid", "the input is nested too deeply")
            failure = failure_of(error)
            return Failure("failed", failure.text) if failure.kind == "rows" else failure
        finally:
            entry.decode_s = time.monotonic() - began
        return None

    def _enqueue(self, entry: Entry, failure: Failure | None) -> None:
        now = time.monotonic()
        if self._dead(entry, now):
            return
        if failure is not None:
            if failure.kind == "failed":
                self._totals.failures += 1
            self._answers.fail(entry, failure)
            if failure.kind == "sticky":
                self._poisoned(failure.text)
            return
        placed: Placed = entry.tensor
        most = self._batcher.most_rows(entry.bucket)
        if not placed.rows:
            self._answers.empty(entry)
        elif placed.rows <= most:
            self._add(entry, 0, placed.rows)
        elif placed.rows > (limit := self._batcher.max_rows * MOST_BATCHES):
            text = f"{placed.rows} rows in one request, the limit is {limit}"
            self._answers.fail(entry, Failure("invalid", text))
        else:
            entry.notes["whole"] = Whole(placed.rows)
            for first in range(0, placed.rows, most):
                self._add(entry, first, min(most, placed.rows - first))

    def _add(self, entry: Entry, first: int, rows: int) -> None:
        item = entry.item
        self._batcher.add(
            Unit(
                entry,
                entry.bucket,
                rows,
                entry.arrived,
                item.deadline or math.inf,
                item.priority if item.priority > 0 else DEFAULT_RANK,
                first,
                False,
                entry.tensor,
            )
        )

    def _dead(self, entry: Entry, now: float) -> bool:
        """Answers an entry that must not start any more."""
        if not entry.cancelled and not (entry.item.deadline and entry.item.deadline <= now):
            return False
        self._bury_entry(entry)
        return True

    def _bury(self, units: Sequence[Unit]) -> None:
        for unit in units:
            entry: Any = unit.what
            self._bury_entry(entry)

    def _bury_entry(self, entry: Entry) -> None:
        whole: Whole | None = entry.notes.get("whole")
        status: wire.Status = "cancelled" if entry.cancelled else "expired"
        started = whole is not None and whole.begun
        entry.cancelled = True  # its other portions
        self._cancels = self._cancels or whole is not None
        self._answer(entry, wire.Answer(entry.item.id, status, started=started))

    # -- compute --------------------------------------------------------------------------------

    def _launch(self, units: list[Unit], now: float) -> None:
        key: Any = units[0].key
        rows = 0
        pairs: list[tuple[int, int]] = []
        names: list[str] = []
        for unit in units:
            entry: Any = unit.what
            rows += unit.rows
            pairs.append((entry.connection, entry.item.id))
            names.append(entry.item.request_id)
            if unit.rows != unit.notes.rows:
                entry.notes["whole"].begun = True
        work = self._running.begin(self._budget, pairs, names, rows)
        failure: Failure | None = None
        try:
            flight = self._runner.launch(key, units, rows)
        except Exception as error:
            failure = failure_of(error)
        else:
            self._flights.append(_Launched(key, units, rows, work, flight, now))
            self._pace.launched(key, rows, now)
        if failure is not None:
            # Those before it are answered first: they are not to be in the fence's way.
            while self._flights:
                self._land(self._flights.popleft())
            self._contain(key, units, rows, work, now, failure)

    def _land(self, launched: _Launched) -> None:
        failure: Failure | None = None
        outputs: Outputs | None = None
        try:
            outputs = launched.flight.result()
        except Exception as error:
            failure = failure_of(error)
        if failure is not None:
            launched.flight.release()
            self._contain(
                launched.key, launched.units, launched.rows, launched.work, launched.began, failure
            )
            return
        assert outputs is not None
        took = self._ended(launched.work, launched.rows, launched.began)
        self._pace.landed(launched.key, launched.rows, took)
        for other in self._flights:
            self._running.again(other.work)  # it had to wait for this one
        self._answers.deliver(
            launched.units,
            outputs,
            launched.began,
            self._active - launched.began,
            launched.rows,
            launched.flight.release,
        )

    def _contain(
        self, key: Key, units: list[Unit], rows: int, work: Work, began: float, failure: Failure
    ) -> None:
        fatal = failure.text if failure.kind == "sticky" else ""
        try:
            pieces = self._containment.settle(
                key, units, failure, lambda: self._running.again(work)
            )
            for some, outcome in pieces:
                took = time.monotonic() - began
                if isinstance(outcome, Failure):
                    self._totals.failures += len(some)
                    if outcome.kind == "sticky":
                        fatal = outcome.text
                    for unit in some:
                        entry: Any = unit.what
                        self._answers.fail(entry, outcome, began, took, rows)
                else:
                    self._answers.deliver(some, outcome, began, took, rows, None)
        finally:
            self._ended(work, rows, began)
        if fatal:
            self._poisoned(fatal)

    def _ended(self, work: Work, rows: int, began: float) -> float:
        """How long the device had the batch to itself, seconds."""
        previous = self._active
        self._active = time.monotonic()
        self._running.end(work)
        took = self._active - max(began, previous)
        totals = self._totals
        totals.batches += 1
        totals.rows += rows
        totals.busy_s += took
        return took

    def _poisoned(self, text: str) -> None:
        self._poison = self._poison or text
        self._ring()

    # -- out ------------------------------------------------------------------------------------

    def _answer(self, entry: Entry, answer: wire.Answer) -> None:
        self._answer_all([(entry, answer)])

    def _answer_all(self, pairs: Sequence[tuple[Entry, wire.Answer]]) -> None:
        """Last answers. An entry that has had one already gets no second."""
        fresh: list[tuple[Entry, wire.Answer]] = []
        with self._lock:
            full = self._rows >= self._budget_rows
            for pair in pairs:
                entry = pair[0]
                if self._live.pop((entry.connection, entry.item.id), None) is not None:
                    self._rows -= entry.item.rows
                    fresh.append(pair)
            relieved = full and self._rows < self._budget_rows
            empty = not self._live
        self._send(fresh)
        if relieved and self.on_relief is not None:
            self.on_relief()
        if empty and (self._when_empty is not None or self._stopping):
            self._ring()

    def _send(self, pairs: Sequence[tuple[Entry, wire.Answer]]) -> None:
        try:
            if self.reply_all is not None:
                self.reply_all(pairs)
                return
            for entry, answer in pairs:
                entry.reply(answer)
        except Exception:
            _log.exception("an answer could not be sent")

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            return  # it rings already

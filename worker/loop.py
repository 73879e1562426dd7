"""The loop that computes: forms batches, launches them, answers. One thread, the one that serves.

Decoding and encoding run in a crew beside it; everything about the batcher and the device runs
here. No exception ends the loop but a poisoned device.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from . import wire
from .answers import Answers
from .batcher import Batcher, Unit
from .budgets import Budgets
from .compute import Containment, Failure, Flight, failure_of, one_line
from .crew import Crew, cores_apart
from .desk import Bell, Desk
from .intake import Intake
from .outputs import Outputs
from .pace import Pace, Room, padded
from .pool import Key
from .reception import Reception
from .running import Running, Work
from .settings import graph_sizes
from .startup import Loaded
from .texts import Texts
from .totals import Totals

_log = logging.getLogger(__name__)

#: After so many batches without a bucket a shape gets one.
_OFTEN: Final = 32
#: Longest sleep of the loop; between sleeps it looks at what nobody rings for.
_LONGEST_S: Final = 1.0
#: A CPU slot that has been idle for so long gives back what its heap has kept, if it is much.
_TIDY_S: Final = 0.1
_KEPT_BYTES: Final = 32 * 2**20
#: So long without work is a gap in which a graph may be captured, for one of its two slabs.
_GAP_S: Final = 0.03
#: Without gaps, that is done this often.
_CAPTURE_EVERY_S: Final = 0.25


@dataclass(slots=True, eq=False)
class _Launched:
    key: Key
    units: list[Unit]
    rows: int
    size: int  # with the rows it was padded by
    work: Work
    flight: Flight
    began: float


class Loop:
    def __init__(
        self, spec: wire.WorkerSpec, loaded: Loaded, desk: Desk, bell: Bell, running: Running
    ) -> None:
        settings = loaded.settings
        self._spec = spec
        self._loaded = loaded
        self._model = loaded.model
        self._device = loaded.device
        self._runner = loaded.runner
        self._desk = desk
        self._bell = bell
        self._running = running
        self._budgets = Budgets(settings.budget, settings.budget_p99)
        self.batcher = Batcher(
            max_rows=settings.max_rows,
            wait=settings.wait,
            starvation=settings.starvation,
            limit=self._runner.limit,
        )
        self._pace = Pace()
        self._room = Room(settings.max_rows, self._runner.depth)
        desk.budget_rows = self._room.rows
        self.containment = Containment(loaded.runner, loaded.device, limit_s=settings.budget / 2)
        cores: list[set[int]] = []
        if torch.get_num_threads() == 1:  # else torch's own threads would be crowded there too
            cores = cores_apart(settings.decode_threads, spec.place, spec.workers)
        self._crew = Crew(settings.decode_threads, "crew", cores)
        self.texts = Texts(
            loaded.model,
            running,
            budget=settings.budget,
            answer=desk.answer,
            poisoned=self.poisoned,
        )
        self._answers = Answers(
            loaded.model, settings.outputs, self._crew, desk.answer, desk.answer_all
        )
        self.arenas: Any = None
        if loaded.device.kind == "cuda":
            from .cuda_runner import Arenas

            self.arenas = Arenas()
        self.totals = Totals()
        self.reception = Reception(
            Intake(loaded.model, settings),
            self.batcher,
            crew=self._crew,
            desk=desk,
            texts=self.texts,
            answers=self._answers,
            totals=self.totals,
            ring=bell.ring,
            poisoned=self.poisoned,
        )
        self.poison = ""
        self.stopping = False
        self.leaving: set[int] = set()
        self.when_empty: Callable[[], None] | None = None
        self.chores: deque[Callable[[], None]] = deque()
        self._seen: dict[Key, int] = {}
        self._flights: deque[_Launched] = deque()
        self._wreck: list[_Launched] = []
        self._tidy_at = 0.0
        self._active = time.monotonic()
        self._captured = self._active

    def run(self) -> None:
        """Until it is told to stop and everything is answered, or the device is poisoned."""
        with torch.inference_mode():
            while not self.poison and not (self.stopping and self._desk.empty()):
                try:
                    self._turn()
                except Exception:
                    _log.exception("the loop goes on after an error")
        self._crew.stop()
        self.texts.stop()
        self._loaded.profile.save()

    def poisoned(self, text: str) -> None:
        """From any thread: the device answers no more, the loop ends."""
        self.poison = self.poison or text
        self._bell.ring()

    def _turn(self) -> None:
        while self.chores:
            self.chores.popleft()()
        reception = self.reception
        reception.receive()
        now = time.monotonic()
        if self._desk.cancels or now >= self.batcher.next_deadline():
            self._desk.cancels = False
            reception.bury(self.batcher.sweep(now))
            self.texts.sweep()
        flights = self._flights
        units: list[Unit] = []
        if len(flights) < self._runner.depth:
            idle = not flights or now >= self._pace.next_due
            portion = self._portion if flights else None
            units = self.batcher.take(now, idle=idle, coming=reception.coming, portion=portion)
            reception.bury(self.batcher.met())
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

    def _portion(self, key: Any, rows: int) -> int:
        present = self.batcher.rows + sum(launched.rows for launched in self._flights)
        return self._pace.portion(key, rows, present, self._runner.steps(key))

    def _between(self, now: float) -> None:
        """One batch computes and no second one is ripe: gather more for as long as the device has
        something to do, but no longer."""
        launched = self._flights[0]
        window = self.batcher.next_window()
        answered = self._active >= launched.began or bool(self._desk.inbox)
        step = self._pace.gather(now, window, answered=answered)
        if step and not launched.flight.done():
            self._bell.wait(step)
        else:
            self._land(self._flights.popleft())

    def _rest(self, now: float) -> None:
        """Nothing to compute: look after the rest, then sleep until the bell or the next term."""
        self.texts.sweep()
        if self.leaving:
            self._let_go()
        when_empty = self.when_empty
        if when_empty is not None and self._desk.empty():
            self.when_empty = None
            when_empty()
        if self._tidy_at and now >= self._tidy_at:
            self._tidy()
        canary_idle = self._spec.canary_idle or math.inf
        if now - self._active >= canary_idle:
            self._canary()
        until = min(
            self.batcher.next_deadline(), self.batcher.next_window(), self._active + canary_idle
        )
        wait = min(_LONGEST_S, max(0.0, until - time.monotonic()))
        if self._runner.pending():
            wait = min(wait, _GAP_S)
        if self._tidy_at:
            wait = min(wait, max(0.0, self._tidy_at - now))
        if wait:
            self._bell.wait(wait)

    def _tidy(self) -> None:
        """On a CPU slot what the heap keeps after a large batch counts as used: give it back."""
        self._tidy_at = 0.0
        if self._device.allocated() > self._device.static + _KEPT_BYTES:
            self._device.trim()

    def _capture(self) -> None:
        """Graphs that are still wanted: one in each gap, and one now and then without a gap."""
        now = time.monotonic()
        gap = self._desk.empty() and now - self._active >= _GAP_S
        if not gap and now - self._captured < _CAPTURE_EVERY_S:
            return
        while self._flights:
            self._land(self._flights.popleft())
        work = self._running.begin(self._budgets.most, [])
        try:
            self._runner.idle_step()
        except Exception as error:
            self.poisoned(one_line(error))
        finally:
            self._running.end(work)
            self._captured = time.monotonic()

    def _let_go(self) -> None:
        """Unregister arenas of connections that are gone and have nothing left here."""
        gone = self.leaving - self._desk.connections()
        self.leaving -= gone
        if self.arenas is not None:
            for connection in gone:
                self.arenas.unregister(connection)
            self.reception.intake.registered(self.arenas.connections())

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
            self.poisoned(text)

    # -- compute --------------------------------------------------------------------------------

    def _launch(self, units: list[Unit], now: float) -> None:
        units, dead = self._desk.claim(units)
        if dead:
            self.reception.bury(dead)
            if not units:
                return
        key: Any = units[0].key
        if not key.pooled and self._runner.depth > 1:
            self._count(key)
        rows = 0
        pairs: list[tuple[int, int]] = []
        names: list[str] = []
        for unit in units:
            entry: Any = unit.what
            rows += unit.rows
            pairs.append((entry.connection, entry.item.id))
            names.append(entry.item.request_id)
            if unit.rows != unit.notes.rows:
                entry.whole.begun = True
        work = self._running.begin(self._budgets.of(key), pairs, names, rows)
        failure: Failure | None = None
        try:
            flight = self._runner.launch(key, units, rows)
        except Exception as error:
            failure = failure_of(error)
        else:
            size = padded(self._runner.steps(key), rows)
            spent = time.monotonic() - now
            self._pace.launched(key, size, now, spent)
            self._flights.append(_Launched(key, units, rows, size, work, flight, now))
        if failure is not None:
            # Those before it are answered first: they are not to be in the fence's way.
            while self._flights:
                self._land(self._flights.popleft())
            self._contain(key, units, rows, work, now, failure)

    def _count(self, key: Key) -> None:
        """A shape that comes often is worth a slab and graphs."""
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] == _OFTEN:
            bucket = self.reception.intake.promote(key)
            if bucket is not None:
                self._runner.want_graphs(bucket, graph_sizes(self.batcher.max_rows))

    def _land(self, launched: _Launched) -> None:
        failure: Failure | None = None
        outputs: Outputs | None = None
        try:
            outputs = launched.flight.result()
        except Exception as error:
            failure = failure_of(error)
        if failure is not None:
            if failure.kind == "sticky":
                # To free page-locked memory now would end the process before its last answers.
                self._wreck.append(launched)
            launched.flight.release()
            self._contain(
                launched.key, launched.units, launched.rows, launched.work, launched.began, failure
            )
            return
        assert outputs is not None
        took = self._ended(launched.work, launched.rows, launched.began)
        if self._device.kind == "cpu":
            self._tidy_at = self._active + _TIDY_S
        self._pace.landed(launched.key, launched.size, took)
        self._desk.budget_rows = self._room.landed(launched.rows, took)
        self._budgets.note(launched.key, took)
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
            pieces = self.containment.settle(key, units, failure, lambda: self._running.again(work))
            for some, outcome in pieces:
                took = time.monotonic() - began
                if isinstance(outcome, Failure):
                    self.totals.failures += len(some)
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
            self.poisoned(fatal)

    def _ended(self, work: Work, rows: int, began: float) -> float:
        """How long the device had the batch to itself, seconds."""
        previous = self._active
        self._active = time.monotonic()
        self._running.end(work)
        took = self._active - max(began, previous)
        totals = self.totals
        totals.batches += 1
        totals.rows += rows
        totals.busy_s += took
        return took

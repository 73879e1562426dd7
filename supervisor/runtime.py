"""Carries out the fleet's actions and brings the results back as events.

All changes go through `post`, `perform` and `change`, one at a time, on one thread: that is the
only lock there is. What takes time (starting, reclaiming, checking) reports back as an event.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar, assert_never

from msgspec.structs import replace

from gpusup.worker import wire

from . import actions as act
from . import events as ev
from .change import Change
from .fleet import Fleet
from .launcher import Launcher, WorkerProcess
from .life import Life
from .records import Events

log = logging.getLogger("gpusup.supervisor")

T = TypeVar("T")
Key = tuple[str, int]

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class Links(Protocol):
    def expect(self, slot: str, generation: int) -> None: ...
    def started(self, slot: str, generation: int, pid: int) -> None: ...
    def forget(self, slot: str, generation: int) -> None: ...
    def send(self, slot: str, generation: int, message: wire.ToWorkerControl) -> bool: ...


class Surroundings(Protocol):
    """What the runtime asks of the rest of the supervisor. All return at once."""

    def spec(self, launch: act.Launch) -> wire.WorkerSpec: ...
    def publish(self) -> None: ...
    def persist(self) -> None: ...
    def reclaim(self, slot: str, generation: int, device: str, pid: int) -> None: ...
    def check(self, change: str, assignment: act.Assignment) -> None: ...
    def was_host_oom(self) -> bool: ...
    def tidy(self, slot: str, generation: int) -> None: ...


@dataclass(slots=True)
class Known:
    """What the supervisor holds of a living worker beside its `Life`."""

    process: WorkerProcess
    pong: wire.Pong | None = None
    last_error: str = ""
    ready_at: float = 0.0
    reports: dict[str, str] = field(default_factory=dict)


class Runtime:
    def __init__(
        self,
        fleet: Fleet,
        *,
        launcher: Launcher,
        links: Links,
        around: Surroundings,
        events: Events,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.launcher = launcher
        self.links = links
        self.around = around
        self.events = events
        self.now = now
        self.workers: dict[Key, Known] = {}
        self.on_pong: Callable[[Life, wire.Pong], None] = lambda life, pong: None
        self.on_start: Callable[[str], None] = lambda slot: None
        self.on_exit: Callable[[str, str], None] = lambda slot, cause: None
        self.on_change_end: Callable[[Change], None] = lambda change: None
        self._inbox: deque[Callable[[float], list[act.Action]]] = deque()
        self._busy = False
        # What ended before an upgrade in place has been told by the program before us.
        self._ended = {c.id for c in fleet.changes.values() if not c.is_active()}

    # -- the ways in ------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        self._take(partial(self.fleet.handle, event))

    def perform(self, verb: Callable[[float], list[act.Action]]) -> None:
        """Run an operator's verb as one step. Its `Refused` comes out here."""
        if self._busy:  # an action's own doing: its turn comes
            self._inbox.append(verb)
            return
        self._take(verb)

    def change(self, verb: Callable[[float], tuple[Change, list[act.Action]]]) -> Change:
        made: list[Change] = []

        def step(now: float) -> list[act.Action]:
            change, actions = verb(now)
            made.append(change)
            return actions

        self._take(step)
        return made[0]

    def _take(self, step: Callable[[float], list[act.Action]]) -> None:
        # An action may report back before it returns. The report waits its turn instead of
        # running inside the step that caused it.
        self._inbox.append(step)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                step = self._inbox.popleft()
                marks = {id(life): (life, life.moves_made) for life in self.fleet.lives()}
                actions = step(self.now())
                self._log_moves(marks)
                for action in actions:
                    self._do(action)
                self._note_ended()
        except BaseException:
            self._inbox.clear()
            raise
        finally:
            self._busy = False

    # -- actions ----------------------------------------------------------------------------------

    def _do(self, action: act.Action) -> None:
        match action:
            case act.Launch():
                self._launch(action)
            case act.Signal():
                if known := self.workers.get((action.slot, action.generation)):
                    known.process.signal(action.name)
            case act.SendGo():
                self.links.send(action.slot, action.generation, wire.Go())
            case act.SendDrain():
                self.links.send(action.slot, action.generation, wire.Drain())
            case act.Reclaim():
                known = self.workers.get((action.slot, action.generation))
                pid = (known.process.pid or 0) if known else 0
                self.around.reclaim(action.slot, action.generation, action.device, pid)
            case act.Publish():
                self.around.publish()
            case act.Persist():
                self.around.persist()
            case act.RunCheck():
                self.around.check(action.change, action.assignment)
            case act.Tell():
                self.tell(action.kind, action.text, action.level, action.fields)
            case _:
                assert_never(action)

    def tell(self, kind: str, text: str, level: str = "info", fields: Any = None) -> None:
        log.log(LEVELS[level], "%s", text, extra={"fields": {"kind": kind, **(fields or {})}})
        self.events.add(kind, text, fields or {})

    def _launch(self, action: act.Launch) -> None:
        key = (action.slot, action.generation)
        self.links.expect(*key)
        self.on_start(action.slot)
        try:
            process = self.launcher.launch(
                self.around.spec(action),
                action.assignment.config.python,
                partial(self._on_started, key),
                partial(self._on_failed, key),
                partial(self._on_exit, key),
            )
        except OSError as error:
            self._on_failed(key, f"cannot start a worker: {error.strerror}")
            return
        self.workers[key] = Known(process)

    def adopt(self, key: Key, process: WorkerProcess) -> None:
        """A worker that an earlier image of this supervisor had started."""
        self.workers[key] = Known(process)

    def exit_callback(self, key: Key) -> Callable[[int, str], None]:
        return partial(self._on_exit, key)

    def _on_started(self, key: Key, pid: int) -> None:
        slot, generation = key
        self.links.started(slot, generation, pid)
        self.post(ev.WorkerStarted(slot=slot, generation=generation, pid=pid))

    def _on_failed(self, key: Key, text: str) -> None:
        slot, generation = key
        self._forget(key)
        self.post(ev.StartFailed(slot=slot, generation=generation, text=text))

    def _on_exit(self, key: Key, returncode: int, words: str) -> None:
        slot, generation = key
        known = self.workers.get(key)
        host_oom = returncode == -9 and self.around.was_host_oom()
        detail = known.last_error if known else ""
        if not detail and returncode > 0:  # of a signal the number says all
            detail = words
        life = self.fleet.life(slot, generation)
        self.links.forget(slot, generation)
        self.post(
            ev.WorkerExited(
                slot=slot,
                generation=generation,
                returncode=returncode,
                detail=detail,
                host_oom=host_oom,
            )
        )
        if life is not None and life.outcome is not None:
            self.on_exit(slot, str(life.outcome.cause))

    def reclaimed(self, slot: str, generation: int, holders: str) -> None:
        if not holders:
            self._forget((slot, generation))
        self.post(ev.MemoryReturned(slot=slot, generation=generation, holders=holders))

    def _forget(self, key: Key) -> None:
        self.links.forget(*key)
        if known := self.workers.pop(key, None):
            known.process.forget()
        self.around.tidy(*key)

    # -- workers' words ---------------------------------------------------------------------------

    def on_message(self, slot: str, generation: int, message: wire.FromWorkerControl) -> None:
        known = self.workers.get((slot, generation))
        match message:
            case wire.WorkerHello():
                self.post(ev.WorkerSaidHello(slot=slot, generation=generation, pid=message.pid))
            case wire.Loading():
                self.post(
                    ev.LoadMoved(
                        slot=slot,
                        generation=generation,
                        phase=message.phase,
                        done=message.done,
                        total=message.total,
                    )
                )
            case wire.Prepared():
                self.post(
                    ev.WorkerPrepared(
                        slot=slot, generation=generation, host_bytes=message.host_bytes
                    )
                )
            case wire.WorkerReady():
                if known:
                    known.ready_at = self.now()
                self.post(ev.WorkerBecameReady(slot=slot, generation=generation, info=message))
            case wire.LoadFailed():
                if known:
                    known.last_error = message.text
                self.post(
                    ev.LoadFailed(
                        slot=slot, generation=generation, cause=message.cause, text=message.text
                    )
                )
            case wire.Pong():
                if life := self.fleet.life(slot, generation):
                    # What its context takes is found out elsewhere: the worker doesn't know.
                    life.memory = replace(message.memory, context=life.memory.context)
                    message = replace(message, memory=life.memory)
                    life.graphs.update(message.graphs)
                    life.peaks.update(message.peaks)
                    self.on_pong(life, message)
                if known:
                    known.pong = message
            case wire.Fenced():
                if known:
                    known.last_error = message.text
                self.post(ev.WorkerFenced(slot=slot, generation=generation, text=message.text))
            case wire.Drained():
                self.post(ev.WorkerDrained(slot=slot, generation=generation))
            case wire.Report():
                if known:
                    known.reports[message.kind] = message.text
            case _:
                assert_never(message)

    # -- saying what happened ---------------------------------------------------------------------

    def _log_moves(self, marks: dict[int, tuple[Life, int]]) -> None:
        for life in self.fleet.lives():
            marks.setdefault(id(life), (life, 0))
        for life, before in marks.values():
            count = life.moves_made - before
            for move in list(life.story)[len(life.story) - count :] if count else ():
                text = (
                    f"slot={life.slot} generation={life.generation} "
                    f'{move.before} -> {move.after} cause="{move.cause}"'
                )
                self.tell(
                    "move",
                    text,
                    fields={
                        "slot": life.slot,
                        "generation": life.generation,
                        "before": str(move.before),
                        "after": str(move.after),
                        "cause": move.cause,
                    },
                )

    def _note_ended(self) -> None:
        for change in self.fleet.changes.values():
            if not change.is_active() and change.id not in self._ended:
                self._ended.add(change.id)
                self.on_change_end(change)
        self._ended &= self.fleet.changes.keys()

"""The life of one worker: one generation in one slot, from its start until its memory is back.

Events in, actions out; no clock, no process, no socket. Hangs are judged by progress: the stamps
of each batch against its budget, bytes moved while loading. A late beat alone makes a worker
*suspect* (it gets no new work), nothing more, for as long as its batch is within its budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple, assert_never

import msgspec

from gpusup.conf.schema import SupervisionConfig
from gpusup.worker import wire
from gpusup.worker.progress import Progress

from . import events as ev
from .actions import Action, Assignment, Reclaim, SendDrain, SendGo, Signal, SignalName
from .backoff import Cause


class State(StrEnum):
    SPAWNED = "spawned"
    LOADING = "loading"
    HELD = "held"
    WARMING = "warming"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    STOPPING = "stopping"
    KILLING = "killing"
    UNKILLABLE = "unkillable"
    RECLAIMING = "reclaiming"
    GONE = "gone"


_ENDS: Final = frozenset({State.KILLING, State.RECLAIMING, State.GONE})

#: Every move a worker may make. The diagram in the documents is printed from this table.
MOVES: Final[dict[State, frozenset[State]]] = {
    State.SPAWNED: _ENDS | {State.LOADING},
    State.LOADING: _ENDS | {State.WARMING, State.HELD, State.READY},
    State.HELD: _ENDS | {State.LOADING},
    State.WARMING: _ENDS | {State.LOADING, State.HELD, State.READY},
    State.READY: _ENDS | {State.SUSPECT, State.DRAINING},
    State.SUSPECT: _ENDS | {State.READY, State.DRAINING},
    State.DRAINING: _ENDS | {State.STOPPING},
    State.STOPPING: _ENDS,
    State.KILLING: frozenset({State.RECLAIMING, State.UNKILLABLE, State.GONE}),
    State.UNKILLABLE: frozenset({State.RECLAIMING}),
    State.RECLAIMING: frozenset({State.GONE}),
    State.GONE: frozenset(),
}

#: In these the proxies may know the worker.
ROUTED: Final = frozenset({State.READY, State.SUSPECT, State.DRAINING})
#: In these a process may exist or its memory may not be back.
OCCUPYING: Final = frozenset(State) - {State.GONE}

#: In these a worker is on its way to serve.
COMING: Final = frozenset({State.SPAWNED, State.LOADING, State.HELD, State.WARMING})

#: Who waits for Go for days must be found to hang before a death counts on it.
_JUDGED: Final = ROUTED | {State.HELD}

#: A batch that has used its budget up to here is not about to end.
_OVER: Final = 1.02

_WARM_PHASES: Final = frozenset({"warm-up", "golden"})


class Move(NamedTuple):
    at: float
    before: State
    cause: str
    after: State


class IllegalMove(Exception):
    """A bug in life.py. Carries the story, which is what one needs to find it."""

    def __init__(self, name: str, before: State, after: State, story: list[Move]) -> None:
        super().__init__(f"{name}: {before} -> {after} after {story}")
        self.story = story


class Outcome(NamedTuple):
    cause: Cause
    text: str


#: What `export` takes along as it is.
_PLAIN: Final = (
    "slot", "device", "generation", "held", "moves_made", "since", "pid", "phase", "load_done",
    "load_total", "graphs", "peaks", "why_suspect", "holders", "ready_at", "exited", "_deadline",
    "_judge_after", "_steps", "_dumping", "standby", "held_context", "context_open",
)  # fmt: skip


class Life:
    def __init__(
        self,
        slot: str,
        device: str,
        generation: int,
        assignment: Assignment,
        config: SupervisionConfig,
        now: float,
        *,
        held: bool = False,
    ) -> None:
        self.slot = slot
        self.device = device
        self.generation = generation
        self.assignment = assignment
        self.config = config
        self.held = held
        self.standby = False  # prepared for a death that may never come (standby.py)
        self.held_context = False  # whether it opens the device before Go
        self.context_open = False
        self.state = State.SPAWNED
        self.story: deque[Move] = deque(maxlen=64)
        self.moves_made = 0
        self.since = now
        self.pid = 0
        self.phase = "starting"
        self.load_done = 0
        self.load_total = 0
        self.info: wire.WorkerReady | None = None
        self.memory = wire.Memory()
        self.graphs: dict[str, str] = {}
        self.peaks: dict[str, int] = {}
        self.progress: Progress | None = None
        self.why_suspect = ""
        self.holders = ""
        self.outcome: Outcome | None = None
        self.ready_at = 0.0
        self.exited = False
        self._deadline = now + config.hello_limit
        self._judge_after = 0.0
        self._verdict: Outcome | None = None  # decided before the death, e.g. a hang
        self._steps = -1
        self._dumping = False

    # -- what the fleet may ask for ---------------------------------------------------------------

    def go(self, now: float) -> list[Action]:
        """A held worker may have the device."""
        self.held = False
        if self.state is not State.HELD:
            return []
        self._enter(State.LOADING, now, "go")
        self._deadline = now + self.config.load_stall
        return [SendGo(slot=self.slot, generation=self.generation)]

    def drain(self, now: float, cause: str, limit_s: float | None = None) -> list[Action]:
        """Finish what is there, then stop. Nothing is lost unless the limit passes."""
        match self.state:
            case State.READY | State.SUSPECT:
                self._verdict = Outcome(Cause.REQUESTED, cause)
                self._enter(State.DRAINING, now, cause)
                limit = self.config.drain_limit if limit_s is None else limit_s
                self._deadline = now + limit
                return [SendDrain(slot=self.slot, generation=self.generation)]
            case State.SPAWNED | State.LOADING | State.HELD | State.WARMING:
                return self.kill(now, Outcome(Cause.REQUESTED, cause))
            case _:
                return []

    def kill(
        self, now: float, outcome: Outcome, *, dump: bool = False, dump_s: float | None = None
    ) -> list[Action]:
        """End it now; with `dump` the stacks of all its threads go to its log first, for which it
        gets `dump_s` seconds (None: as configured)."""
        if self.state in (State.KILLING, State.UNKILLABLE, State.RECLAIMING, State.GONE):
            return []
        self._verdict = outcome
        self._enter(State.KILLING, now, outcome.text)
        if dump:
            self._deadline = now + (self.config.dump_wait if dump_s is None else dump_s)
            self._dumping = True
            return [self._signal("USR2", outcome.text)]
        return self._kill_now(now, outcome.text)

    # -- what the world reports -------------------------------------------------------------------

    def handle(self, event: ev.WorkerEvents, now: float) -> list[Action]:
        match event:
            case ev.WorkerStarted():
                self.pid = event.pid
                # The start took so long that the slot has given up on it: it must still die.
                return self._kill_now(now, "late start") if self.state is State.KILLING else []
            case ev.StartFailed():
                self.exited = True
                self.outcome = self._verdict or Outcome(Cause.CRASH, event.text)
                self._enter(State.GONE, now, event.text)
                return []
            case ev.WorkerSaidHello():
                self.pid = event.pid
                if self.state is State.SPAWNED:
                    self._enter(State.LOADING, now, "hello")
                    self._deadline = now + self.config.load_stall
                return []
            case ev.LoadMoved():
                self._load_moved(event, now)
                return []
            case ev.WorkerPrepared():
                return self._prepared(now)
            case ev.WorkerBecameReady():
                self._ready(event.info, now)
                return []
            case ev.LoadFailed():
                self._verdict = Outcome(
                    _LOAD_CAUSES.get(event.cause, Cause.LOAD_FAILED), event.text
                )
                return []
            case ev.ProgressSeen():
                return self._judge(event, now)
            case ev.WorkerFenced():
                return self.kill(now, Outcome(Cause.FENCED, event.text))
            case ev.WorkerDrained():
                if self.state is not State.DRAINING:
                    return []
                self._enter(State.STOPPING, now, "drained")
                self._deadline = now + self.config.term_limit
                return [self._signal("TERM", "drained")]
            case ev.WorkerExited():
                return self._exited(event, now)
            case ev.MemoryReturned():
                self.holders = event.holders
                if self.state is State.RECLAIMING and not event.holders:
                    self._enter(State.GONE, now, "memory is back")
                return []
            case _:
                assert_never(event)

    def tick(self, now: float) -> list[Action]:
        """Judge the deadline of the present state."""
        if now < self._deadline:
            return []
        c = self.config
        match self.state:
            case State.SPAWNED:
                text = f"no hello within {c.hello_limit:g} s"
                return self.kill(now, Outcome(Cause.HANG, text), dump=bool(self.pid))
            case State.LOADING:
                text = f"loading ({self.phase}) moved nothing for {c.load_stall:g} s"
                return self.kill(now, Outcome(Cause.HANG, text), dump=True)
            case State.WARMING:
                text = f"{self.phase} took over {c.warm_up_limit:g} s"
                return self.kill(now, Outcome(Cause.HANG, text), dump=True)
            case State.DRAINING:
                text = f"not drained within {self._deadline - self.since:g} s"
                return self.kill(now, Outcome(Cause.REQUESTED, text))
            case State.STOPPING:
                # TERM is only a courtesy: nothing is left in it.
                text = f"TERM ignored for {c.term_limit:g} s"
                return self.kill(now, self._verdict or Outcome(Cause.REQUESTED, text))
            case State.KILLING if self._dumping:
                return self._kill_now(now, "hang")
            case State.KILLING:
                self._enter(State.UNKILLABLE, now, f"no death within {c.kill_limit:g} s of KILL")
                return []
            case _:
                return []

    def blame(self, outcome: Outcome) -> None:
        """Why it is about to end, unless that is known already."""
        self._verdict = self._verdict or outcome

    def postpone(self, seconds: float, now: float) -> None:
        """The judge itself was stopped for a while: nobody is late because of that."""
        self._deadline += seconds
        self._judge_after = now + self.config.suspect_after

    # -- an upgrade in place ----------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        """All of it as builtins, but for what it was made with: assignment and configuration."""
        return {name: getattr(self, name) for name in _PLAIN} | {
            "state": str(self.state),
            "story": [[m.at, str(m.before), m.cause, str(m.after)] for m in self.story],
            "info": msgspec.to_builtins(self.info),
            "memory": msgspec.to_builtins(self.memory),
            "outcome": self.outcome and [str(self.outcome.cause), self.outcome.text],
            "verdict": self._verdict and [str(self._verdict.cause), self._verdict.text],
        }

    @classmethod
    def restore(
        cls, exported: Mapping[str, Any], assignment: Assignment, config: SupervisionConfig
    ) -> Life:
        e = exported
        life = cls(e["slot"], e["device"], e["generation"], assignment, config, 0.0)
        for name in _PLAIN:
            setattr(life, name, e[name])
        life.state = State(e["state"])
        life.story.extend(Move(at, State(b), why, State(a)) for at, b, why, a in e["story"])
        life.info = msgspec.convert(e["info"], wire.WorkerReady | None)
        life.memory = msgspec.convert(e["memory"], wire.Memory)
        life.outcome = Outcome(Cause(e["outcome"][0]), e["outcome"][1]) if e["outcome"] else None
        life._verdict = Outcome(Cause(e["verdict"][0]), e["verdict"][1]) if e["verdict"] else None
        return life

    # -- parts ------------------------------------------------------------------------------------

    def _kill_now(self, now: float, why: str) -> list[Action]:
        self._dumping = False
        self._deadline = now + self.config.kill_limit
        return [self._signal("KILL", why)]

    def _load_moved(self, event: ev.LoadMoved, now: float) -> None:
        self.phase, self.load_done, self.load_total = event.phase, event.done, event.total
        if self.state is State.LOADING and event.phase in _WARM_PHASES:
            self._enter(State.WARMING, now, event.phase)
            self._deadline = now + self.config.warm_up_limit
        elif self.state is State.LOADING:
            self._deadline = now + self.config.load_stall

    def _prepared(self, now: float) -> list[Action]:
        if self.state not in (State.LOADING, State.WARMING):
            return []
        self._enter(State.HELD, now, "prepared")
        self.context_open = self.held_context
        self._deadline = float("inf")
        return [] if self.held else self.go(now)  # Go was given before it got here

    def _ready(self, info: wire.WorkerReady, now: float) -> None:
        self.info, self.memory = info, info.memory
        self.graphs.update(info.graphs)
        self.peaks.update(info.peaks)
        if self.state in (State.LOADING, State.WARMING):
            self.phase = "ready"
            self._enter(State.READY, now, "warm")
            self._deadline = float("inf")
            self.ready_at = now

    def _judge(self, event: ev.ProgressSeen, now: float) -> list[Action]:
        p = event.progress
        self.progress = p
        if self.state in (State.LOADING, State.WARMING) and p.load_steps != self._steps:
            self._steps = p.load_steps
            if self.state is State.LOADING:
                self._deadline = now + self.config.load_stall
        if self.state not in _JUDGED or now < self._judge_after:
            return []
        c = self.config
        beat_age = now - p.beat
        if self.state is State.HELD and beat_age <= c.beat_limit:
            return []
        batch_age = now - p.batch_started if p.batch_started else 0.0
        over = p.batch_started > 0 and batch_age > p.batch_budget
        if over and batch_age > p.batch_budget * _OVER:
            text = f"a batch runs for {batch_age:.2f} s, its budget is {p.batch_budget:g} s"
            # Clients are answered within a fifth more than the budget, the dump included.
            dump_s = min(c.dump_wait, max(0.02, p.batch_budget / 20))
            return self.kill(now, Outcome(Cause.HANG, text), dump=True, dump_s=dump_s)
        if not p.batch_started and beat_age > c.beat_limit:
            what = "held" if self.state is State.HELD else "idle"
            text = f"no beat for {beat_age:.1f} s while {what}, the limit is {c.beat_limit:g} s"
            return self.kill(now, Outcome(Cause.HANG, text), dump=True)
        why = ""
        if over:
            why = f"batch over its budget of {p.batch_budget:g} s"
        elif beat_age > c.suspect_after:
            where = ", inside the driver" if event.process_state == "D" else ""
            why = f"no beat for {c.suspect_after:g} s{where}"
        self.why_suspect = why
        if why and self.state is State.READY:
            self._enter(State.SUSPECT, now, why)
        elif not why and self.state is State.SUSPECT:
            self._enter(State.READY, now, "progress again")
        return []

    def _exited(self, event: ev.WorkerExited, now: float) -> list[Action]:
        if self.exited:
            return []
        self.exited = True
        self.outcome = self._classify(event)
        self._enter(State.RECLAIMING, now, self.outcome.text)
        self._deadline = float("inf")  # the runtime watches the memory and has the limit
        return [Reclaim(slot=self.slot, generation=self.generation, device=self.device)]

    def _classify(self, event: ev.WorkerExited) -> Outcome:
        how = f"signal {-event.returncode}" if event.returncode < 0 else f"exit {event.returncode}"
        said = f": {event.detail}" if event.detail else ""
        if self._verdict is not None:
            return self._verdict
        if event.host_oom:
            return Outcome(Cause.HOST_OOM, f"killed by the kernel, out of host memory ({how})")
        match event.returncode:
            case wire.EXIT_CONFIG:
                return Outcome(Cause.CONFIG, how + said)
            case wire.EXIT_LOAD_OOM:
                return Outcome(Cause.LOAD_OOM, how + said)
            case wire.EXIT_FENCED:
                return Outcome(Cause.FENCED, how + said)
            case wire.EXIT_WRONG_DEVICE:
                return Outcome(Cause.CONFIG, how + said)
            case _:
                return Outcome(Cause.CRASH, how + said)

    def _enter(self, after: State, now: float, cause: str) -> None:
        if after not in MOVES[self.state]:
            raise IllegalMove(f"{self.slot}#{self.generation}", self.state, after, list(self.story))
        self.story.append(Move(now, self.state, cause, after))
        self.moves_made += 1
        self.state, self.since = after, now

    def _signal(self, name: SignalName, why: str) -> Signal:
        return Signal(slot=self.slot, generation=self.generation, name=name, why=why)


#: The others are LOAD_FAILED.
_LOAD_CAUSES: Final = {
    "config": Cause.CONFIG,
    "oom": Cause.LOAD_OOM,
    "device": Cause.CONFIG,
}


def diagram() -> str:
    """MOVES as a mermaid diagram. The documents hold this very text, and a test compares."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.SPAWNED}"]
    for before in State:
        lines += [f"    {before} --> {after}" for after in State if after in MOVES[before]]
    return "\n".join(lines)

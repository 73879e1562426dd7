"""Changes: whatever takes an operator's wish more than one step. Pure.

A change is driven by `advance` after every event and never waits by itself. `Swap` replaces what
runs in a model's slots, one slot at a time: beside the old worker where there is room (*surge*),
else in its place (*in-place*: the successor is prepared in host memory while the old one still
serves). If the new one does not become ready, what was changed is changed back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .actions import Action, Assignment, Persist, RunCheck, Tell
from .backoff import Cause
from .books import CONTEXT_BYTES
from .life import Outcome, State

if TYPE_CHECKING:
    from .fleet import Fleet
    from .slot import Slot

Strategy = Literal["auto", "surge", "in-place"]
#: "waiting" is a canary that waits for promote or rollback.
ChangeState = Literal["running", "waiting", "done", "failed", "rolled-back", "aborted"]


class Step(NamedTuple):
    at: float
    text: str


@dataclass(slots=True, eq=False)
class Change:
    """`model`: whose changes exclude each other; "" for those that touch slots only."""

    kind: str
    model: str
    title: str
    fleet: Fleet
    id: str = ""
    state: ChangeState = "running"
    text: str = ""
    started: float = 0.0
    ended: float = 0.0
    steps: list[Step] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def is_active(self) -> bool:
        return self.state in ("running", "waiting")

    def advance(self, now: float) -> list[Action]:
        raise NotImplementedError

    def check_done(self, problem: str, now: float) -> None:
        """The answer to RunCheck."""

    def abort(self, now: float) -> str:
        """Give it up if that is still possible. Returns why it is not, or ""."""
        return "this change can't be aborted"

    def note(self, now: float, text: str) -> list[Action]:
        self.steps.append(Step(now, text))
        fields = {"change": self.id, "model": self.model}
        return [Tell(kind="change", text=f"change {self.id} {self.title}: {text}", fields=fields)]

    def end(self, now: float, state: ChangeState, text: str) -> list[Action]:
        self.state, self.text, self.ended = state, text, now
        return [*self.note(now, f"{state}: {text}" if text else state), Persist()]


@dataclass(slots=True, eq=False)
class Await(Change):
    """Waits until the named slots are as wished: without a worker, or with a ready one."""

    slots: list[str] = field(default_factory=list)
    until: Literal["empty", "ready"] = "empty"
    deadline: float = float("inf")

    def advance(self, now: float) -> list[Action]:
        slots = [self.fleet.slots[name] for name in self.slots if name in self.fleet.slots]
        if self.until == "empty":
            waiting = [s for s in slots if s.worker is not None]
        else:
            waiting = [s for s in slots if s.wanted is not None and not s.is_ready()]
            dead = [s for s in waiting if s.failed]
            if dead:
                return self.end(now, "failed", f"{dead[0].name}: {dead[0].failed}")
        if not waiting:
            return self.end(now, "done", "")
        if now >= self.deadline:
            left = ", ".join(f"{s.name} ({s.state(now)})" for s in waiting)
            return self.end(now, "failed", f"not {self.until} in time: {left}")
        return []


class Stage(StrEnum):
    CHECK = "check"
    NEXT = "next"
    PLAIN = "start"
    SURGE = "surge"
    RETIRE = "retire"
    PREPARE = "prepare"
    DRAIN = "drain"
    LOAD = "load"
    CANARY = "canary"
    UNDO = "undo"
    UNDO_WAIT = "undo-wait"


@dataclass(slots=True, eq=False)
class Swap(Change):
    new: Assignment = None  # type: ignore[assignment]
    old: Assignment = None  # type: ignore[assignment]
    strategy: Strategy = "auto"
    todo: list[str] = field(default_factory=list)
    check: bool = True
    canary_share: float = 0.0
    drain_limit_s: float | None = None
    stage: Stage = Stage.CHECK
    current: str = ""
    done: list[str] = field(default_factory=list)
    undo: list[str] = field(default_factory=list)
    reason: str = ""
    aborted: bool = False
    _asked: bool = False
    _problem: str | None = None
    _keep_canary: int = 0
    _gap_from: float = 0.0

    # -- driving ----------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for _ in range(16):  # several stages may pass at once, but a bug must not spin
            before = self.stage, self.current
            actions += self._step(now)
            if not self.is_active() or (self.stage, self.current) == before:
                break
        return actions

    def _step(self, now: float) -> list[Action]:
        match self.stage:
            case Stage.CHECK:
                return self._on_check(now)
            case Stage.NEXT:
                return self._on_next(now)
            case Stage.PLAIN:
                return self._on_plain(now)
            case Stage.SURGE:
                return self._on_surge(now)
            case Stage.RETIRE:
                return self._on_retire(now)
            case Stage.PREPARE:
                return self._on_prepare(now)
            case Stage.DRAIN:
                return self._on_drain(now)
            case Stage.LOAD:
                return self._on_load(now)
            case Stage.CANARY:
                return []
            case Stage.UNDO:
                return self._on_undo(now)
            case Stage.UNDO_WAIT:
                return self._on_undo_wait(now)

    def check_done(self, problem: str, now: float) -> None:
        self._problem = problem

    def abort(self, now: float) -> str:
        if self.stage in (Stage.UNDO, Stage.UNDO_WAIT):
            return f"change {self.id} is already being taken back"
        self.aborted = True
        if self.stage in (Stage.DRAIN, Stage.LOAD, Stage.RETIRE):
            self.reason = "aborted"  # taken back as soon as this slot is through
            return ""
        self._give_back(now, "aborted")
        return ""

    def promote(self, now: float) -> str:
        if self.stage is not Stage.CANARY:
            return f"change {self.id} is no canary that waits"
        record = self.fleet.models[self.model]
        record.canary, record.canary_share = None, 0.0
        self.state = "running"
        slot = self.fleet.slots[self.current] if self.current else None
        if slot is not None and slot.successor is not None:
            self.stage = Stage.SURGE  # both were in one slot: now the old one leaves
            self._keep_canary = 0
        else:
            self.current, self.stage, self._keep_canary = "", Stage.NEXT, 0
        return ""

    def take_back(self, now: float, why: str) -> str:
        if self.stage is not Stage.CANARY:
            return f"change {self.id} is no canary that waits"
        self.state = "running"
        self._give_back(now, why)
        return ""

    # -- the stages -------------------------------------------------------------------------------

    def _on_check(self, now: float) -> list[Action]:
        if not self.check:
            self.stage = Stage.NEXT
            return []
        if not self._asked:
            self._asked = True
            return [
                *self.note(now, f"checking version {self.new.version}"),
                RunCheck(change=self.id, assignment=self.new),
            ]
        if self._problem is None:
            return []
        if self._problem:
            return self.end(now, "failed", f"check: {self._problem}; nothing was touched")
        self._begin_canary()
        self.stage = Stage.NEXT
        return []

    def _begin_canary(self) -> None:
        if self.canary_share:
            self._keep_canary = max(1, round(self.canary_share * len(self.todo)))
            record = self.fleet.models[self.model]
            record.canary, record.canary_share = self.new, self.canary_share

    def _on_next(self, now: float) -> list[Action]:
        if self._keep_canary and len(self.done) >= self._keep_canary and self.todo:
            self.stage, self.state, self.current = Stage.CANARY, "waiting", ""
            return self.note(now, f"canary: {self.canary_share:.0%} of requests go to it")
        if not self.todo:
            return self._finish(now)
        name = self.todo[0]
        slot = self.fleet.slots.get(name)
        if slot is None:
            self.todo.pop(0)
            return []
        if slot.standing != "schedulable":
            self.todo.pop(0)
            slot.wanted = self.new
            return self.note(now, f"{name} is {slot.standing}: gets it when it takes part again")
        # From another slot's point of view: never below one ready worker unless it is the only one.
        others = [s for s in self.fleet.slots_of(self.model, fallback=False) if s.name != name]
        able = [s for s in others if s.takes_part() and s.wanted is not None]
        if slot.is_ready() and able and not any(s.is_ready() for s in able):
            return []
        self.current = name
        self.todo.pop(0)
        if not slot.is_ready():
            return self._plain(slot, now)
        slot.reserved_by = self.id
        how, why = self.choose(slot)
        if self._keep_canary and not others:
            how, why = "surge", "the canary runs beside the only worker"
        actions = self.note(now, f"{name}: {how} ({why})")
        if how == "surge":
            self.stage = Stage.SURGE
            return actions + slot.start_successor(self.new, now, held=False)
        self.stage = Stage.PREPARE
        room = self.fleet.books.room(slot.device)
        on_gpu = self.fleet.devices[slot.device].place.kind == "cuda"
        context = not on_gpu or room is None or room >= CONTEXT_BYTES
        return actions + slot.start_successor(self.new, now, held=True, held_context=context)

    def choose(self, slot: Slot) -> tuple[Literal["surge", "in-place"], str]:
        """How this slot is to be swapped, with the arithmetic."""
        if self.strategy != "auto":
            return self.strategy, "as asked"
        room = self.fleet.books.room(slot.device)
        if room is None:
            return "in-place", f"memory of {slot.device} is not known"
        rest, peak = self.fleet.books.need(self.new, slot.device)
        total = self.fleet.devices[slot.device].total
        safety = min(self.fleet.config.devices.safety, total // 16)
        want = rest + peak + safety
        sums = f"needs {rest} at rest + {peak} for batches + {safety} safety = {want} bytes, "
        sums += f"{room} are free"
        return ("surge" if want <= room else "in-place"), sums

    def _plain(self, slot: Slot, now: float) -> list[Action]:
        """Nobody serves here: the next start is simply the new version."""
        self.stage = Stage.PLAIN
        slot.wanted = self.new
        actions = self.note(now, f"{slot.name}: started with it ({slot.state(now)} before)")
        if slot.worker is not None:
            actions += slot.worker.kill(now, Outcome(Cause.REQUESTED, "replaced"))
        return actions + slot.reset(now)

    def _on_plain(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.is_ready() and slot.worker and slot.worker.assignment is self.new:
            return self._slot_done(now)
        if slot.failed or slot.backoff.strikes:
            return self._give_back(now, slot.failed or slot.last_exit)
        return []

    def _on_surge(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.successor is None:
            return self._give_back(now, self._why(slot))
        if slot.successor.state is not State.READY:
            return []
        if self._keep_canary and not self.todo and not self.done:
            self.stage, self.state = Stage.CANARY, "waiting"
            return self.note(now, f"canary: {self.canary_share:.0%} of requests go to it")
        self.stage = Stage.RETIRE
        actions = self.note(now, f"{slot.name}: new worker is ready, the old one drains")
        if slot.worker is not None:
            actions += slot.worker.drain(now, "replaced", self.drain_limit_s)
        return actions

    def _on_retire(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.worker is not None:
            return []
        if slot.succeed() is None:  # it died just now; it had been ready, so start it again
            slot.wanted = self.new
            slot.reserved_by = ""
            self.stage = Stage.PLAIN
            return []
        return self._slot_done(now)

    def _on_prepare(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.successor is None:
            return self._give_back(now, self._why(slot))
        if slot.successor.state is not State.HELD:
            return []
        self.stage = Stage.DRAIN
        self._gap_from = now
        actions = self.note(now, f"{slot.name}: successor is prepared, the old worker drains")
        if slot.worker is not None:
            actions += slot.worker.drain(now, "replaced", self.drain_limit_s)
        return actions

    def _on_drain(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.worker is not None:
            return []
        heir = slot.succeed()
        if heir is None:
            return self._give_back(now, self._why(slot))
        self.stage = Stage.LOAD
        return heir.go(now)

    def _on_load(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.worker is None:
            slot.backoff.forgive()
            slot.failed = ""
            return self._give_back(now, slot.last_exit)
        if slot.worker.state is not State.READY:
            return []
        gap = now - self._gap_from
        self.numbers["longest_gap_s"] = max(gap, self.numbers.get("longest_gap_s", 0.0))
        return self.note(now, f"{slot.name}: ready {gap:.3f} s after its drain") + self._slot_done(
            now
        )

    def _slot_done(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        slot.reserved_by = ""
        slot.wanted = self.new
        self.done.append(self.current)
        self.current, self.stage = "", Stage.NEXT
        if self.aborted:
            return self._give_back(now, self.reason or "aborted")
        return self.note(now, f"{slot.name}: serves version {self.new.version}")

    def _finish(self, now: float) -> list[Action]:
        record = self.fleet.models[self.model]
        if self.new is not self.old:
            record.previous, record.current = record.current, self.new
        record.canary, record.canary_share = None, 0.0
        for slot in self.fleet.slots_of(self.model):
            if slot.wanted is not None:
                slot.wanted = record.current
        return self.end(now, "done", f"version {self.new.version}")

    # -- taking it back ---------------------------------------------------------------------------

    def _why(self, slot: Slot) -> str:
        return slot.successor_outcome.text if slot.successor_outcome else slot.last_exit

    def _give_back(self, now: float, why: str) -> list[Action]:
        self.reason = why
        self.undo = [*self.done, self.current] if self.current else list(self.done)
        record = self.fleet.models[self.model]
        record.canary, record.canary_share = None, 0.0
        for slot in self.fleet.slots_of(self.model):
            if slot.wanted is self.new:
                slot.wanted = self.old
        self.stage, self.current, self.state = Stage.UNDO, "", "running"
        return self.note(now, f"new version is taken back: {why}")

    def _on_undo(self, now: float) -> list[Action]:
        if not self.undo:
            state: ChangeState = "aborted" if self.aborted else "rolled-back"
            return self.end(now, state, self.reason)
        self.current = self.undo.pop()
        self.stage = Stage.UNDO_WAIT
        slot = self.fleet.slots[self.current]
        slot.wanted = self.old
        actions: list[Action] = []
        if slot.successor is not None:
            actions += slot.successor.drain(now, "taken back")
        if slot.worker is not None and slot.worker.assignment is self.new:
            actions += slot.worker.drain(now, "taken back")
        elif slot.worker is None:
            actions += slot.reset(now)
        slot.reserved_by = ""
        return actions

    def _on_undo_wait(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.failed:
            text = f"{self.reason}; and the old version did not come back: {slot.failed}"
            return self.end(now, "failed", text)
        back = slot.is_ready() and slot.worker and slot.worker.assignment is not self.new
        if (back and slot.successor is None) or slot.standing != "schedulable":
            self.current, self.stage = "", Stage.UNDO
        return []


@dataclass(slots=True, eq=False)
class Task(Change):
    """Something that reports its own end, e.g. the replacement of a proxy."""

    def advance(self, now: float) -> list[Action]:
        return []

"""The swap: replaces what runs in a model's slots, one slot at a time. Pure.

Beside the old worker where there is room (*surge*); else while a stand-in serves on a spare device;
else in its place (*in-place*: the successor is prepared in host memory while the old one still
serves). If the new one does not become ready, what was changed is changed back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from gpusup.conf.schema import ModelConfig

from . import standby, undo
from .actions import Action, Assignment, RunCheck
from .backoff import Cause
from .change import Change
from .life import Outcome, State
from .stages import Stage
from .swap_plan import Strategy, Way, way

if TYPE_CHECKING:
    from .slot import Slot


#: For the proxies to connect to a new worker before the old one leaves.
ACQUAINT_S: Final = 0.1


@dataclass(slots=True, eq=False)
class Swap(Change):
    """`allow_gap`: how long requests may wait for this swap, instead of the model's `hold`.
    `configure`: the model's section in the file, if it is that which has changed."""

    new: Assignment = None  # type: ignore[assignment]
    old: Assignment = None  # type: ignore[assignment]
    strategy: Strategy = "auto"
    todo: list[str] = field(default_factory=list)
    check: bool = True
    canary_share: float = 0.0
    allow_gap: float | None = None
    configure: ModelConfig | None = None
    stage: Stage = Stage.CHECK
    current: str = ""
    done: list[str] = field(default_factory=list)
    to_undo: list[str] = field(default_factory=list)
    reason: str = ""
    aborted: bool = False
    _asked: bool = False
    _problem: str | None = None
    _keep_canary: int = 0
    _gap_from: float = 0.0
    _spare: str = ""
    _waiting: bool = False
    before: dict[str, Assignment | None] = field(default_factory=dict)

    # -- driving ----------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for _ in range(16):  # several stages may pass at once, but a bug must not spin
            before = self.stage, self.current
            actions += self._step(now)
            if not self.is_active() or (self.stage, self.current) == before:
                break
        self._show()
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
            case Stage.SPARE:
                return self._on_spare(now)
            case Stage.PREPARE:
                return self._on_prepare(now)
            case Stage.DRAIN:
                return self._on_drain(now)
            case Stage.LOAD:
                return self._on_load(now)
            case Stage.CANARY:
                return self._on_canary(now)
            case Stage.UNDO:
                return undo.on_undo(self, now)
            case Stage.UNDO_WAIT:
                return undo.on_undo_wait(self, now)

    def _show(self) -> None:
        """What a progress bar needs."""
        slot = self.fleet.slots.get(self._spare if self.stage is Stage.SPARE else self.current)
        heir = (slot.successor or slot.worker) if slot else None
        self.progress = {
            "stage": str(self.stage),
            "slots_done": len(self.done),
            "slots": len(self.done) + len(self.todo) + bool(self.current),
            "slot": self.current,
            "phase": heir.phase if heir else "",
            "loaded_bytes": heir.load_done if heir else 0,
            "total_bytes": heir.load_total if heir else 0,
        }

    def check_done(self, problem: str, now: float) -> None:
        self._problem = problem

    def abort(self, now: float) -> str:
        if self.stage in (Stage.UNDO, Stage.UNDO_WAIT):
            return f"change {self.id} is already being taken back"
        self.aborted = True
        if self.stage in (Stage.DRAIN, Stage.LOAD, Stage.RETIRE):
            self.reason = "aborted"  # taken back as soon as this slot is through
            return ""
        undo.give_back(self, now, "aborted")
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
        undo.give_back(self, now, why)
        return ""

    # -- the stages -------------------------------------------------------------------------------

    def _on_check(self, now: float) -> list[Action]:
        self.before = {slot.name: slot.wanted for slot in self.fleet.slots_of(self.model)}
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
        problem = self._problem or self._misfit(now)
        if problem:
            return self.end(now, "failed", f"check: {problem}; nothing was touched")
        self._begin_canary()
        self.stage = Stage.NEXT
        return []

    def _misfit(self, now: float) -> str:
        """Why the ledger says that it can't work, "" if it can."""
        for name in self.todo:
            found = self.way(self.fleet.slots[name], now)
            if found.how == "refused":
                return found.why
        return ""

    def _begin_canary(self) -> None:
        if self.canary_share and self.todo:
            self._keep_canary = max(1, round(self.canary_share * len(self.todo)))
            record = self.fleet.models[self.model]
            record.canary, record.canary_share = self.new, self.canary_share

    def _on_next(self, now: float) -> list[Action]:
        if self._keep_canary and len(self.done) >= self._keep_canary:
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
            if self._waiting:
                return []
            self._waiting = True
            return self.note(now, f"{name}: waits until another worker is ready")
        self._waiting = False
        if problem := standby.stuck(slot):
            return undo.give_back(self, now, problem)
        need = sum(self.fleet.books.need(self.new, slot.device))
        actions, aside = standby.step_aside(self.fleet, slot, need, now)
        if not aside:
            return actions
        self.current = name
        self.todo.pop(0)
        if not slot.is_ready():
            return self._plain(slot, now)
        return self._begin(slot, now)

    def _begin(self, slot: Slot, now: float) -> list[Action]:
        found = self.way(slot, now)
        stands_in = self.fleet.slots.get(self._spare)
        if found.how == "spare" and stands_in is not None and stands_in.is_ready():
            found = Way(
                how="in-place", why=f"{self._spare} stands in", need=found.need, room=found.room
            )
        actions = self.note(now, f"{slot.name}: {found.how} ({found.why})")
        if found.how == "refused":  # since the check somebody has taken the room
            return actions + undo.give_back(self, now, found.why)
        slot.reserved_by = self.id
        if found.how == "surge":
            self.stage = Stage.SURGE
            return actions + slot.start_successor(self.new, now, held=False)
        if found.how == "spare":
            self.stage = Stage.SPARE
            return actions + self._start_spare(found.spare, now)
        return actions + self._prepare(slot, now)

    def way(self, slot: Slot, now: float) -> Way:
        """How this slot is to be swapped, with the arithmetic."""
        only = [slot] == [s for s in self.fleet.slots_of(self.model, fallback=False) if s.wanted]
        beside = bool(self.canary_share) and only
        return way(self.fleet, slot, self.new, now, self.strategy, beside=beside)

    def _prepare(self, slot: Slot, now: float) -> list[Action]:
        self.stage = Stage.PREPARE
        context = self.fleet.books.has_room_for_context(slot.device)
        return slot.start_successor(self.new, now, held=True, held_context=context)

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
            return undo.give_back(self, now, slot.failed or slot.last_exit)
        if slot.standing != "schedulable" or slot.wanted is not self.new:
            self.current, self.stage = "", Stage.NEXT
            return self.note(now, f"{slot.name} is {slot.standing}: left alone")
        return []

    def _on_surge(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.successor is None:
            return undo.give_back(self, now, undo.why(slot))
        if slot.successor.state is not State.READY:
            return []
        if self._keep_canary and not self.todo and not self.done:
            self.stage, self.state = Stage.CANARY, "waiting"
            return self.note(now, f"canary: {self.canary_share:.0%} of requests go to it")
        if now - slot.successor.ready_at < ACQUAINT_S:
            return []
        self.stage = Stage.RETIRE
        actions = self.note(now, f"{slot.name}: new worker is ready, the old one drains")
        if slot.worker is not None:
            actions += slot.worker.drain(now, "replaced")
        return actions

    def _on_canary(self, now: float) -> list[Action]:
        """Waits for a word. One that ran beside the old worker and died is not started anew."""
        slot = self.fleet.slots.get(self.current)
        if slot is None or slot.successor is not None:
            return []
        return undo.give_back(self, now, undo.why(slot))

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

    def _on_spare(self, now: float) -> list[Action]:
        slot, stands_in = self.fleet.slots[self.current], self.fleet.slots[self._spare]
        if stands_in.worker is None:
            return undo.give_back(self, now, stands_in.last_exit)
        if not stands_in.is_ready():
            return []
        return self.note(now, f"{self._spare} serves meanwhile") + self._prepare(slot, now)

    def _on_prepare(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.successor is None:
            return undo.give_back(self, now, undo.why(slot))
        if slot.successor.state is not State.HELD:
            return []
        self.stage = Stage.DRAIN
        self._gap_from = now
        actions = self.note(now, f"{slot.name}: successor is prepared, the old worker drains")
        if slot.worker is not None:
            actions += slot.worker.drain(now, "replaced")
        return actions

    def _on_drain(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.worker is not None:
            return []
        heir = slot.succeed()
        if heir is None:
            return undo.give_back(self, now, undo.why(slot))
        self.stage = Stage.LOAD
        return heir.go(now)

    def _on_load(self, now: float) -> list[Action]:
        slot = self.fleet.slots[self.current]
        if slot.worker is None:
            slot.backoff.forgive()
            slot.failed = ""
            return undo.give_back(self, now, slot.last_exit)
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
            return undo.give_back(self, now, self.reason or "aborted")
        return self.note(now, f"{slot.name}: serves version {self.new.version}")

    def _finish(self, now: float) -> list[Action]:
        fleet = self.fleet
        record = fleet.models[self.model]
        record.canary, record.canary_share = None, 0.0
        actions = self.release_spare(now)
        mine = [s for s in fleet.slots_of(self.model) if s.wanted is not None]
        rest = [s.name for s in mine if s.wanted not in (self.new, self.old)]
        rest += [s.name for s in mine if s.wanted is self.old and self.new is not self.old]
        if rest:  # only some slots were meant: these keep what they have, also after a crash
            text = f"version {self.new.version} on {', '.join(self.done) or 'none yet'}; "
            return actions + self.end(now, "done", text + f"{', '.join(rest)} as before")
        if self.new != self.old:
            record.previous = record.current
        record.current = self.new
        if self.configure is not None:
            models = {**fleet.config.models, self.model: self.configure}
            fleet.config = msgspec.structs.replace(fleet.config, models=models)
        for slot in mine:
            slot.wanted = record.current
        return actions + self.end(now, "done", f"version {self.new.version}")

    # -- a stand-in on another device -------------------------------------------------------------

    def _start_spare(self, device: str, now: float) -> list[Action]:
        self._spare = f"{device}.s{self.id}"
        slot = self.fleet.new_slot(self._spare, device, self.model, fallback=False)
        slot.wanted, slot.reserved_by = self.new, self.id
        self.fleet.slots[self._spare] = slot
        return slot.start(now)

    def release_spare(self, now: float) -> list[Action]:
        slot = self.fleet.slots.get(self._spare)
        self._spare = ""
        if slot is None:
            return []
        slot.wanted, slot.retiring = None, True
        return [action for life in slot.lives() for action in life.drain(now, "stood in")]

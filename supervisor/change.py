"""Changes: whatever takes an operator's wish more than one step. Pure.

A change is driven by `advance` after every event and never waits by itself. The one that replaces
what runs is in rollout.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .actions import Action, Persist, Tell
from .slot import Standing

if TYPE_CHECKING:
    from .fleet import Fleet

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
    progress: dict[str, Any] = field(default_factory=dict)

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
    """Waits until the named slots are as wished: without the workers they had, or with a ready
    one."""

    slots: list[str] = field(default_factory=list)
    until: Literal["empty", "ready"] = "empty"
    deadline: float = float("inf")
    _latest: dict[str, int] = field(default_factory=dict)  # generation in each at the beginning

    def __post_init__(self) -> None:
        slots = self.fleet.slots
        self._latest = {name: slots[name].generation for name in self.slots if name in slots}

    def advance(self, now: float) -> list[Action]:
        slots = [self.fleet.slots[name] for name in self.slots if name in self.fleet.slots]
        if self.until == "empty":
            # Who is taken back meanwhile may have the next worker before anybody looks.
            waiting = [
                s for s in slots if s.worker and s.worker.generation <= self._latest.get(s.name, 0)
            ]
        else:
            waiting = [s for s in slots if s.wanted is not None and not s.is_ready()]
            for slot in waiting:
                if slot.failed:
                    return self.end(now, "failed", f"{slot.name}: {slot.failed}")
                if slot.standing is not Standing.SCHEDULABLE:
                    why = f": {slot.standing_why}" if slot.standing_why else ""
                    return self.end(now, "failed", f"{slot.name} is {slot.standing}{why}")
        if not waiting:
            return self.end(now, "done", "")
        if now >= self.deadline:
            left = ", ".join(f"{s.name} ({s.state(now)})" for s in waiting)
            return self.end(now, "failed", f"not {self.until} in time: {left}")
        return []


@dataclass(slots=True, eq=False)
class Task(Change):
    """Something that reports its own end, e.g. the replacement of a proxy."""

    def advance(self, now: float) -> list[Action]:
        return []

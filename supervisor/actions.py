"""What is to be done about it. Imperative: the runtime carries these out and reports events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gpusup.conf.schema import ModelConfig

SignalName = Literal["TERM", "KILL", "ABRT", "USR2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a slot is to run."""

    model: str
    version: str
    config: ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAction:
    slot: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(WorkerAction):
    assignment: Assignment
    device: str
    held: bool = False
    held_context: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal(WorkerAction):
    name: SignalName
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGo(WorkerAction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrain(WorkerAction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim(WorkerAction):
    """Watch until the dead worker's memory is back; then MemoryReturned."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Routes or models look different from outside now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """What must survive a restart has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """Try the new version in a fresh process, away from any device; then CheckDone."""

    change: str
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """One line for the log and the event stream."""

    kind: str
    text: str
    level: Literal["debug", "info", "warning", "error"] = "info"
    fields: dict[str, Any] = field(default_factory=dict)


Action = Launch | Signal | SendGo | SendDrain | Reclaim | Publish | Persist | RunCheck | Tell

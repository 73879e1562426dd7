"""What has happened. Past tense: an event can't be refused, only reacted to.

Those about a worker carry slot and generation; what speaks of a generation that is gone is
dropped in one place (fleet.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpusup.worker.progress import Progress
from gpusup.worker.wire import WorkerReady


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    slot: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(WorkerEvent):
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(WorkerEvent):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaidHello(WorkerEvent):
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMoved(WorkerEvent):
    phase: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPrepared(WorkerEvent):
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBecameReady(WorkerEvent):
    info: WorkerReady


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed(WorkerEvent):
    cause: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSeen(WorkerEvent):
    progress: Progress
    process_state: str = "S"  # of /proc/<pid>/stat; D is inside the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFenced(WorkerEvent):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDrained(WorkerEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(WorkerEvent):
    returncode: int  # negative: the signal
    detail: str = ""
    host_oom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReturned(WorkerEvent):
    """The dead worker's memory is back, or (`holders`) somebody still holds it after the limit."""

    holders: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSampled:
    """Bytes in use on the device, and how many of them by our workers."""

    device: str
    total: int
    used: int
    ours: int
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFaulted:
    """`action` is what the driver asks for, or what the Xid table says."""

    device: str
    action: Literal["none", "restart", "reset", "node", "retire", "lost", "back"]
    text: str
    xid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSeen:
    """The GPUs' driver answers, or `gone` says why it does not."""

    gone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsed:
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWanted:
    """A request waits for an unloaded model."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDone:
    change: str
    problem: str = ""  # "": all is well


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed. Deadlines are judged here and nowhere else."""


WorkerEvents = (
    WorkerStarted
    | StartFailed
    | WorkerSaidHello
    | LoadMoved
    | WorkerPrepared
    | WorkerBecameReady
    | LoadFailed
    | ProgressSeen
    | WorkerFenced
    | WorkerDrained
    | WorkerExited
    | MemoryReturned
)
Event = (
    WorkerEvents
    | DeviceSampled
    | DeviceFaulted
    | DriverSeen
    | ModelUsed
    | ModelWanted
    | CheckDone
    | Ticked
)

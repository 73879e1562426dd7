"""The standby of a slot: a held successor, prepared while the worker still serves. Pure.

When the worker has died and its memory is back, the standby takes its place (slot.py): weights and
warm-up are left to wait for, but no process and no CUDA context. Decided here is when one is
prepared, and for whom it makes room: for everything, since nobody is served by it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import msgspec

from gpusup.conf.schema import ModelConfig
from gpusup.conf.units import format_size

from .actions import Action, Assignment, Persist
from .change import Await, Change
from .life import ROUTED, State
from .placement import CONTEXT_BYTES

if TYPE_CHECKING:
    from .fleet import Fleet
    from .slot import Slot

#: The worker must have been ready for so long: one that dies again and again at its first request
#: shall not cost twice as many processes.
WELL_S: Final = 2.0
#: The figures of a device lag behind what happens there: only a shortage that lasts is one.
SHORT_S: Final = 0.3
_STAYS: Final = frozenset({State.UNKILLABLE})
#: A standby that has made room for something else does not come back before it has settled.
MADE_ROOM_S: Final = 10.0


def tend(fleet: Fleet, now: float) -> list[Action]:
    """Prepare those that are missing, end those that must go. After every event."""
    actions: list[Action] = []
    for slot in fleet.slots.values():
        slot.no_standby = ""
        if slot.standby is not None:
            actions += slot.end_standby(why, now) if (why := _must_go(fleet, slot, now)) else []
        elif is_configured(slot) and slot.successor is None:
            slot.no_standby = _obstacle(fleet, slot, now)
            if not slot.no_standby:
                actions += slot.start_standby(now)
                fleet.books.sync(fleet.lives())  # the next one shall see this one's context
    return actions


def is_configured(slot: Slot) -> bool:
    return slot.wanted is not None and slot.wanted.config.standby


def words(slot: Slot) -> str:
    """For people; "" where none is configured."""
    heir = slot.standby
    if heir is not None:
        return "ready" if heir.state is State.HELD else str(heir.state)
    if not is_configured(slot):
        return ""
    return f"none: {slot.no_standby}" if slot.no_standby else "none"


def holds(fleet: Fleet, slot: Slot) -> int:
    """Bytes of the device that are promised to the slot's standby."""
    heir = slot.standby
    holding = fleet.books.ledger.holding(heir.slot, heir.generation) if heir is not None else None
    return holding.bytes if holding is not None else 0


def beside(fleet: Fleet, slot: Slot) -> list[Slot]:
    """Other slots of the device with a standby."""
    every = fleet.slots.values()
    return [s for s in every if s.device == slot.device and s is not slot and s.standby]


def make_room(fleet: Fleet, slot: Slot, now: float) -> list[Action]:
    """A worker of this slot waits for memory: all standbys of its device go first."""
    actions: list[Action] = []
    if not _is_cuda(fleet, slot) or fleet.driver_gone:
        return actions  # they hold nothing there that could be given back
    if not _lasts(slot, True, now):
        return actions
    for other in (slot, *beside(fleet, slot)):
        if other.standby is not None:
            _rest(other, f"it made room for the worker of {slot.name}", now)
            actions += other.end_standby(other.standby_pause.why, now)
    return actions


def step_aside(fleet: Fleet, slot: Slot, need: int, now: float) -> tuple[list[Action], bool]:
    """A change is about to begin in the slot, with a version that wants `need` bytes: its standby
    goes, and those beside it where the memory would not do. To be called until all have gone."""
    actions = slot.end_standby("makes room for a change", now)
    gone = slot.standby is None
    fleet.books.sync(fleet.lives())  # what has left since the last look is free
    room = fleet.books.room(slot.device)
    if room is not None and need > room + in_slot(fleet, slot):
        for other in beside(fleet, slot):
            _rest(other, f"it made room for a change in {slot.name}", now)
            actions += other.end_standby(other.standby_pause.why, now)
            # The memory of one that does not die is not to be had.
            gone = gone and other.successor is not None and other.successor.state in _STAYS
    return actions, gone


def stuck(slot: Slot) -> str:
    """Why the change would wait for ever, or ""."""
    heir = slot.standby
    if heir is None or heir.state is not State.UNKILLABLE:
        return ""
    return f"{slot.name}: its standby, pid {heir.pid}, does not die (KILL sent)"


def in_slot(fleet: Fleet, slot: Slot) -> int:
    """Bytes that are promised to whoever is in the slot."""
    ledger = fleet.books.ledger
    held = (ledger.holding(life.slot, life.generation) for life in slot.lives())
    return sum(holding.bytes for holding in held if holding)


def switch(fleet: Fleet, name: str, after: ModelConfig, now: float) -> tuple[Change, list[Action]]:
    """The file says otherwise now whether the model has standbys. Its workers don't care, so they
    stay; only what is written down about them is changed."""
    renewed: dict[int, Assignment] = {}

    def renew(a: Assignment) -> Assignment:
        # By identity, because that is how changes tell one assignment from another.
        if id(a) not in renewed:
            config = msgspec.structs.replace(a.config, standby=after.standby)
            renewed[id(a)] = dataclasses.replace(a, config=config)
        return renewed[id(a)]

    record = fleet.models[name]
    record.current = renew(record.current)
    record.previous = renew(record.previous) if record.previous else None
    for slot in fleet.slots_of(name):
        slot.wanted = renew(slot.wanted) if slot.wanted else None
        for life in slot.lives():
            life.assignment = renew(life.assignment)
            fleet.books.learn(life)  # what was measured is true of the new configuration, too
    models = {**fleet.config.models, name: after}
    fleet.config = msgspec.structs.replace(fleet.config, models=models)
    title = f"{name}: standby {'on' if after.standby else 'off'}"
    change = Await("standby", name, title, fleet, slots=[])
    return change, [Persist(), *fleet.start_change(change, now)]


def _rest(slot: Slot, why: str, now: float) -> None:
    slot.standby_pause.until = now + MADE_ROOM_S
    slot.standby_pause.why = why


def _must_go(fleet: Fleet, slot: Slot, now: float) -> str:
    heir, worker = slot.standby, slot.worker
    assert heir is not None
    if fleet.stopping:
        return "stop"
    if not slot.takes_part():
        return slot.failed or str(slot.standing)
    if slot.reserved_by:
        return f"change {slot.reserved_by}"
    if heir.assignment != slot.wanted or not is_configured(slot):
        return "not wanted any more"
    if worker is not None and _lasts(slot, _is_full(fleet, slot), now):
        _rest(slot, f"the memory of {slot.device} is all taken", now)
        return slot.standby_pause.why
    return ""


def _is_full(fleet: Fleet, slot: Slot) -> bool:
    """Nothing of the device is left. While somebody there loads or dies that can't be told: what
    they hold is promised to them, and may pass for a stranger's as well."""
    if not _is_cuda(fleet, slot) or fleet.books.room(slot.device) != 0:
        return False
    here = (life for life in fleet.lives() if life.device == slot.device)
    return all(life.state in ROUTED or life.state is State.HELD for life in here)


def _lasts(slot: Slot, short: bool, now: float) -> bool:
    slot.short_since = (slot.short_since or now) if short else 0.0
    return short and now - slot.short_since >= SHORT_S


def _obstacle(fleet: Fleet, slot: Slot, now: float) -> str:
    """Why none can be prepared now, or ""."""
    worker, pause = slot.worker, slot.standby_pause
    if fleet.stopping:
        return "stopping"
    if not slot.takes_part():
        return f"the slot is {'failed' if slot.failed else slot.standing}"
    if change := slot.reserved_by or getattr(fleet.active_change(slot.model), "id", ""):
        return f"change {change} is under way"
    if worker is None or worker.state is not State.READY or worker.assignment != slot.wanted:
        return "the worker is not ready"
    if now - worker.ready_at < WELL_S:
        return f"when the worker has been ready for {WELL_S:g} s"
    if now < pause.until:
        return f"{pause.why}; the next one in {pause.until - now:.0f} s"
    return _no_room(fleet, slot) if _is_cuda(fleet, slot) else ""


def _no_room(fleet: Fleet, slot: Slot) -> str:
    if fleet.driver_gone:
        return f"the GPU driver is gone: {fleet.driver_gone}"
    for other in fleet.slots.values():
        if other.device != slot.device:
            continue
        if other.reserved_by:
            return f"change {other.reserved_by} is under way in {other.name}"
        if other.worker is None and other.wanted is not None and other.takes_part():
            return f"the worker of {other.name} comes first"
    room = fleet.books.room(slot.device)
    if room is None or room > CONTEXT_BYTES:
        return ""
    return (
        f"a context takes {format_size(CONTEXT_BYTES)} of {slot.device}, "
        f"{format_size(room)} are free"
    )


def _is_cuda(fleet: Fleet, slot: Slot) -> bool:
    return fleet.devices[slot.device].place.kind == "cuda"

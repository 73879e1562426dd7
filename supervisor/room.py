"""Whether a worker may start on its device now, and who is asked to leave for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import standby
from .life import State

if TYPE_CHECKING:
    from .fleet import Fleet
    from .slot import Slot


def has_room(fleet: Fleet, slot: Slot) -> bool:
    """Where memory is known and too little, wait; if somebody idle can leave, ask them to."""
    assert slot.wanted is not None
    if fleet.has_no_driver(slot):
        slot.waiting_for = f"the GPU driver: {fleet.driver_gone}"
        return False
    shortage = fleet.books.shortage(slot.wanted, slot.device, standby.holds(fleet, slot))
    slot.waiting_for = f"memory: {shortage}" if shortage else ""
    if not shortage:
        return True
    leaving = any(
        life.device == slot.device and (life.standby or life.state not in (State.READY, State.HELD))
        for life in fleet.lives()
    )
    idle = sorted(
        (record.last_used, name)
        for name, record in fleet.models.items()
        if name != slot.model
        and record.loaded
        and record.current.config.on_demand
        and any(s.device == slot.device and s.worker for s in fleet.slots_of(name))
    )
    if not leaving and idle and fleet.models[slot.model].last_used >= idle[0][0]:
        fleet.evictions.append((idle[0][1], slot.model))
    return False

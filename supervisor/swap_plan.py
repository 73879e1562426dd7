"""How a slot would get another version, with the arithmetic of its device's memory. Pure.

Asked before a swap touches anything, by the swap itself at each slot, and by `--dry-run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpusup.conf.units import format_size

from . import standby
from .actions import Assignment
from .slot import Standing

if TYPE_CHECKING:
    from .fleet import Fleet
    from .slot import Slot

Strategy = Literal["auto", "surge", "in-place"]
#: refused: it could not work. start: nobody serves there, so the next start has it.
How = Literal["surge", "spare", "in-place", "start", "later", "refused"]

#: Phases of a start that a prepared successor still has before it (worker/startup.py).
_GAP_PHASES = ("device", "weights", "warm-up", "golden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`spare`: the device of the stand-in. `need` and `room` are bytes; room None: not known."""

    how: How
    why: str
    need: int
    room: int | None
    spare: str = ""


def way(
    fleet: Fleet,
    slot: Slot,
    new: Assignment,
    now: float,
    strategy: Strategy = "auto",
    *,
    beside: bool = False,
) -> Way:
    """`beside`: the new worker is to serve beside the old one for a while (a canary)."""
    books = fleet.books
    rest, peak = books.need(new, slot.device)
    room = books.room(slot.device)
    need = rest + peak
    want = need + safety(fleet, slot.device)
    sums = (
        f"{slot.device}: {format_size(rest)} at rest + {format_size(peak)} for batches + "
        f"{format_size(want - need)} safety = {format_size(want)} wanted, "
    )

    def result(how: How, why: str, spare: str = "") -> Way:
        return Way(how=how, why=why, need=need, room=room, spare=spare)

    if slot.standing is not Standing.SCHEDULABLE:
        return result("later", f"{slot.name} is {slot.standing}: when it takes part again")
    if room is None:
        if beside or strategy == "surge":
            return result("surge", f"as asked; the memory of {slot.device} is not known")
        return result("in-place", f"the memory of {slot.device} is not known")
    # What is only prepared for a death leaves first: this slot's always, the others' if need be.
    alone = room + standby.in_slot(fleet, slot)
    room += standby.holds(fleet, slot)
    sums += f"{format_size(room)} free"
    alone += sum(standby.holds(fleet, other) for other in standby.beside(fleet, slot))
    if slot.worker is not None:  # what it can hold now it can hold again, whoever else came
        alone = max(alone, sum(books.need(slot.worker.assignment, slot.device)))
    if need > alone:
        gone = f", {format_size(alone)} when the old worker is gone" if alone > room else ""
        return result("refused", f"does not fit on {sums}{gone}")
    if not slot.is_ready():
        return result("start", f"nobody serves there ({slot.state(now)}); {sums}")
    if strategy == "surge" or beside:
        if need > room:
            how = "a canary beside the only worker" if beside else "surge"
            return result("refused", f"no room for {how} on {sums}")
        return result("surge", f"as asked; {sums}")
    if strategy == "in-place":
        return result("in-place", f"as asked; {sums}")
    if want <= room:
        return result("surge", sums)
    sums += f", {format_size(alone)} when the old worker is gone"
    if spare := _spare_device(fleet, slot, new):
        return result("spare", f"{sums}; a stand-in fits on {spare}", spare)
    return result("in-place", sums)


def safety(fleet: Fleet, device: str) -> int:
    """Bytes to leave free beside two versions: estimates of a new one are what they are."""
    return min(fleet.config.devices.safety, fleet.devices[device].total // 16)


def leaves_none(fleet: Fleet, slot: Slot) -> bool:
    """Whether nobody of the model is ready while this slot is swapped in place."""
    return slot.is_ready() and not fleet.ready_workers(slot.model, but=slot.name)


def expected_gap_s(slot: Slot) -> float:
    """How long an in-place swap will take to answer, as far as the last start can tell."""
    info = slot.worker.info if slot.worker else None
    return sum(info.seconds.get(phase, 0.0) for phase in _GAP_PHASES) if info else 0.0


def _spare_device(fleet: Fleet, slot: Slot, new: Assignment) -> str:
    """Another device that could hold the new version for a moment; "" if there is none.

    One that the model may use, or one on which nothing runs at all.
    """
    kind = fleet.devices[slot.device].place.kind
    allowed = new.config.devices
    for name, device in fleet.devices.items():
        if name == slot.device or device.place.kind != kind or device.lost or device.fault:
            continue
        here = [s for s in fleet.slots.values() if s.device == name]
        if any(s.standing is not Standing.SCHEDULABLE for s in here):
            continue
        idle = not any(s.lives() for s in here)
        if not (idle or allowed == "all" or name in allowed or device.place.uuid in allowed):
            continue
        room = fleet.books.room(name)
        if room is not None and sum(fleet.books.need(new, name)) + safety(fleet, name) <= room:
            return name
    return ""

"""Taking a swap back: every slot that was changed gets what it had before, one at a time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import Action
from .change import ChangeState
from .stages import Stage

if TYPE_CHECKING:
    from .rollout import Swap
    from .slot import Slot


def why(slot: Slot) -> str:
    return slot.successor_outcome.text if slot.successor_outcome else slot.last_exit


def give_back(swap: Swap, now: float, reason: str) -> list[Action]:
    swap.reason = reason
    swap.to_undo = [*swap.done, swap.current] if swap.current else list(swap.done)
    record = swap.fleet.models[swap.model]
    record.canary, record.canary_share = None, 0.0
    for slot in swap.fleet.slots_of(swap.model):
        if slot.wanted is swap.new:
            slot.wanted = swap.before.get(slot.name) or swap.old
    swap.stage, swap.current, swap.state = Stage.UNDO, "", "running"
    return swap.note(now, f"new version is taken back: {reason}")


def on_undo(swap: Swap, now: float) -> list[Action]:
    if not swap.to_undo:
        state: ChangeState = "aborted" if swap.aborted else "rolled-back"
        return swap.release_spare(now) + swap.end(now, state, swap.reason)
    swap.current = swap.to_undo.pop()
    swap.stage = Stage.UNDO_WAIT
    slot = swap.fleet.slots[swap.current]
    slot.wanted = swap.before.get(swap.current) or swap.old
    actions: list[Action] = []
    if slot.successor is not None:
        actions += slot.successor.drain(now, "taken back")
    if slot.worker is not None and slot.worker.assignment is swap.new:
        actions += slot.worker.drain(now, "taken back")
    elif slot.worker is None:
        actions += slot.reset(now)
    slot.reserved_by = ""
    return actions


def on_undo_wait(swap: Swap, now: float) -> list[Action]:
    slot = swap.fleet.slots[swap.current]
    if slot.failed:
        text = f"{swap.reason}; and the old version did not come back: {slot.failed}"
        return swap.release_spare(now) + swap.end(now, "failed", text)
    back = slot.is_ready() and slot.worker and slot.worker.assignment is not swap.new
    if (back and slot.successor is None) or slot.standing != "schedulable":
        swap.current, swap.stage = "", Stage.UNDO
    return []

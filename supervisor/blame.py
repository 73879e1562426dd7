"""Whose fault was it: the model's, the slot's, or the device's? Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from . import events as ev
from .actions import Action, Tell
from .backoff import COUNTED, Cause
from .life import Outcome
from .slot import Slot, Standing

if TYPE_CHECKING:
    from .fleet import Fleet


def gave_up(fleet: Fleet, slot: Slot, now: float) -> list[Action]:
    """The same model on two devices: the model. Several models on one device: the device."""
    text = f"{slot.name}: {slot.failed}"
    actions: list[Action] = [Tell(kind="gave-up", text=text, level="error")]
    record = fleet.models[slot.model]
    record.deaths[slot.device] = now
    window = fleet.config.supervision.backoff.window
    fresh = [d for d, at in record.deaths.items() if now - at <= window]
    if len(fresh) >= 2 and slot.last_cause in COUNTED and not record.failed:
        record.failed = f"it failed on {' and '.join(sorted(fresh))}: {slot.failed}"
        for other in fleet.slots_of(slot.model):
            if not other.failed and other.worker is None:
                other.failed = record.failed
        actions.append(Tell(kind="model-failed", text=record.failed, level="error"))
    here: dict[str, str] = defaultdict(str)
    for other in fleet.slots.values():
        if other.device == slot.device and other.failed and other.last_cause in COUNTED:
            here[other.model] = other.failed
    # Whoever serves there shows that the device is well; a CPU always is.
    well = fleet.devices[slot.device].place.kind == "cpu" or any(
        other.device == slot.device and other.is_ready() for other in fleet.slots.values()
    )
    if len(here) >= 2 and not well and not record.failed:
        why = f"{len(here)} models failed on {slot.device}: {', '.join(sorted(here))}"
        for other in fleet.slots.values():
            if other.device == slot.device:
                actions += other.stand(Standing.QUARANTINED, now, "gpusup", why)
    return actions


def device_faulted(fleet: Fleet, event: ev.DeviceFaulted, now: float) -> list[Action]:
    device = fleet.devices.get(event.device)
    if device is None:
        return []
    actions: list[Action] = [
        Tell(kind="device", text=f"{event.device}: {event.text}", level="warning")
    ]
    here = [slot for slot in fleet.slots.values() if slot.device == event.device]
    match event.action:
        case "none":
            return actions
        case "restart":
            for slot in here:
                for life in slot.lives():
                    actions += life.kill(now, Outcome(Cause.GPU, event.text), dump=True)
        case "reset" | "node" | "retire":
            device.fault = event.text
            for slot in here:
                actions += slot.stand(Standing.QUARANTINED, now, "gpusup", event.text)
                for life in slot.lives():
                    actions += life.kill(now, Outcome(Cause.GPU, event.text))
        case "lost":
            device.lost = event.text
            for slot in here:
                if slot.standing is Standing.SCHEDULABLE:
                    actions += slot.stand(Standing.LOST, now, "gpusup", event.text)
                for life in slot.lives():
                    actions += life.kill(now, Outcome(Cause.GPU, event.text))
        case "back":
            device.lost = ""
            for slot in here:
                if slot.standing is Standing.LOST:
                    slot.retry_at = now
                    actions += slot.uncordon(now)
    return actions

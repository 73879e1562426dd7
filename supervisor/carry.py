"""The fleet as builtins and back: what an upgrade in place takes along, all of it. Pure.

`saved.py` is for a restart, after which no worker lives; here the workers live on, so each is
carried with its state, its deadlines and its story. Times are of the same monotonic clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from gpusup.conf.schema import Config, ModelConfig

from .actions import Assignment
from .backoff import Cause, Pause
from .change import Change, Step
from .devices import CpuDevice, Places
from .fleet import Fleet, ModelRecord
from .layout import DevicePlace
from .life import Life
from .slot import Slot, Standing

_SLOT_FIELDS = (
    "name", "device", "model", "fallback", "standing_why", "standing_by", "standing_since",
    "generation", "retiring", "failed", "retry_at", "restarts", "last_exit",
)  # fmt: skip
_RECORD_FIELDS = ("canary_share", "loaded", "last_used", "failed", "created", "evicted_for")
_CHANGE_FIELDS = ("kind", "model", "title", "id", "state", "text", "started", "ended", "numbers")

#: What was one assignment is one again: slots and changes compare by identity.
Known = dict[bytes, Assignment]


def export_fleet(fleet: Fleet) -> dict[str, Any]:
    return {
        "config": msgspec.to_builtins(fleet.config),
        "places": [list(device.place) for device in fleet.devices.values()],
        "devices": {
            name: [device.total, device.lost, device.fault]
            for name, device in fleet.devices.items()
        },
        "learned": [[list(key), list(sizes)] for key, sizes in fleet.books.learned.items()],
        "serial": fleet.serial,
        "slots": [_export_slot(slot) for slot in fleet.slots.values()],
        "models": {name: _export_record(record) for name, record in fleet.models.items()},
        "changes": [
            {name: getattr(change, name) for name in _CHANGE_FIELDS}
            | {"steps": [list(step) for step in change.steps]}
            for change in fleet.changes.values()
            if not change.is_active()
        ],
    }


def config_of(exported: Mapping[str, Any]) -> Config:
    return msgspec.convert(exported["config"], Config)


def places_of(exported: Mapping[str, Any]) -> Places:
    places: Places = {}
    for row in exported["places"]:
        place = DevicePlace(*row)
        cpu = CpuDevice(name=place.name, total=place.total) if place.kind == "cpu" else None
        places[place.name] = (place, cpu)
    return places


def restore_fleet(fleet: Fleet, exported: Mapping[str, Any]) -> None:
    """Into a fleet just made of `config_of` and `places_of`. Raises msgspec.ValidationError."""
    known: Known = {}
    for name, (total, lost, fault) in exported["devices"].items():
        device = fleet.devices[name]
        device.total, device.lost, device.fault = total, lost, fault
    for (model, version, kind), (rest, peak) in exported["learned"]:
        fleet.books.learned[model, version, kind] = (rest, peak)
    fleet.next_serial(exported["serial"])
    for row in exported["changes"]:
        change = Change(row["kind"], row["model"], row["title"], fleet)
        for name in _CHANGE_FIELDS:
            setattr(change, name, row[name])
        change.steps = [Step(*step) for step in row["steps"]]
        fleet.changes[change.id] = change
    fleet.models = {n: _restore_record(row, known) for n, row in exported["models"].items()}
    slots = [_restore_slot(fleet, row, known) for row in exported["slots"]]
    fleet.slots = {slot.name: slot for slot in slots}
    fleet.books.sync(fleet.lives())
    for life in fleet.lives():
        fleet.books.learn(life)


def _export_slot(slot: Slot) -> dict[str, Any]:
    return {name: getattr(slot, name) for name in _SLOT_FIELDS} | {
        "standing": str(slot.standing),
        "wanted": _assignment_out(slot.wanted),
        "worker": _export_life(slot.worker),
        "successor": _export_life(slot.successor),
        "last_cause": str(slot.last_cause) if slot.last_cause else None,
        "backoff": slot.backoff.export(),
        "standby_pause": dataclasses.astuple(slot.standby_pause),
    }


def _restore_slot(fleet: Fleet, row: Mapping[str, Any], known: Known) -> Slot:
    slot = fleet.new_slot(row["name"], row["device"], row["model"], fallback=row["fallback"])
    for name in _SLOT_FIELDS:
        setattr(slot, name, row[name])
    slot.standing = Standing(row["standing"])
    slot.wanted = _assignment_in(row["wanted"], known)
    slot.last_cause = Cause(row["last_cause"]) if row["last_cause"] else None
    slot.backoff.take_over(row["backoff"])
    slot.standby_pause = Pause(*row["standby_pause"])
    for name in ("worker", "successor"):
        if row[name] is not None:
            assignment = _assignment_in(row[name]["assignment"], known)
            assert assignment is not None
            setattr(slot, name, Life.restore(row[name], assignment, slot.config))
    return slot


def _export_life(life: Life | None) -> dict[str, Any] | None:
    if life is None:
        return None
    return life.export() | {"assignment": _assignment_out(life.assignment)}


def _export_record(record: ModelRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _RECORD_FIELDS} | {
        "current": _assignment_out(record.current),
        "previous": _assignment_out(record.previous),
        "deaths": record.deaths,
    }


def _restore_record(row: Mapping[str, Any], known: Known) -> ModelRecord:
    current = _assignment_in(row["current"], known)
    assert current is not None
    record = ModelRecord(current, _assignment_in(row["previous"], known))
    for name in (*_RECORD_FIELDS, "deaths"):
        setattr(record, name, row[name])
    return record


def _assignment_out(assignment: Assignment | None) -> dict[str, Any] | None:
    if assignment is None:
        return None
    return {
        "model": assignment.model,
        "version": assignment.version,
        "config": msgspec.to_builtins(assignment.config),
    }


def _assignment_in(row: Mapping[str, Any] | None, known: Known) -> Assignment | None:
    if row is None:
        return None
    key = msgspec.msgpack.encode(row)
    if key not in known:
        config = msgspec.convert(row["config"], ModelConfig)
        known[key] = Assignment(model=row["model"], version=row["version"], config=config)
    return known[key]

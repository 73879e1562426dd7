"""What survives a restart: standings, tallies, wanted versions, sizes, poisoned inputs."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from gpusup.conf.schema import ModelConfig

from .actions import Assignment
from .fleet import Fleet
from .slot import Slot, Standing


class SavedSlot(Struct, frozen=True, kw_only=True):
    standing: str = "schedulable"
    by: str = ""
    why: str = ""
    failed: str = ""
    failed_model: str = ""  # what had failed there: another configuration gets a fresh chance
    tally_age_s: tuple[float, ...] = ()
    strikes: int = 0
    restarts: int = 0
    last_exit: str = ""
    generation: int = 0
    apart: dict[str, Any] | None = None  # given to this slot only, unlike the model's others


class SavedModel(Struct, frozen=True, kw_only=True):
    """`base`: the configured section it came from; a changed file wins over what is saved."""

    base: dict[str, Any]
    current: dict[str, Any]
    previous: dict[str, Any] | None = None
    loaded: bool = True


class Saved(Struct, frozen=True, kw_only=True):
    slots: dict[str, SavedSlot] = {}
    models: dict[str, SavedModel] = {}
    learned: dict[str, tuple[int, int]] = {}  # "model|version|kind" -> (rest, peak) bytes
    poisoned: tuple[str, ...] = ()
    serial: int = 0


def save(fleet: Fleet, poisoned: tuple[str, ...], now: float) -> Saved:
    return Saved(
        slots={
            name: SavedSlot(
                standing=str(slot.standing),
                by=slot.standing_by,
                why=slot.standing_why,
                failed=slot.failed,
                failed_model=repr(slot.wanted.config) if slot.failed and slot.wanted else "",
                tally_age_s=tuple(now - at for at in slot.backoff.tally()),
                strikes=slot.backoff.strikes,
                restarts=slot.restarts,
                last_exit=slot.last_exit,
                generation=slot.generation,
                apart=_apart(fleet, slot),
            )
            for name, slot in fleet.slots.items()
        },
        models={
            name: SavedModel(
                base=_plain(fleet.config.models[name]),
                current=_plain(record.current.config),
                previous=_plain(record.previous.config) if record.previous else None,
                loaded=record.loaded,
            )
            for name, record in fleet.models.items()
            if name in fleet.config.models
        },
        learned={"|".join(key): sizes for key, sizes in fleet.books.learned.items()},
        poisoned=poisoned,
        serial=max((int(change) for change in fleet.changes), default=0),
    )


def _apart(fleet: Fleet, slot: Slot) -> dict[str, Any] | None:
    record = fleet.models.get(slot.model)
    if record is None or slot.wanted in (None, record.current) or fleet.active_change(slot.model):
        return None  # under way: a restart begins with what was there before
    assert slot.wanted is not None
    return _plain(slot.wanted.config)


def restore(fleet: Fleet, saved: Saved, now: float) -> list[str]:
    """Honour what was saved. Returns what an operator should know about it."""
    words = []
    kept = set()  # models whose section in the file is as it was
    fleet.next_serial(saved.serial)
    for key, sizes in saved.learned.items():
        model, _, rest = key.partition("|")
        version, _, kind = rest.partition("|")
        fleet.books.learned[model, version, kind] = sizes
    for name, old in saved.models.items():
        record = fleet.models.get(name)
        if record is None or old.base != _plain(fleet.config.models[name]):
            continue
        kept.add(name)
        record.current = _assignment(name, old.current)
        record.previous = _assignment(name, old.previous) if old.previous else None
        if record.current.config.on_demand:
            old = msgspec.structs.replace(old, loaded=False)  # it comes when it is asked for
        fleet.set_loaded(name, old.loaded, now)
        if record.current.version != fleet.config.models[name].version:
            words.append(f"{name}: version {record.current.version}, as last reloaded")
    for name, before in saved.slots.items():
        slot = fleet.slots.get(name)
        if slot is None:
            continue
        if before.apart is not None and slot.model in kept and slot.wanted is not None:
            slot.wanted = _assignment(slot.model, before.apart)
        slot.generation = before.generation
        slot.restarts, slot.last_exit = before.restarts, before.last_exit
        slot.backoff.restore([now - age for age in before.tally_age_s], before.strikes)
        if before.standing != Standing.LOST:  # the probe sees for itself
            slot.stand(Standing(before.standing), now, before.by, before.why)
        if before.failed and slot.wanted and before.failed_model == repr(slot.wanted.config):
            slot.failed = before.failed
        if slot.standing is not Standing.SCHEDULABLE or slot.failed:
            words.append(f"{name}: still {slot.failed or slot.standing} {before.why}".rstrip())
    return words


def _plain(config: ModelConfig) -> dict[str, Any]:
    """As it comes back from a file: lists where there were tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return plain


def _assignment(name: str, fields: dict[str, Any]) -> Assignment:
    config = msgspec.convert(fields, ModelConfig)
    return Assignment(model=name, version=config.version, config=config)

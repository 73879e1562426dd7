"""What an operator may ask for, said to the fleet. Pure: each returns the change and the actions.

Everything here raises `Refused` with one clear line when it can't be.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpusup.conf.schema import ModelConfig
from gpusup.conf.units import format_time

from .actions import Action, Assignment, Persist
from .backoff import Cause
from .change import Await, Change
from .fleet import Fleet, Refused
from .life import Outcome
from .rollout import Swap
from .slot import Slot, Standing
from .swap_plan import Strategy, expected_gap_s, leaves_none


class ReloadWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /models/NAME/reload. Empty: the same version once more.

    `allow_gap`: seconds for which nobody of the model may answer; requests are held for so long
    instead of the model's `hold`, and what would clearly take longer is refused.
    """

    version: str = ""
    weights: str = ""
    set: dict[str, Any] = {}
    strategy: Strategy = "auto"
    slots: tuple[str, ...] = ()
    canary: float = 0.0
    allow_gap: float | None = None
    dry_run: bool = False


def cordon(fleet: Fleet, target: str, now: float, by: str, why: str) -> list[Action]:
    actions: list[Action] = []
    for slot in fleet.targets(target):
        if slot.standing is Standing.SCHEDULABLE:
            actions += slot.stand(Standing.CORDONED, now, by, why)
    return actions + fleet.advance(now)


def uncordon(fleet: Fleet, target: str, now: float) -> list[Action]:
    actions: list[Action] = []
    for slot in fleet.targets(target):
        if slot.is_stuck():
            raise Refused("conflict", f"{slot.name}: {slot.standing_why}")
        if slot.standing is Standing.LOST:
            raise Refused("conflict", f"{slot.name}: its device is lost: {slot.standing_why}")
        slot.retry_at = now
        actions += slot.uncordon(now)
    return actions + fleet.advance(now)


def drain(
    fleet: Fleet, target: str, now: float, by: str, limit_s: float | None
) -> tuple[Change, list[Action]]:
    slots = fleet.targets(target)
    for slot in slots:
        if slot.reserved_by:
            raise Refused(
                "conflict", f"{slot.name} is part of change {slot.reserved_by}", slot.reserved_by
            )
    actions: list[Action] = []
    for slot in slots:
        actions += slot.drain(now, by, "drain", limit_s)
    change = Await("drain", "", f"drain {target}", fleet, slots=[s.name for s in slots])
    return change, actions + fleet.start_change(change, now)


def restart(fleet: Fleet, target: str, now: float) -> tuple[Change, list[Action]]:
    """Ready workers are replaced without a hole; others are ended and started afresh."""
    slots = fleet.targets(target)
    ready = [s for s in slots if s.is_ready() and s.standing is Standing.SCHEDULABLE]
    models = {s.model for s in ready}
    if ready and len(ready) == len(slots) and len(models) == 1:
        (model,) = models
        same = fleet.models[model].current
        swap = Swap(
            "restart", model, f"restart {target}", fleet,
            new=Assignment(model=model, version=same.version, config=same.config),
            old=same, strategy="in-place", todo=[s.name for s in slots], check=False,
        )  # fmt: skip
        return swap, fleet.start_change(swap, now)
    actions: list[Action] = []
    for slot in slots:
        actions += _afresh(slot, now)
    change = Await(
        "restart", "", f"restart {target}", fleet, slots=[s.name for s in slots], until="ready"
    )
    return change, actions + fleet.start_change(change, now)


def _afresh(slot: Slot, now: float) -> list[Action]:
    if slot.standing is not Standing.SCHEDULABLE:
        raise Refused(
            "conflict", f"{slot.name} is {slot.standing}: {slot.standing_why or 'uncordon it'}"
        )
    actions = slot.reset(now)
    if slot.worker is not None:
        actions += slot.worker.kill(now, Outcome(Cause.REQUESTED, "restart"), dump=False)
    return actions


def reset_failed(fleet: Fleet, target: str, now: float) -> list[Action]:
    slots = fleet.slots_of(target) if target in fleet.models else fleet.targets(target)
    actions: list[Action] = []
    for slot in slots:
        if slot.is_stuck():
            raise Refused("conflict", f"{slot.name}: {slot.standing_why}")
        actions += slot.reset(now)
        record = fleet.models[slot.model]
        record.failed = ""
        record.deaths.clear()
    return actions + fleet.advance(now)


def wished(fleet: Fleet, model: str, wish: ReloadWish) -> Assignment:
    """The assignment a wish means. Raises Refused for what can't be a configuration."""
    current = fleet.model(model).current
    fields = msgspec.to_builtins(current.config)
    fields["version"] = wish.version or current.version
    if wish.weights:
        fields["weights"] = wish.weights
    known = {f.name for f in msgspec.structs.fields(ModelConfig)}
    for key, value in wish.set.items():
        if key in known and key not in ("handler", "devices", "workers", "python"):
            fields[key] = value
        elif key in known:
            raise Refused("invalid", f"{key} can't be changed by a reload; change the config file")
        else:
            fields["settings"] = {**fields["settings"], key: value}
    try:
        config = msgspec.convert(fields, ModelConfig, strict=False)
    except msgspec.ValidationError as error:
        raise Refused("invalid", f"{model}: {error}") from error
    return Assignment(model=model, version=config.version, config=config)


def _slots_for(fleet: Fleet, model: str, named: tuple[str, ...]) -> list[str]:
    mine = [s.name for s in fleet.slots_of(model)]
    if not named:
        return mine
    chosen = [s.name for name in named for s in fleet.targets(name)]
    for name in chosen:
        if name not in mine:
            raise Refused("invalid", f"{name} holds {fleet.slots[name].model}, not {model}")
    return chosen


def reload(fleet: Fleet, model: str, wish: ReloadWish, now: float) -> tuple[Change, list[Action]]:
    new = wished(fleet, model, wish)
    record = fleet.model(model)
    if not 0 <= wish.canary < 1:
        raise Refused("invalid", f"canary is a share between 0 and 1, not {wish.canary:g}")
    title = f"reload {model} to version {new.version}"
    swap = Swap(
        "reload", model, title, fleet, new=new, old=record.current, strategy=wish.strategy,
        todo=_slots_for(fleet, model, wish.slots), canary_share=wish.canary,
        allow_gap=wish.allow_gap,
    )  # fmt: skip
    if not record.loaded:
        swap.todo.clear()
    if not fleet.active_change(model) and (problem := _gap_problem(swap, now)):
        raise Refused("conflict", problem)
    return swap, fleet.start_change(swap, now)


def _gap_problem(swap: Swap, now: float) -> str:
    """Why the longest gap that the operator accepts is too short; "" where none was named."""
    if swap.allow_gap is None:
        return ""
    for name in swap.todo:
        slot = swap.fleet.slots[name]
        if swap.way(slot, now).how != "in-place" or not leaves_none(swap.fleet, slot):
            continue
        expected = expected_gap_s(slot)
        if expected > swap.allow_gap:
            return (
                f"{name} is the only ready worker of {swap.model}: without room for another "
                f"nobody answers for about {format_time(expected)}, --allow-gap accepts "
                f"{format_time(swap.allow_gap)}"
            )
    return ""


def rollback(fleet: Fleet, model: str, now: float) -> tuple[Change, list[Action]]:
    record = fleet.model(model)
    running = fleet.active_change(model)
    if isinstance(running, Swap):
        if problem := running.take_back(now, "rollback asked"):
            raise Refused("conflict", problem, running.id)
        return running, fleet.advance(now)
    apart = [s.name for s in fleet.slots_of(model) if s.wanted not in (None, record.current)]
    if apart:  # a version that was given to some slots only
        swap = Swap(
            "rollback", model, f"roll {model} back to version {record.current.version}", fleet,
            new=record.current, old=record.current, todo=apart,
        )  # fmt: skip
        return swap, fleet.start_change(swap, now)
    if record.previous is None:
        raise Refused("conflict", f"{model} has no earlier version to go back to")
    swap = Swap(
        "rollback", model, f"roll {model} back to version {record.previous.version}", fleet,
        new=record.previous, old=record.current, todo=_slots_for(fleet, model, ()),
    )  # fmt: skip
    return swap, fleet.start_change(swap, now)


def promote(fleet: Fleet, model: str, now: float) -> tuple[Change, list[Action]]:
    fleet.model(model)
    running = fleet.active_change(model)
    if not isinstance(running, Swap):
        raise Refused("conflict", f"{model} has no canary to promote")
    if problem := running.promote(now):
        raise Refused("conflict", problem, running.id)
    return running, fleet.advance(now)


def find_change(fleet: Fleet, change: str) -> Change:
    if change not in fleet.changes:
        raise Refused("not_found", f"no change {change!r}")
    return fleet.changes[change]


def abort(fleet: Fleet, change: str, now: float) -> tuple[Change, list[Action]]:
    found = find_change(fleet, change)
    if not found.is_active():
        raise Refused("conflict", f"change {change} has ended: {found.state}", change)
    if problem := found.abort(now):
        raise Refused("conflict", problem, change)
    return found, fleet.advance(now)


def load(fleet: Fleet, model: str, now: float) -> tuple[Change, list[Action]]:
    fleet.model(model)
    fleet.set_loaded(model, True, now)
    actions: list[Action] = [Persist()]
    for slot in fleet.slots_of(model):
        if slot.failed:
            actions += slot.reset(now)
    names = [s.name for s in fleet.slots_of(model) if s.standing is Standing.SCHEDULABLE]
    change = Await("load", model, f"load {model}", fleet, slots=names, until="ready")
    return change, actions + fleet.start_change(change, now)


def unload(fleet: Fleet, model: str, now: float) -> tuple[Change, list[Action]]:
    fleet.model(model)
    if other := fleet.active_change(model):
        raise Refused("conflict", f"change {other.id} is at work on {model}", other.id)
    actions = fleet.unload(model, now, "unload asked")
    names = [s.name for s in fleet.slots_of(model)]
    change = Await("unload", model, f"unload {model}", fleet, slots=names)
    return change, actions + fleet.start_change(change, now)


def plan(fleet: Fleet, model: str, wish: ReloadWish, now: float) -> list[dict[str, Any]]:
    """What a reload would do, slot by slot, with the arithmetic. Touches nothing."""
    new = wished(fleet, model, wish)
    names = _slots_for(fleet, model, wish.slots)
    swap = Swap(
        "reload", model, "", fleet, new=new, old=fleet.model(model).current,
        strategy=wish.strategy, todo=names, canary_share=wish.canary, allow_gap=wish.allow_gap,
    )  # fmt: skip
    lines = []
    for name in names:
        slot = fleet.slots[name]
        found = swap.way(slot, now)
        why = found.why
        if found.how == "in-place" and leaves_none(fleet, slot):
            hold = new.config.hold if wish.allow_gap is None else wish.allow_gap
            why += (
                f"; the only ready worker: requests are held for up to {format_time(hold)}, the "
                f"gap will take about {format_time(expected_gap_s(slot))}"
            )
        lines.append(
            {
                "slot": name,
                "strategy": found.how,
                "why": why,
                "need_bytes": found.need,
                "room_bytes": found.room,
                "spare": found.spare,
            }
        )
    if problem := _gap_problem(swap, now):
        lines[0]["why"] = f"refused: {problem}"
    return lines

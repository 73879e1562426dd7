"""How the fleet looks to proxies: routes, models, readiness. Pure."""

from __future__ import annotations

from typing import Final

from gpusup.worker.wire import TensorSpec

from . import wire
from .fleet import Fleet
from .life import ROUTED, Life, State
from .rollout import Swap
from .slot import Slot, Standing

_ROUTE_STATES: Final[dict[State, wire.RouteState]] = {
    State.READY: "open",
    State.SUSPECT: "suspect",
    State.DRAINING: "closing",
}


def routes(fleet: Fleet, run_dir: str) -> tuple[wire.Route, ...]:
    return tuple(
        _route(slot, life, run_dir)
        for slot in fleet.slots.values()
        for life in slot.lives()
        if life.state in ROUTED
    )


def data_path(run_dir: str, slot: str, generation: int) -> str:
    return f"{run_dir}/{slot}.{generation}.sock"


def _route(slot: Slot, life: Life, run_dir: str) -> wire.Route:
    state = _ROUTE_STATES[life.state]
    if state == "open" and slot.standing is not Standing.SCHEDULABLE:
        state = "suspect"  # cordoned: what is there goes on, nothing new comes
    info = life.info
    return wire.Route(
        slot=slot.name,
        generation=life.generation,
        model=life.assignment.model,
        version=life.assignment.version,
        device=slot.device,
        path=data_path(run_dir, slot.name, life.generation),
        state=state,
        max_rows=info.max_rows if info else life.assignment.config.max_rows,
        budget_s=info.budget_s if info else life.assignment.config.budget,
        degrade=tuple(info.degrade) if info else (),
        fallback=slot.fallback,
        pid=life.pid,
    )


def open_lives(fleet: Fleet, model: str) -> list[Life]:
    """Workers of a model that take requests now."""
    return [
        life
        for slot in fleet.slots_of(model, fallback=False)
        if slot.standing is Standing.SCHEDULABLE
        for life in slot.lives()
        if life.state is State.READY
    ]


def model_state(fleet: Fleet, name: str, now: float) -> tuple[wire.ModelState, str]:
    record = fleet.models[name]
    slots = fleet.slots_of(name, fallback=False)
    change = fleet.active_change(name)
    if open_lives(fleet, name):
        return ("swapping" if isinstance(change, Swap) and change.current else "ready"), ""
    if not record.loaded:
        wakes = record.current.config.on_demand
        return "unloaded", "it is loaded when a request comes" if wakes else "unloaded"
    if isinstance(change, Swap):
        return "swapping", f"change {change.id}: {change.title}"
    if record.failed:
        return "failed", record.failed
    if slots and all(s.failed for s in slots):
        return "failed", slots[0].failed
    out = [s for s in slots if s.standing is not Standing.SCHEDULABLE]
    if slots and len(out) == len(slots):
        why = "; ".join(f"{s.name} is {s.standing}{_because(s)}" for s in out)
        return "failed", why
    if not slots:
        return "failed", "no device has room for a worker of it"
    words = "; ".join(f"{s.name}: {_slot_words(s, now)}" for s in slots if s not in out)
    return "loading", words


def _because(slot: Slot) -> str:
    return f" ({slot.standing_why})" if slot.standing_why else ""


def _slot_words(slot: Slot, now: float) -> str:
    if slot.worker is not None:
        return f"{slot.worker.state} ({slot.worker.phase})"
    if slot.waiting_for:
        return f"waits for {slot.waiting_for}"
    last = f", last exit: {slot.last_exit}" if slot.last_exit else ""
    return slot.state(now) + (f": {slot.failed}" if slot.failed else last)


def model_info(fleet: Fleet, name: str, now: float) -> wire.ModelInfo:
    record = fleet.models[name]
    config = record.current.config
    lives = open_lives(fleet, name)
    known = [life for s in fleet.slots_of(name) for life in s.lives() if life.info is not None]
    info = (lives or known)[0].info if (lives or known) else None
    state, reason = model_state(fleet, name, now)
    peaks: dict[str, int] = {}
    for life in known:
        for key, size in life.peaks.items():
            peaks[key] = max(size, peaks.get(key, 0))
    declared_in = [_spec(t.name, t.datatype, t.shape) for t in config.inputs]
    declared_out = [_spec(t.name, t.datatype, t.shape) for t in config.outputs]
    coming = any(
        life.state in (State.SPAWNED, State.LOADING, State.WARMING, State.HELD)
        for s in fleet.slots_of(name, fallback=False)
        for life in s.lives()
    )
    active = fleet.active_change(name)
    change = active if isinstance(active, Swap) else None
    swapping = change is not None
    mixed = any(s.wanted not in (None, record.current) for s in fleet.slots_of(name))
    # A worker that died is back in a moment: what waits a little loses nothing.
    steady = [life for life in lives if life.assignment is not record.canary]
    holding = (
        not steady and not fleet.stopping and (swapping or coming or _retries(fleet, name, now))
    )
    return wire.ModelInfo(
        name=name,
        state=state,
        reason=reason,
        version=record.current.version,
        versions=tuple(sorted({life.assignment.version for life in lives}, key=int)),
        canary_version=record.canary.version if record.canary else "",
        canary_share=record.canary_share,
        mixed=mixed,
        holding=holding,
        hold_s=config.hold if change is None or change.allow_gap is None else change.allow_gap,
        hold_requests=config.hold_requests,
        max_rows=config.max_rows,
        wait_s=config.wait,
        budget_s=config.budget,
        request_timeout_s=config.request_timeout or fleet.config.server.request_timeout,
        retry=config.retry,
        inputs=tuple(declared_in or (info.inputs if info else ())),
        outputs=tuple(declared_out or (info.outputs if info else ())),
        methods=tuple(info.methods) if info else ("predict",),
        platform=info.platform if info else "pytorch",
        degrade=tuple((d.step, d.limit) for d in config.degrade),
        peaks=peaks,
        required=config.required,
        on_demand=config.on_demand,
        slots=len(fleet.slots_of(name, fallback=False)),
        created=record.created,
    )


def _retries(fleet: Fleet, name: str, now: float) -> bool:
    """A start is due within the time a request may be held."""
    hold = fleet.models[name].current.config.hold
    return fleet.models[name].loaded and any(
        s.takes_part() and s.wanted is not None and not s.waiting_for and s.retry_at - now < hold
        for s in fleet.slots_of(name, fallback=False)
    )


def _spec(name: str, datatype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def readiness(fleet: Fleet, now: float) -> tuple[bool, str]:
    """Whether every required model has a worker that answers; if not, why."""
    if fleet.stopping:
        return False, "stopping"
    missing = [
        f"{name}: {model_state(fleet, name, now)[1]}"
        for name, record in fleet.models.items()
        if record.current.config.required
        and not open_lives(fleet, name)
        and not (record.current.config.on_demand and not record.loaded)
    ]
    return not missing, "; ".join(missing)


def snapshot(
    fleet: Fleet,
    *,
    serial: int,
    run_dir: str,
    devices: tuple[wire.DeviceInfo, ...],
    poisoned: tuple[str, ...],
    suspects: tuple[tuple[str, float], ...] = (),
    proxies: int,
    now: float,
) -> wire.Snapshot:
    ready, reason = readiness(fleet, now)
    return wire.Snapshot(
        serial=serial,
        routes=routes(fleet, run_dir),
        models=tuple(model_info(fleet, name, now) for name in fleet.models),
        devices=devices,
        ready=ready,
        draining=fleet.stopping,
        reason=reason,
        poisoned=poisoned,
        suspects=suspects,
        proxies=proxies,
    )

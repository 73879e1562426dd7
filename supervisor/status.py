"""What `status` shows: the fleet, its workers, devices, proxies and changes at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusup.worker.wire import Load

from . import standby, view, wire
from .change import Change
from .fleet import Fleet
from .life import Life
from .runtime import Key, Known
from .slot import Slot, Standing
from .watermark import worst_band


def slot_view(
    slot: Slot, known: Mapping[Key, Known], reports: Sequence[wire.ProxyReport], now: float
) -> wire.SlotView:
    heir = slot.standby
    life = slot.worker or (slot.successor if heir is None else None)
    pong = None
    if life is not None and (worker := known.get((slot.name, life.generation))):
        pong = worker.pong
    load = pong.load if pong else Load(0, 0, 0, 0.0)
    progress = life.progress if life else None
    retry = slot.retry_at - now if slot.state(now) == "backoff" else None
    assignment = life.assignment if life else slot.wanted
    memory = life.memory if life else None
    in_flight = sum(r.in_flight.get(slot.name, 0) for r in reports)
    return wire.SlotView(
        slot=slot.name,
        device=slot.device,
        state=slot.state(now),
        since_s=now - life.since if life else 0.0,
        slot_state=str(slot.standing),
        why=_why(slot, life),
        model=slot.model,
        version=assignment.version if assignment else "",
        generation=life.generation if life else slot.generation,
        pid=life.pid if life and not life.exited else 0,
        restarts=slot.restarts,
        last_exit=slot.last_exit,
        next_retry_s=retry,
        in_flight=in_flight,
        # The worker's word is older than the proxies': nothing waits where nothing is.
        queued=load.queued_rows if in_flight else 0,
        beat_age_s=now - progress.beat if progress and progress.beat else None,
        progress_age_s=now - progress.last_ok if progress and progress.last_ok else None,
        phase=life.phase if life else "",
        memory={
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "peak": memory.peak,
            "static": memory.static,
            "context": memory.context,
        }
        if memory
        else {},
        graphs=dict(life.graphs) if life else {},
        seconds=dict(life.info.seconds) if life and life.info else {},
        successor=_successor(slot),
        standby=standby.words(slot),
        standby_pid=heir.pid if heir is not None and not heir.exited else 0,
        story=tuple(
            f"{now - m.at:.1f} s ago: {m.before} -> {m.after} ({m.cause})"
            for m in (life.story if life else slot.last_story)
        ),
    )


def _successor(slot: Slot) -> str:
    """The worker that is to follow, or serves beside as a canary."""
    if slot.successor is None or slot.worker is None or slot.successor.standby:
        return ""
    heir = slot.successor
    return f"version {heir.assignment.version} is {heir.state} (generation {heir.generation})"


def _why(slot: Slot, life: Life | None) -> str:
    words = []
    if slot.standing is not Standing.SCHEDULABLE:
        by = f" by {slot.standing_by}" if slot.standing_by else ""
        words.append(f"{slot.standing}{by}: {slot.standing_why}" if slot.standing_why else "")
    if slot.failed:
        words.append(slot.failed)
    if slot.waiting_for and life is None:
        words.append(f"waits for {slot.waiting_for}")
    if life is not None and life.why_suspect:
        words.append(life.why_suspect)
    if life is not None and life.holders:
        words.append(f"its memory is not back: {life.holders}")
    if slot.fallback:
        words.append("fallback: serves degraded requests only")
    return "; ".join(w for w in words if w)


def model_view(
    fleet: Fleet,
    name: str,
    reports: Sequence[wire.ProxyReport],
    requests: int,
    now: float,
) -> wire.ModelView:
    state, reason = view.model_state(fleet, name, now)
    lives = view.open_lives(fleet, name)
    record = fleet.models[name]
    latencies = [r.latency[name] for r in reports if name in r.latency]
    return wire.ModelView(
        name=name,
        state=state,
        version=record.current.version,
        versions=tuple(sorted({life.assignment.version for life in lives}, key=int)),
        ready=len(lives),
        slots=len(fleet.slots_of(name, fallback=False)),
        reason=reason,
        queued=sum(r.queued.get(name, 0) for r in reports),
        p50_s=max(p50 for p50, _ in latencies) if latencies else None,
        p99_s=max(p99 for _, p99 in latencies) if latencies else None,
        requests=requests,
        canary_version=record.canary.version if record.canary else "",
        canary_share=record.canary_share,
        required=record.current.config.required,
    )


def device_view(
    fleet: Fleet,
    info: wire.DeviceInfo,
    reports: Sequence[wire.ProxyReport],
    title: str,
    release: str = "",
) -> wire.DeviceView:
    device = fleet.devices[info.name]
    return wire.DeviceView(
        name=info.name,
        uuid=info.uuid,
        kind=info.kind,
        total=info.total,
        free=info.free,
        watermark=info.watermark,
        band=worst_band(info.name, reports),
        known=info.known,
        age_s=info.age_s,
        reclaimable=info.reclaimable,
        leased=sum(info.leased.values()),
        foreign=info.foreign,
        title=title,
        fault=device.lost or device.fault,
        source=info.source,
        release=release,
    )


def change_view(change: Change, now: float) -> wire.ChangeView:
    return wire.ChangeView(
        id=change.id,
        kind=change.kind,
        title=change.title,
        state=change.state,
        model=change.model,
        text=change.text,
        age_s=now - change.started,
        took_s=change.ended - change.started if change.ended else None,
        steps=tuple((step.at - change.started, step.text) for step in change.steps),
        numbers=change.numbers,
        progress=change.progress,
    )


def overall(fleet: Fleet, now: float) -> tuple[str, str]:
    """(starting, ready, degraded, down or draining; why)."""
    if fleet.stopping:
        return "draining", "stopping"
    ready, reason = view.readiness(fleet, now)
    wanted = [slot for slot in fleet.slots.values() if slot.wanted is not None]
    states = {slot.state(now) for slot in wanted}
    # A worker that is on its way counts as starting only where nothing has failed.
    young = {"spawned", "loading", "warming", "held", "empty"}
    if not ready:
        # What an operator has taken out will not come by waiting.
        coming = states and states <= young | {"ready"} and not any(map(out_of_use, wanted))
        return ("starting" if coming else "down"), reason
    bad = [
        f"{slot.name} is {slot.standing if out_of_use(slot) else slot.state(now)}"
        for slot in wanted
        if out_of_use(slot) or not slot.is_ready()
    ]
    return ("degraded" if bad else "ready"), "; ".join(bad)


def out_of_use(slot: Slot) -> bool:
    """Cordoned, quarantined or lost."""
    return slot.standing is not Standing.SCHEDULABLE

"""All slots, models, devices and changes of the box: events in, actions out. Pure.

The one place where decisions across slots are made: who may start where, what a device's fault
means for its slots, which model is asked to leave for which. Changes (rollout.py) are driven from
here, after every event.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gpusup.conf.schema import Config, ModelConfig

from . import events as ev
from . import standby
from .actions import Action, Assignment, Persist, Publish, Tell
from .backoff import Cause
from .blame import device_faulted, gave_up
from .books import Books
from .change import Await, Change
from .layout import DevicePlace, Fits, SlotPlace, lay_out
from .life import ROUTED, Life, Outcome, State
from .room import has_room
from .slot import Slot, Standing

#: A pause of the run loop longer than this means that the supervisor itself was stopped.
PAUSE_S: Final = 1.0
CHANGES_KEPT: Final = 200


class Refused(Exception):
    """An operator's wish that can't be granted. `kind`: not_found, conflict, invalid."""

    def __init__(self, kind: str, text: str, change: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.change = change


@dataclass(slots=True)
class ModelRecord:
    current: Assignment
    previous: Assignment | None = None
    canary: Assignment | None = None
    canary_share: float = 0.0
    loaded: bool = True
    last_used: float = 0.0
    failed: str = ""
    created: int = 0
    evicted_for: str = ""
    deaths: dict[str, float] = field(default_factory=dict)  # device -> last give-up there


class Fleet:
    def __init__(
        self,
        config: Config,
        devices: Mapping[str, DevicePlace],
        *,
        fits: Fits,
        size_of: Callable[[Assignment, str], int],
        rng: random.Random,
        now: float,
    ) -> None:
        self.config = config
        self.books = Books(config, devices, size_of)
        self.devices = self.books.devices
        self.models: dict[str, ModelRecord] = {}
        self.slots: dict[str, Slot] = {}
        self.changes: dict[str, Change] = {}
        self.stopping = False
        self.driver_gone = ""
        self._fits = fits
        self._rng = rng
        self._serial = 0
        self._last_tick = now
        self._seen: object = None
        self.evictions: list[tuple[str, str]] = []
        for name, model in config.models.items():
            self._add_model(name, model, now)
        for place in lay_out(config, devices, fits):
            self._add_slot(place)

    # -- looking things up ------------------------------------------------------------------------

    def slot(self, name: str) -> Slot:
        if name not in self.slots:
            raise Refused("not_found", f"no slot {name!r}; there are {', '.join(self.slots)}")
        return self.slots[name]

    def targets(self, name: str) -> list[Slot]:
        """A slot, or all slots of a device."""
        if name in self.slots:
            return [self.slots[name]]
        found = [slot for slot in self.slots.values() if slot.device == name]
        return found or [self.slot(name)]

    def model(self, name: str) -> ModelRecord:
        if name not in self.models:
            raise Refused("not_found", f"no model {name!r}; there are {', '.join(self.models)}")
        return self.models[name]

    def slots_of(self, model: str, *, fallback: bool | None = None) -> list[Slot]:
        return [
            s
            for s in self.slots.values()
            if s.model == model and (fallback is None or s.fallback is fallback)
        ]

    def lives(self) -> Iterable[Life]:
        for slot in self.slots.values():
            yield from slot.lives()

    def life(self, slot: str, generation: int) -> Life | None:
        lives = self.slots[slot].lives() if slot in self.slots else []
        return next((life for life in lives if life.generation == generation), None)

    def ready_workers(self, model: str, *, but: str = "") -> int:
        return sum(
            slot.name != but and slot.standing is Standing.SCHEDULABLE and slot.is_ready()
            for slot in self.slots_of(model, fallback=False)
        )

    def active_change(self, model: str) -> Change | None:
        return next((c for c in self.changes.values() if c.is_active() and c.model == model), None)

    # -- events -----------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        actions: list[Action] = []
        match event:
            case ev.DeviceSampled() if event.device in self.devices and event.known:
                self.books.sampled(event.device, event.total, event.used, event.ours)
            case ev.DeviceSampled():
                if event.device in self.devices:
                    self.books.unknown(event.device)
            case ev.DeviceFaulted():
                actions += device_faulted(self, event, now)
            case ev.DriverSeen():
                if event.gone != self.driver_gone:
                    text = f"the GPU driver is gone: {event.gone}"
                    if not event.gone:
                        text = "the GPU driver is back"
                    actions.append(Tell(kind="device", text=text, level="warning"))
                self.driver_gone = event.gone
            case ev.ModelUsed():
                for name in event.models:
                    if name in self.models:
                        self.models[name].last_used = now
            case ev.ModelWanted():
                actions += self._model_wanted(event.model, now)
            case ev.CheckDone():
                if change := self.changes.get(event.change):
                    change.check_done(event.problem, now)
            case ev.Ticked():
                actions += self._tick(now)
            case _:
                actions += self._worker_event(event, now)
        return actions + self.advance(now)

    def advance(self, now: float) -> list[Action]:
        """Let changes and slots take their next steps; note whether the outside must be told."""
        actions: list[Action] = []
        self._drop_retired()
        for change in [c for c in self.changes.values() if c.is_active()]:
            actions += change.advance(now)
        self.books.sync(self.lives())
        if not self.stopping:
            for slot in self.slots.values():
                if not slot.may_start(now):
                    continue
                if has_room(self, slot):
                    actions += slot.start(now)
                else:
                    actions += standby.make_room(self, slot, now)
            for leaver, comer in self.evictions:
                actions += self.unload(leaver, now, f"makes room for {comer}")
            self.evictions.clear()
        actions += standby.tend(self, now)
        self.books.sync(self.lives())
        seen = self._visible(now)
        if seen != self._seen:
            self._seen = seen
            actions.append(Publish())
        return actions

    def start_change(self, change: Change, now: float) -> list[Action]:
        """Number it and set it going. Refused if another one is at work on the same model."""
        if change.model and (other := self.active_change(change.model)):
            raise Refused(
                "conflict",
                f"change {other.id} ({other.kind}) is at work on {change.model}",
                other.id,
            )
        self._serial += 1
        change.id = str(self._serial)
        change.started = now
        self.changes[change.id] = change
        while len(self.changes) > CHANGES_KEPT:
            oldest = next(iter(self.changes))
            if self.changes[oldest].is_active():
                break
            del self.changes[oldest]
        return self.advance(now)

    @property
    def serial(self) -> int:
        """Of the last change."""
        return self._serial

    def next_serial(self, at_least: int) -> None:
        self._serial = max(self._serial, at_least)

    def stop(self, now: float, limit_s: float) -> list[Action]:
        """Drain everything; nothing is started any more."""
        self.stopping = True
        actions: list[Action] = []
        for slot in self.slots.values():
            for life in slot.lives():
                actions += life.drain(now, "stop", limit_s)
        return actions + self.advance(now)

    def kill_all(self, now: float) -> list[Action]:
        self.stopping = True
        actions: list[Action] = []
        for life in self.lives():
            actions += life.kill(now, Outcome(Cause.REQUESTED, "forced stop"))
        return actions

    def is_empty(self) -> bool:
        """Nothing left but what can't be killed."""
        return all(life.state is State.UNKILLABLE or life.exited for life in self.lives())

    # -- models and slots come and go -------------------------------------------------------------

    def _add_model(self, name: str, config: ModelConfig, now: float) -> None:
        assignment = Assignment(model=name, version=config.version, config=config)
        self.models[name] = ModelRecord(assignment, loaded=not config.on_demand, last_used=now)

    def new_slot(self, name: str, device: str, model: str, *, fallback: bool) -> Slot:
        return Slot(name, device, model, self.config.supervision, self._rng, fallback=fallback)

    def _add_slot(self, place: SlotPlace) -> None:
        slot = self.new_slot(place.name, place.device, place.model, fallback=place.fallback)
        record = self.models[place.model]
        slot.wanted = record.current if record.loaded else None
        self.slots[place.name] = slot

    def replan(
        self, name: str, config: ModelConfig | None, now: float
    ) -> tuple[Change, list[Action]]:
        """A model came, went, or wants other devices or numbers: its slots are laid out anew.

        Slots of other models stay as they are; a slot that is no longer wanted is drained first.
        """
        models = {k: v for k, v in self.config.models.items() if k != name}
        if config is not None:
            models[name] = config
        self.config = msgspec.structs.replace(self.config, models=models)
        actions: list[Action] = [Persist()]
        old = self.slots_of(name)
        for slot in old:
            slot.wanted = None
            slot.retiring = True
            for life in slot.lives():
                actions += life.drain(now, "removed by the configuration")
        fresh: list[str] = []
        if config is None:
            if not old:
                self.models.pop(name, None)
        else:
            self._add_model(name, config, now)
            places = {n: d.place for n, d in self.devices.items()}
            only = msgspec.structs.replace(self.config, models={name: config})
            for place in lay_out(only, places, self._fits):
                place = place._replace(name=self._free_name(place.name, place.device))
                self._add_slot(place)
                fresh.append(place.name)
        kind, title = ("remove", f"remove {name}") if config is None else ("add", f"lay out {name}")
        change = Await(
            kind,
            name,
            title,
            self,
            slots=fresh or [s.name for s in old],
            until="ready" if fresh and self.models[name].loaded else "empty",
        )
        return change, actions + self.start_change(change, now)

    def _free_name(self, wanted: str, device: str) -> str:
        if wanted not in self.slots:
            return wanted
        index = 0
        while f"{device}.{index}" in self.slots:
            index += 1
        return f"{device}.{index}"

    def _drop_retired(self) -> None:
        for slot in [s for s in self.slots.values() if s.retiring and not s.lives()]:
            del self.slots[slot.name]
            if slot.model not in self.config.models and not self.slots_of(slot.model):
                self.models.pop(slot.model, None)

    def set_loaded(self, model: str, loaded: bool, now: float) -> None:
        record = self.models[model]
        record.loaded = loaded
        record.last_used = now
        if loaded:
            record.evicted_for = ""
        for slot in self.slots_of(model):
            slot.wanted = record.current if loaded else None

    # -- parts ------------------------------------------------------------------------------------

    def _worker_event(self, event: ev.WorkerEvents, now: float) -> list[Action]:
        slot = self.slots.get(event.slot)
        if slot is None:
            return []
        failed_before = slot.failed
        life = self.life(event.slot, event.generation)
        if isinstance(event, ev.WorkerExited) and life is not None and self.has_no_driver(slot):
            # Without a driver nothing can live there: neither model nor slot are to blame.
            life.blame(Outcome(Cause.GPU, f"the GPU driver was gone: {self.driver_gone}"))
        actions = slot.handle(event, now)
        if isinstance(event, ev.WorkerExited) and not self.stopping and slot.heir_may_start():
            assert slot.wanted is not None
            context = self.books.has_room_for_context(slot.device)
            actions += slot.start_successor(slot.wanted, now, held=True, held_context=context)
        if isinstance(event, ev.WorkerBecameReady) and life is not None:
            self.books.learn(life)
            self.models[life.assignment.model].failed = ""
        if slot.failed and not failed_before:
            actions += gave_up(self, slot, now)
        return actions

    def _tick(self, now: float) -> list[Action]:
        pause = now - self._last_tick
        self._last_tick = now
        actions: list[Action] = []
        if pause > PAUSE_S:
            for life in self.lives():
                life.postpone(pause, now)
            actions.append(
                Tell(
                    kind="pause",
                    text=f"the supervisor was stopped for {pause:.1f} s",
                    level="warning",
                )
            )
            return actions
        for slot in self.slots.values():
            failed_before = slot.failed
            actions += slot.tick(now)
            if slot.failed and not failed_before:
                actions += gave_up(self, slot, now)
        for name, record in self.models.items():
            if not self.ready_workers(name):
                record.last_used = now  # who waits for the load has not used it yet
            idle = record.current.config.idle_unload
            quiet = idle > 0 and now - record.last_used >= idle
            if quiet and record.loaded and not self.active_change(name) and not self.stopping:
                actions += self.unload(name, now, f"idle for {idle:g} s")
        return actions

    # -- on demand --------------------------------------------------------------------------------

    def _model_wanted(self, name: str, now: float) -> list[Action]:
        record = self.models.get(name)
        if record is None or record.loaded or not record.current.config.on_demand:
            return []
        self.set_loaded(name, True, now)
        return [Tell(kind="load", text=f"{name}: loaded on demand"), Persist()]

    def unload(self, name: str, now: float, why: str) -> list[Action]:
        self.set_loaded(name, False, now)
        actions: list[Action] = [Tell(kind="unload", text=f"{name}: {why}"), Persist()]
        for slot in self.slots_of(name):
            for life in slot.lives():
                actions += life.drain(now, why)
        return actions

    def has_no_driver(self, slot: Slot) -> bool:
        return bool(self.driver_gone) and self.devices[slot.device].place.kind == "cuda"

    # -- how it looks from outside ----------------------------------------------------------------

    def _visible(self, now: float) -> object:
        """Whatever proxies can see; compared, so that they are told when it changes."""
        routes = tuple(
            (slot.name, life.generation, life.state, slot.standing, life.assignment.version)
            for slot in self.slots.values()
            for life in slot.lives()
            if life.state in ROUTED
        )
        models = tuple(
            (
                n,
                r.current.version,
                r.canary and r.canary.version,
                r.canary_share,
                r.loaded,
                r.failed,
            )
            for n, r in self.models.items()
        )
        states = tuple((slot.state(now), slot.reserved_by) for slot in self.slots.values())
        return routes, models, states, self.stopping, tuple(d.lost for d in self.devices.values())

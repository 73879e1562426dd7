"""What the runtime asks of its surroundings: specs for workers, news for proxies, saved state."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gpusup.conf.schema import Config
from gpusup.worker import wire as worker_wire

from . import actions as act
from . import view, wire
from .check_model import ModelCheck
from .fleet import Fleet
from .host_oom import HostOom
from .listen import Listeners
from .notify import Notify
from .poison import Poison
from .proxies import Proxies
from .pulse import Pulse
from .reclaimer import Reclaimer
from .saved import Saved, save
from .status import overall
from .store import Store, StoreError

log = logging.getLogger("gpusup.supervisor")

PERSIST_AFTER_S: Final = 0.1


class Around:
    """A part of the box (box.py), which has the fields named here. Is `runtime.Surroundings`."""

    config: Config
    fleet: Fleet
    pulse: Pulse
    proxies: Proxies
    listeners: Listeners
    state_dir: Path
    poison: Poison
    store: Store[Saved]
    notify: Notify
    host_oom: HostOom
    check_model: ModelCheck
    reclaimer: Reclaimer
    serial: int  # of the last snapshot
    _persist: asyncio.TimerHandle | None

    def spec(self, launch: act.Launch) -> worker_wire.WorkerSpec:
        fleet = self.fleet
        life = fleet.life(launch.slot, launch.generation)
        assert life is not None
        device = fleet.devices[launch.device]
        surge = fleet.slots[launch.slot].successor is life and not life.held
        others = [
            slot.wanted
            for slot in fleet.slots.values()
            if slot.device == launch.device and slot.name != launch.slot and slot.wanted
        ]
        a = launch.assignment
        run_dir = str(self.listeners.run_dir)
        profile = self.state_dir / "profiles" / f"{a.model}@{a.version}.{device.place.kind}.json"
        return worker_wire.WorkerSpec(
            slot=launch.slot,
            generation=launch.generation,
            model=a.model,
            version=a.version,
            device=device.place.kind,
            device_uuid=device.place.uuid,
            control_path=self.listeners.workers_path,
            data_path=view.data_path(run_dir, launch.slot, launch.generation),
            config=msgspec.to_builtins(a.config),
            memory_cap=fleet.books.cap(life, others, surge=surge),
            device_total=device.total,
            profile_path=str(profile),
            held=launch.held,
            held_context=launch.held_context,
            beside=surge,
            env={"GPUSUP_PIXELS": str(self.config.server.pixels), **a.config.env},
            place=list(fleet.slots).index(launch.slot),
            workers=len(fleet.slots),
            keep_alive=self.config.supervision.keep_alive,
            canary_idle=self.config.supervision.canary_idle,
            canary_limit=self.config.supervision.canary_limit,
        )

    def publish(self) -> None:
        self.proxies.broadcast(self.snapshot())
        state, reason = overall(self.fleet, time.monotonic())
        self.notify.status(f"{state}{': ' if reason else ''}{reason}")

    def snapshot(self) -> wire.Snapshot:
        self.serial += 1
        return view.snapshot(
            self.fleet,
            serial=self.serial,
            run_dir=str(self.listeners.run_dir),
            devices=self.pulse.infos,
            poisoned=self.poison.refused(),
            suspects=self.poison.suspects(),
            proxies=self.proxies.count,
            now=time.monotonic(),
        )

    def persist(self) -> None:
        if self._persist is None:
            loop = asyncio.get_running_loop()
            self._persist = loop.call_later(PERSIST_AFTER_S, self.save_now)

    def save_now(self) -> None:
        if self._persist is not None:
            self._persist.cancel()
            self._persist = None
        try:
            self.store.save(save(self.fleet, self.poison.refused(), time.monotonic()))
        except StoreError as error:
            log.error("%s", error)

    def reclaim(self, slot: str, generation: int, device: str, pid: int) -> None:
        self.reclaimer.start(slot, generation, device, pid)

    def check(self, change: str, assignment: act.Assignment) -> None:
        self.check_model.start(change, assignment)

    def was_host_oom(self) -> bool:
        return self.host_oom.happened()

    def tidy(self, slot: str, generation: int) -> None:
        """A killed worker leaves its socket's file behind."""
        with suppress(OSError):
            os.unlink(view.data_path(str(self.listeners.run_dir), slot, generation))


def open_state_dir(path: Path) -> None:
    """Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o750)
    (path / "profiles").mkdir(exist_ok=True)
    (path / "records").mkdir(exist_ok=True)

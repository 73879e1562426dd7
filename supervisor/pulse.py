"""The regular work of the supervisor's loop: look at progress, ask workers, look at devices,
tell the proxies. Every turn is short; nothing in it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec.structs import replace

from gpusup.conf.schema import Config
from gpusup.worker import wire as worker_wire
from gpusup.worker.wire import Memory

from . import wire
from .devices import Baselines, CpuDevice, context_bytes, cpu_sample, device_info
from .events import DeviceSampled, ProgressSeen, Ticked
from .family import read_process
from .life import ROUTED, State
from .probe_wire import DeviceSample
from .runtime import Runtime

TICK_S: Final = 0.05


class Samples(Protocol):
    def latest(self, device: str) -> tuple[DeviceSample, float] | None: ...


class Pulse:
    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        *,
        samples: Samples,
        cpus: Mapping[str, CpuDevice],
        leases: Callable[[str], dict[str, int]],
        broadcast: Callable[[wire.DeviceUpdate], None],
        after_turn: Callable[[float], None],
    ) -> None:
        """`leases(device)`: bytes by proxy. `after_turn(now)`: e.g. the watchdog."""
        self.runtime = runtime
        self.config = config
        self.samples = samples
        self.cpus = cpus
        self.infos: tuple[wire.DeviceInfo, ...] = ()
        self.baselines = Baselines()
        self._leases = leases
        self._broadcast = broadcast
        self._after_turn = after_turn
        self._serial = 0
        self._ping_at = 0.0
        self._told: tuple[wire.DeviceInfo, ...] = ()
        self._told_at = 0.0

    async def run(self) -> None:
        while True:
            self.turn()
            await asyncio.sleep(TICK_S)

    def turn(self) -> None:
        now = self.runtime.now()
        self._look_at_progress()
        self._ping(now)
        self.look_at_devices(now)
        self.runtime.post(Ticked())
        self._after_turn(now)

    def _look_at_progress(self) -> None:
        for key, known in list(self.runtime.workers.items()):
            life = self.runtime.fleet.life(*key)
            if life is None or known.process.exited or life.state is State.RECLAIMING:
                continue
            state = "S"
            if life.state is State.SUSPECT and life.pid:
                process = read_process(life.pid)
                state = process.state if process else "?"
            self.runtime.post(
                ProgressSeen(
                    slot=key[0],
                    generation=key[1],
                    progress=known.process.progress.read(),
                    process_state=state,
                )
            )

    def _ping(self, now: float) -> None:
        if now - self._ping_at < self.config.supervision.keep_alive:
            return
        self._ping_at = now
        self._serial += 1
        for life in self.runtime.fleet.lives():
            if life.state in ROUTED:
                ping = worker_wire.Ping(self._serial)
                self.runtime.links.send(life.slot, life.generation, ping)

    def memory_on(self, device: str) -> list[Memory]:
        return [
            life.memory
            for life in self.runtime.fleet.lives()
            if life.device == device and not life.exited
        ]

    def _add_contexts(self, device: str) -> None:
        """Workers can't say what their contexts take."""
        found = self.samples.latest(device)
        if found is None:
            return
        for life in self.runtime.fleet.lives():
            if life.device == device and not life.exited:
                processes = found[0].processes
                context = context_bytes(life.memory, life.pid, processes, opened=life.context_open)
                if context != life.memory.context:
                    life.memory = replace(life.memory, context=context)

    def sample(self, device: str, now: float) -> DeviceSample | None:
        return self._sample(device, self.memory_on(device), now)

    def _sample(self, device: str, memories: list[Memory], now: float) -> DeviceSample | None:
        if device in self.cpus:
            return cpu_sample(self.cpus[device], memories, now)
        found = self.samples.latest(device)
        return found[0] if found else None

    def look_at_devices(self, now: float) -> None:
        fleet = self.runtime.fleet
        infos = []
        our_pids = [life.pid for life in fleet.lives() if life.pid]
        for name, device in fleet.devices.items():
            if name not in self.cpus:
                self._add_contexts(name)
            memories = self.memory_on(name)
            sample = self._sample(name, memories, now)
            if sample is None:
                infos.append(_blank(name, device.place.uuid, device.total))
                self.runtime.post(DeviceSampled(device=name, total=0, used=0, ours=0, known=False))
                continue
            budget = self.config.devices.memory.get(name, 0) if sample.kind == "cuda" else 0
            if sample.kind == "cuda":
                # A dead worker whose memory is not back is still one of ours here; one that has
                # not said hello holds nothing yet, so a fresh box sees its devices idle.
                here = [
                    x
                    for x in fleet.lives()
                    if x.device == name and x.state not in (State.GONE, State.SPAWNED)
                ]
                self.baselines.note(sample, len(here))
            # What the driver itself takes is no part of a budget.
            baseline = 0 if budget else self.baselines.baseline(name) or 0
            info = device_info(
                sample,
                memories,
                self._leases(name),
                now,
                stale_after=self.config.watermark.stale_after,
                budget=budget,
                baseline=baseline,
                our_pids=our_pids,
            )
            infos.append(info)
            used = info.total - info.free
            if baseline:
                fleet.books.ledger.idle(name, baseline)
            self.runtime.post(
                DeviceSampled(
                    device=name,
                    total=info.total,
                    used=used,
                    ours=max(0, used - info.foreign - baseline),
                    known=info.known,
                )
            )
        self.infos = tuple(infos)
        if now - self._told_at >= 0.1 or any(
            a.known != b.known or abs(a.watermark - b.watermark) > 0.005
            for a, b in zip(infos, self._told, strict=False)
        ):
            self._told, self._told_at = self.infos, now
            self._broadcast(wire.DeviceUpdate(self.infos))


def _blank(name: str, uuid: str, total: int) -> wire.DeviceInfo:
    return wire.DeviceInfo(
        name=name,
        uuid=uuid,
        kind="cuda",
        total=total,
        free=0,
        reclaimable=0,
        dynamic=0,
        watermark=0.0,
        known=False,
        age_s=-1.0,
    )

"""The regular look at the devices: whose memory it is that is in use there."""

from __future__ import annotations

import msgspec

from gpusup.conf.schema import DevicesConfig
from gpusup.supervisor.placement import CONTEXT_BYTES
from gpusup.supervisor.probe_wire import DeviceSample, ProcessUse
from gpusup.supervisor.pulse import Pulse
from gpusup.worker.wire import Counters, Load, Memory, Pong

from .test_runtime import runtime_of, up
from .world import GIB, World


class Probe:
    def __init__(self, world: World) -> None:
        self._world = world
        self.processes: tuple[ProcessUse, ...] = ()

    def latest(self, device: str) -> tuple[DeviceSample, float]:
        sample = DeviceSample(
            name=device,
            uuid="GPU-0",
            index=0,
            at=self._world.now,
            total=80 * GIB,
            free=70 * GIB,
            processes=self.processes,
        )
        return sample, 0.0


def test_a_workers_context_is_its_own_and_counts_against_a_budget() -> None:
    world = up()
    runtime = runtime_of(world)
    probe = Probe(world)
    config = msgspec.structs.replace(world.config, devices=DevicesConfig(memory={"gpu0": 24 * GIB}))
    pulse = Pulse(
        runtime,
        config,
        samples=probe,
        cpus={},
        leases=lambda device: {},
        broadcast=lambda update: None,
        after_turn=lambda now: None,
    )
    (life,) = world.fleet.lives()
    memory = Memory(allocated=4 * GIB, reserved=5 * GIB, static=4 * GIB, device_total=80 * GIB)
    pong = Pong(1, memory, Counters(), Load(0, 0, 8, 0.0))
    runtime.on_message(life.slot, life.generation, pong)

    def seen() -> tuple[int, int, int]:
        pulse.look_at_devices(world.now)
        (info,) = pulse.infos
        return life.memory.context, info.total - info.free, info.foreign

    # Somebody else is in the same list, so the driver's numbers are known to be ours too.
    probe.processes = (ProcessUse(life.pid, 6 * GIB), ProcessUse(999, 4 * GIB))
    assert seen() == (GIB, 6 * GIB, 0)
    # The worker's next word knows nothing of it, and takes nothing back.
    runtime.on_message(life.slot, life.generation, pong)
    assert life.memory.context == GIB
    probe.processes = ()
    assert seen() == (CONTEXT_BYTES, 5 * GIB + CONTEXT_BYTES, 0)

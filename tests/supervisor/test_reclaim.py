from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpusup.supervisor import reclaim
from gpusup.supervisor.probe_wire import DeviceSample, ProcessUse
from gpusup.supervisor.reclaim import left_over, session_members, wait_released
from gpusup.supervisor.reclaimer import Reclaimer

from .world import box

GIB = 2**30
IDLE_AT = GIB + GIB // 4
NOBODY = 2**22 + 17  # above what pids can be


class Device:
    """What the probe would say next; the last reading is repeated, always fresh."""

    def __init__(self, *readings: DeviceSample | None) -> None:
        self.readings = list(readings)

    def latest(self, device: str) -> tuple[DeviceSample, float] | None:
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        return None if reading is None else (reading, 0.0)


def reading(used: int, *processes: ProcessUse, lost: bool = False) -> DeviceSample:
    return DeviceSample(
        name="gpu0",
        uuid="GPU-a",
        index=0,
        at=float("inf"),
        total=24 * GIB,
        free=24 * GIB - used,
        processes=processes,
        lost=lost,
    )


@pytest.fixture
def session() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    )
    yield child
    child.kill()
    child.wait()


async def test_memory_that_is_back_already_is_not_waited_for() -> None:
    release = await wait_released(
        device="gpu0", kind="cuda", pid=NOBODY, latest=Device(reading(GIB)).latest, idle_at=IDLE_AT
    )
    assert release.returned
    assert release.verified
    assert release.seconds < 1


async def test_it_waits_for_the_pid_and_then_for_the_memory() -> None:
    me = os.getpid()
    device = Device(
        reading(6 * GIB, ProcessUse(NOBODY, 5 * GIB)),
        reading(6 * GIB, ProcessUse(me, GIB)),
        reading(2 * GIB, ProcessUse(me, GIB)),
    )
    release = await wait_released(
        device="gpu0", kind="cuda", pid=NOBODY, latest=device.latest, idle_at=IDLE_AT
    )
    assert release.returned
    assert release.pid_gone_s is not None
    assert release.memory_back_s is not None
    assert release.pid_gone_s < release.memory_back_s


async def test_a_neighbours_memory_is_not_waited_for() -> None:
    me = os.getpid()
    device = Device(reading(11 * GIB, ProcessUse(me, 10 * GIB)))
    release = await wait_released(
        device="gpu0", kind="cuda", pid=NOBODY, latest=device.latest, idle_at=IDLE_AT
    )
    assert release.returned


async def test_memory_that_does_not_come_back_is_named_with_both_numbers() -> None:
    me = os.getpid()
    device = Device(reading(9 * GIB, ProcessUse(me, 2 * GIB)))
    release = await wait_released(
        device="gpu0",
        kind="cuda",
        pid=NOBODY,
        latest=device.latest,
        idle_at=IDLE_AT,
        limit_s=0.2,
    )
    assert not release.returned
    assert "7GiB of gpu0" in release.text
    assert "1.25GiB when idle" in release.text
    assert f"pid {me}" in release.text
    assert "(2GiB)" in release.text


async def test_a_blind_probe_does_not_hold_up_the_slot_but_is_owned_up_to() -> None:
    for blind in (None, reading(0, lost=True)):
        release = await wait_released(
            device="gpu0",
            kind="cuda",
            pid=NOBODY,
            latest=Device(blind).latest,
            idle_at=IDLE_AT,
            blind_after_s=0.1,
        )
        assert release.returned
        assert not release.verified


async def test_old_readings_prove_nothing() -> None:
    old = DeviceSample(
        name="gpu0", uuid="", index=0, at=0.0, total=24 * GIB, free=24 * GIB, processes=()
    )
    release = await wait_released(
        device="gpu0",
        kind="cuda",
        pid=NOBODY,
        latest=Device(old).latest,
        idle_at=IDLE_AT,
        blind_after_s=0.1,
    )
    assert not release.verified


async def test_a_device_never_seen_idle_is_released_with_the_process() -> None:
    release = await wait_released(
        device="gpu0", kind="cuda", pid=NOBODY, latest=Device(reading(9 * GIB)).latest, idle_at=None
    )
    assert (release.returned, release.verified) == (True, False)


async def test_a_cpu_slot_waits_for_the_whole_session(session: subprocess.Popen[bytes]) -> None:
    assert session_members(session.pid) == [session.pid]
    waiting = asyncio.ensure_future(
        wait_released(
            device="cpu0", kind="cpu", pid=session.pid, latest=Device(None).latest, idle_at=0
        )
    )
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    # Not collected yet: a zombie holds nothing.
    os.kill(session.pid, signal.SIGKILL)
    release = await waiting
    assert release.returned


async def test_a_session_that_lives_on_is_named(session: subprocess.Popen[bytes]) -> None:
    release = await wait_released(
        device="cpu0",
        kind="cpu",
        pid=session.pid,
        latest=Device(None).latest,
        idle_at=0,
        limit_s=0.1,
    )
    assert not release.returned
    assert f"pid {session.pid}" in release.text


def test_sizes_the_driver_withholds_are_taken_from_what_is_believed() -> None:
    sample = reading(9 * GIB, ProcessUse(5, None))
    assert left_over(sample, 8 * GIB) == GIB
    assert left_over(reading(9 * GIB, ProcessUse(5, 7 * GIB)), 0) == 2 * GIB
    assert left_over(reading(9 * GIB, ProcessUse(5, 7 * GIB)), 8 * GIB, trusted=False) == GIB


async def test_an_empty_session_is_looked_for_once_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def members(pid: int) -> list[int]:
        looks.append(pid)
        return []

    monkeypatch.setattr(reclaim, "session_members", members)
    device = Device(reading(9 * GIB))
    release = await wait_released(
        device="gpu0", kind="cuda", pid=NOBODY, latest=device.latest, idle_at=IDLE_AT, limit_s=0.3
    )
    assert not release.returned
    assert looks == [NOBODY, NOBODY]


async def test_the_probe_is_never_named_as_a_holder(session: subprocess.Popen[bytes]) -> None:
    probe = SimpleNamespace(
        latest=Device(reading(9 * GIB, ProcessUse(session.pid, None))).latest,
        pids=lambda: {session.pid},
    )
    baselines = SimpleNamespace(idle_at=lambda device: IDLE_AT)
    fake: Any = SimpleNamespace(
        runtime=SimpleNamespace(fleet=box(1).fleet),
        probe=probe,
        pulse=SimpleNamespace(memory_on=lambda device: [], baselines=baselines),
    )
    release = await Reclaimer(fake)._wait("gpu0", NOBODY, 0.1)
    assert not release.returned
    assert "gpu0 are still in use" in release.text
    assert f"pid {session.pid} " not in release.text

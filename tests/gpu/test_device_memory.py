"""The probe, the idle baseline and the wait for a dead worker's memory, on a real device."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpusup.conf.schema import ProbeConfig
from gpusup.supervisor.devices import Baselines, device_info
from gpusup.supervisor.probe_link import ProbeLink
from gpusup.supervisor.probe_wire import DeviceSample
from gpusup.supervisor.reclaim import wait_released

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="no NVIDIA device"),
]

GIB = 2**30

HOLD = """
import torch, signal
block = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
signal.pause()
"""


class Watch:
    def __init__(self) -> None:
        self.baselines = Baselines()
        self.ours = 0
        self.changed = asyncio.Event()
        self.link = ProbeLink(
            ProbeConfig(interval=0.05), self._sample, lambda _fault: None, lambda _state: None
        )

    def _sample(self, sample: DeviceSample) -> None:
        self.baselines.note(sample, self.ours)
        self.changed.set()

    async def sample(self, name: str = "gpu0") -> DeviceSample:
        """The next one."""
        found = self.link.latest(name)
        before = found[0].at if found else 0.0
        async with asyncio.timeout(10):
            while (now := self.link.latest(name)) is None or now[0].at <= before:
                self.changed.clear()
                await self.changed.wait()
        return now[0]


@asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    watch = Watch()
    watch.link.start()
    yield watch
    watch.link.stop()
    assert await watch.link.stopped(5)


# Without a plugin for asynchronous tests: machines with GPUs often have none.
def test_the_probe_reads_a_real_device() -> None:
    async def check() -> None:
        async with watching() as watch:
            await reads(watch)

    asyncio.run(check())


def test_a_killed_processes_memory_is_back_within_a_second() -> None:
    async def check() -> None:
        async with watching() as watch:
            await comes_back(watch)

    asyncio.run(check())


async def reads(watch: Watch) -> None:
    found = await watch.link.discover()
    assert found, watch.link.reason
    sample = found[0]
    assert sample.uuid.startswith(("GPU-", "MIG-"))
    assert sample.error == ""
    info = device_info(sample, [], {}, sample.at)
    assert info.known
    assert info.source == "nvml"
    assert 0 <= info.watermark < 1
    print(sample)


async def comes_back(watch: Watch) -> None:
    assert await watch.link.discover()
    for _ in range(5):
        await watch.sample()
    idle_at = watch.baselines.idle_at("gpu0")
    assert idle_at is not None
    watch.ours = 1
    child = subprocess.Popen(  # noqa: ASYNC220 -- killed and collected by hand
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    line = await asyncio.to_thread(child.stdout.readline)
    assert line.strip() == b"held"
    full = await watch.sample()
    full = await watch.sample()
    assert (full.total or 0) - (full.free or 0) > 4 * GIB
    print("listed", full.processes, "child", child.pid)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    release = await wait_released(
        device="gpu0", kind="cuda", pid=child.pid, latest=watch.link.latest, idle_at=idle_at
    )
    print(release)
    assert release.returned
    assert release.verified
    assert release.seconds < 2

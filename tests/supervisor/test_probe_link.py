from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gpusup.conf.schema import DevicesConfig, ProbeConfig
from gpusup.supervisor.probe_link import Fault, ProbeLink
from gpusup.supervisor.probe_wire import DeviceSample

HERE = Path(__file__).parent
GIB = 2**30


def gpu(number: int, **more: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number:08x}-aaaa",
        "bus": f"00000000:{number + 1:02X}:00.0",
        "total": 24 * GIB,
        "free": 20 * GIB,
        "processes": [],
        **more,
    }


class Bench:
    """A link to a real probe process that reads the fake driver; `until` waits for a condition."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples: list[DeviceSample] = []
        self.faults: list[Fault] = []
        self.states: list[str] = []
        self.changed = asyncio.Event()
        self.links: list[ProbeLink] = []

    def world(self, *devices: dict[str, Any], **more: Any) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"devices": devices, **more}))
        new.rename(self.path)

    def link(
        self, call_limit: float = 0.5, devices: DevicesConfig | None = None, library: str = ""
    ) -> ProbeLink:
        library = library or f"{HERE / 'fake_nvml.py'}:Fake"
        config = ProbeConfig(interval=0.02, call_limit=call_limit, library=library)
        link = ProbeLink(config, self._sample, self._fault, self._state, devices=devices)
        self.links.append(link)
        link.start()
        return link

    def _sample(self, sample: DeviceSample) -> None:
        self.samples.append(sample)
        self.changed.set()

    def _fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.changed.set()

    def _state(self, state: str) -> None:
        self.states.append(state)
        self.changed.set()

    async def until(self, condition: Callable[[], bool], limit_s: float = 15) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest_asyncio.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    path = tmp_path / "world.json"
    monkeypatch.setenv("GPUSUP_FAKE_NVML", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bench = Bench(path)
    bench.world(gpu(0), gpu(1))
    yield bench
    for link in bench.links:
        link.stop()
        assert await link.stopped(5)


async def test_devices_are_found_by_uuid_and_then_sampled(bench: Bench) -> None:
    link = bench.link()
    found = await link.discover()
    assert [(d.name, d.uuid) for d in found] == [
        ("gpu0", "GPU-00000000-aaaa"),
        ("gpu1", "GPU-00000001-aaaa"),
    ]
    bench.world(gpu(0, free=5 * GIB), gpu(1))
    await bench.until(lambda: bench.samples[-2:] != [] and bench.samples[-2].free == 5 * GIB)
    latest = link.latest("gpu0")
    assert latest is not None
    assert latest[0].free == 5 * GIB
    assert latest[1] < 5
    assert bench.states == ["starting", "live"]


async def test_an_inherited_choice_is_the_whole_universe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001")
    found = await bench.link().discover()
    assert [d.name for d in found] == ["gpu1"]


async def test_without_nvml_it_says_so_once_and_starts_no_further_probe(bench: Bench) -> None:
    bench.world(absent=True)
    link = bench.link()
    assert await link.discover() == ()
    assert link.state == "absent"
    assert "not found" in link.reason
    assert bench.states == ["starting", "absent"]


async def test_a_library_that_cannot_be_imported_is_named(bench: Bench) -> None:
    link = bench.link(library="no_such_module:Fake")
    assert await link.discover() == ()
    assert "no_such_module:Fake" in link.reason


async def test_a_call_that_hangs_costs_the_probe_and_nothing_else(bench: Bench) -> None:
    link = bench.link(call_limit=0.3)
    await link.discover()
    bench.world(gpu(0), gpu(1, hang="memory v2"))
    await bench.until(lambda: "waiting" in bench.states)
    assert "memory v2 of gpu1" in link.reason
    bench.world(gpu(0), gpu(1))
    await bench.until(lambda: bench.states[-1] == "live")
    assert link.restarts == 1


async def test_a_killed_probe_is_replaced(bench: Bench) -> None:
    link = bench.link()
    await link.discover()
    assert link._current is not None
    os.kill(link._current.pid, signal.SIGKILL)
    await bench.until(lambda: bench.states[-2:] == ["starting", "live"] and link.restarts == 1)


@pytest.mark.parametrize("where", [(socket, "socketpair"), (os, "memfd_create")])
async def test_a_probe_is_tried_again_when_there_are_descriptors_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(*where, none_left)
        link = bench.link()
    assert (link.state, link.reason) == ("waiting", "cannot start the probe: Too many open files")
    await bench.until(lambda: bench.states == ["waiting", "starting", "live"])


async def test_a_stopped_probe_is_replaced(bench: Bench) -> None:
    link = bench.link(call_limit=0.1)
    await link.discover()
    assert link._current is not None
    os.kill(link._current.pid, signal.SIGSTOP)
    await bench.until(lambda: link.restarts == 1 and bench.states[-1] == "live")


async def test_a_driver_that_goes_away_is_found_again_when_it_is_back(bench: Bench) -> None:
    link = bench.link()
    await link.discover()
    bench.world(gpu(0), gpu(1), gone=True)
    await bench.until(lambda: "waiting" in bench.states)
    assert "driver not loaded" in link.reason
    bench.world(gpu(0), gpu(1))
    await bench.until(lambda: bench.states[-1] == "live")


async def test_a_lost_gpu_is_a_fault_once_and_so_is_its_return(bench: Bench) -> None:
    link = bench.link()
    await link.discover()
    bench.world(gpu(0), gpu(1, all_trouble="lost"))
    await bench.until(lambda: bench.faults != [])
    bench.world(gpu(0), gpu(1))
    await bench.until(lambda: len(bench.faults) == 2)
    assert [(f.device, f.verdict) for f in bench.faults] == [("gpu1", "lost"), ("gpu1", "back")]
    assert link.restarts == 0


async def test_a_fault_event_names_the_device_and_what_to_do(bench: Bench) -> None:
    await bench.link().discover()
    bench.world(gpu(0), gpu(1), events=[["GPU-00000001-aaaa", 31]])
    await bench.until(lambda: bench.faults != [])
    fault = bench.faults[0]
    assert (fault.device, fault.verdict, fault.xid) == ("gpu1", "restart", 31)
    assert "memory page fault" in fault.text


async def test_a_failed_row_remap_retires_the_board(bench: Bench) -> None:
    bench.world(gpu(0, remap_failed=True))
    await bench.link().discover()
    assert bench.faults == []  # told after the caller has learned of the devices
    await bench.until(lambda: bench.faults != [])
    assert [(f.device, f.verdict) for f in bench.faults] == [("gpu0", "retire")]


async def test_overrides_lose_a_gpu_on_a_healthy_box(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "overrides.json"
    monkeypatch.setenv("GPUSUP_PROBE_OVERRIDES", str(path))
    await bench.link().discover()
    path.write_text('{"gpu0": {"lost": true}}')
    await bench.until(lambda: bench.faults != [])
    assert (bench.faults[0].device, bench.faults[0].verdict) == ("gpu0", "lost")
    path.write_text('{"gpu1": {"free": "1GiB", "xid": 79}}')
    await bench.until(lambda: any(f.xid == 79 for f in bench.faults))
    await bench.until(lambda: any(s.name == "gpu1" and s.free == GIB for s in bench.samples))


async def test_only_the_devices_in_use_are_read(bench: Bench) -> None:
    found = await bench.link(devices=DevicesConfig(use=("gpu1",))).discover()
    assert [d.name for d in found] == ["gpu1"]

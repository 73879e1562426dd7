"""A door with fake workers behind it, all in one process and on real sockets."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpusup.conf.schema import Config, ServerConfig
from gpusup.proxy.door import Call, Door
from gpusup.proxy.link import Link
from gpusup.proxy.serve import make_door
from gpusup.supervisor import wire as swire
from gpusup.worker import wire

from .fake_worker import FakeWorker


async def until(condition: Callable[[], Any], limit_s: float = 5.0) -> None:
    """Let the loop turn until it holds; fails after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (sockets tell nobody)
            await asyncio.sleep(0.001)


def device(name: str = "GPU-0", *, watermark: float = 0.1, **fields: Any) -> swire.DeviceInfo:
    total = 1000
    return swire.DeviceInfo(**{
        "name": name, "uuid": name, "kind": "cuda", "total": total,
        "free": round(total * (1 - watermark)), "reclaimable": 0, "dynamic": 0,
        "watermark": watermark, "known": True, "age_s": 0.0, **fields,
    })  # fmt: skip


class World:
    """The supervisor's part, and whatever the tests want to know of what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[swire.FromProxy] = []
        self.door: Door
        self.workers: list[FakeWorker] = []
        self.models: dict[str, swire.ModelInfo] = {}
        self.devices = [device()]
        self.states: dict[str, swire.RouteState] = {}
        self.draining = False
        self.poisoned: tuple[str, ...] = ()

    def open(self, config: Config, seed: int = 1) -> None:
        link = Link(lambda message: None, lambda: None)
        link.send = self.told.append  # type: ignore[method-assign, assignment]
        self.door = make_door(config, "proxy0", link, random.Random(seed))

    async def worker(self, **fields: Any) -> FakeWorker:
        worker = FakeWorker(self.folder, **fields)
        await worker.start()
        self.workers.append(worker)
        return worker

    def model(self, name: str = "m", **fields: Any) -> None:
        self.models[name] = swire.ModelInfo(**{
            "name": name, "state": "ready", "reason": "", "version": "1", "versions": ("1",),
            **fields,
        })  # fmt: skip

    async def tell(self, *, connected: bool = True) -> None:
        """Send the proxy a snapshot of this world; wait until it has connected to its workers."""
        if not self.models:
            self.model()
        live = [w for w in self.workers if w.slot not in self.states or self.states[w.slot]]
        self.door.dispatcher.on_snapshot(
            swire.Snapshot(
                serial=1,
                routes=tuple(w.route(self.states.get(w.slot, "open")) for w in live),
                models=tuple(self.models.values()),
                devices=tuple(self.devices),
                ready=True,
                draining=self.draining,
                poisoned=self.poisoned,
            )
        )
        if connected:
            workers = self.door.dispatcher._workers.all()
            await until(lambda: all(w.connected for w in workers))

    def call(self, data: bytes = b"x", **fields: Any) -> Call:
        return Call("m", (wire.Part("body", data),), **fields)

    def ask(self, data: bytes = b"x", **fields: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.door.infer(self.call(data, **fields)))

    def clean(self) -> None:
        """Nothing is held any more: no place in line, lease, block or flight."""
        dispatcher = self.door.dispatcher
        assert dispatcher.in_flight == 0
        assert dispatcher.queued() == {}
        assert dispatcher.flights() == {}
        assert dispatcher.leased() == {}
        assert self.door.arena.free == self.door.arena.total
        assert all(not w.outstanding and not w.in_flight for w in dispatcher._workers.all())

    async def close(self) -> None:
        await self.door.dispatcher.close()
        for worker in self.workers:
            await worker.close()
        # One turn for the sockets to notice.
        await asyncio.sleep(0)
        self.door.arena.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.open(Config(server=ServerConfig(arena=2**20, body_timeout=0.3)))
    yield world
    await world.close()


async def flying(worker: FakeWorker, count: int) -> None:
    """Until so many items are at that worker."""
    await until(lambda: len(worker.items) >= count)


def soon(seconds: float = 0.05) -> float:
    return time.monotonic() + seconds

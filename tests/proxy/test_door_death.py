"""The front door when a worker dies, or can not be spoken to."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest

from gpusup.proxy import upstream
from gpusup.proxy.errors import (
    InputRefused,
    WorkerLost,
)
from gpusup.supervisor import wire as swire
from gpusup.worker import progress, wire

from .conftest import World, flying, until
from .fake_worker import FakeWorker


async def test_a_request_executing_on_a_dead_worker_is_answered_502_and_not_repeated(
    world: World,
) -> None:
    worker = await world.worker(answer=None)
    await world.worker(slot="gpu1")
    world.states["gpu1"] = "suspect"
    await world.tell()
    asked = world.ask(b"deadly")
    await flying(worker, 1)
    worker.executing(worker.items)
    worker.die()
    with pytest.raises(WorkerLost) as caught:
        await asked
    assert caught.value.status == 502
    assert caught.value.all_headers()["x-should-retry"] == "false"
    (died,) = [m for m in world.told if isinstance(m, swire.InputDied)]
    assert died.input_hash == world.call(b"deadly").input_hash(memoryview(b""))
    assert (died.slot, died.generation) == ("gpu0", 1)
    world.clean()


async def test_a_request_that_had_not_begun_is_sent_to_another_worker(world: World) -> None:
    first = await world.worker(answer=None)
    await world.tell()
    doomed = world.ask()
    await flying(first, 1)
    spared = world.ask()
    await flying(first, 2)
    first.executing(first.items[:1])
    await world.worker(slot="gpu1")
    await world.tell()
    first.die()
    assert (await spared).answer.text == "gpu1"
    with pytest.raises(WorkerLost):
        await doomed
    world.clean()


async def test_an_executing_request_is_repeated_where_the_model_says_it_is_safe(
    world: World,
) -> None:
    world.model(retry="safe")
    first = await world.worker(answer=None)
    await world.tell()
    asked = world.ask()
    await flying(first, 1)
    first.executing(first.items)
    await world.worker(slot="gpu1")
    await world.tell()
    first.die()
    assert (await asked).answer.text == "gpu1"
    world.clean()


async def test_the_only_workers_requests_wait_for_its_successor(world: World) -> None:
    first = await world.worker(answer=None)
    await world.tell()
    asked = world.ask()
    await flying(first, 1)
    first.die()
    world.states["gpu0"] = ""  # type: ignore[assignment]
    world.model(state="loading", reason="starting")
    await world.tell()
    assert not asked.done()
    world.workers.clear()
    world.states.clear()
    await world.worker(generation=2)
    world.model()
    await world.tell()
    assert (await asked).answer.text == "gpu0"
    world.clean()


async def test_an_input_that_killed_two_workers_is_refused(world: World) -> None:
    await world.worker()
    world.poisoned = (world.call(b"deadly").input_hash(memoryview(b"")),)
    await world.tell()
    with pytest.raises(InputRefused):
        await world.door.infer(world.call(b"deadly"))
    await world.door.infer(world.call(b"harmless"))
    world.clean()


async def test_late_and_unknown_answers_reach_nobody(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    asked = world.ask()
    await flying(worker, 1)
    (connection,) = worker.connections
    connection.send(wire.Answers([wire.Answer(999, "ok")], worker.load()))
    worker.reply(worker.items[0], text="mine")
    assert (await asked).answer.text == "mine"
    world.clean()


async def test_a_worker_of_another_generation_is_not_spoken_to(world: World) -> None:
    worker = await world.worker(generation=2)
    await world.tell()
    world.door.dispatcher.on_snapshot(
        swire.Snapshot(
            serial=2,
            routes=(swire.Route(**{**_fields(worker.route()), "generation": 3}),),
            models=tuple(world.models.values()), devices=(), ready=True, draining=False,
        )
    )  # fmt: skip
    asked = world.ask(deadline=0.0)
    await until(lambda: any(isinstance(m, swire.Notice) for m in world.told))
    assert not asked.done()
    asked.cancel()


async def test_a_worker_that_fails_again_after_it_answered_is_told_of_again(world: World) -> None:
    def told() -> int:
        return sum(isinstance(m, swire.Notice) for m in world.told)

    worker = FakeWorker(world.folder)
    world.workers.append(worker)
    await world.tell(connected=False)
    await until(lambda: told() == 1)
    await worker.start()
    (place,) = world.door.dispatcher._workers.all()
    await until(lambda: place.connected)
    worker.die()
    await until(lambda: told() == 2)
    first, second = (m for m in world.told if isinstance(m, swire.Notice))
    assert first == second


async def test_a_worker_without_a_progress_page_is_tried_again(world: World) -> None:
    worker = await world.worker()
    page = os.fstat(worker.fd).st_ino

    def held() -> int:
        """Descriptors of this worker's page; others may have ones that nobody has collected yet."""
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found += os.fstat(int(name)).st_ino == page
        return found

    os.ftruncate(worker.fd, 16)
    before = held()
    with pytest.raises(upstream.BrokenWorker, match="progress page"):
        await upstream.greet(worker.route(), "proxy0", -1, 0)
    assert held() == before
    await world.tell(connected=False)
    await until(lambda: any(isinstance(m, swire.Notice) for m in world.told))
    os.ftruncate(worker.fd, progress.SIZE)
    await world.door.infer(world.call())


def _fields(route: swire.Route) -> dict[str, Any]:
    return {name: getattr(route, name) for name in route.__struct_fields__}

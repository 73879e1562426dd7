"""The front door with models that come, go and change, and with streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gpusup.proxy.errors import (
    Draining,
    ModelNotFound,
    NoWorker,
    WorkerLost,
)
from gpusup.supervisor import wire as swire
from gpusup.worker import wire

from .conftest import World, flying, until
from .fake_worker import FakeWorker

# -- models and versions ---------------------------------------------------------------------------


async def test_an_unknown_model_or_version_is_404(world: World) -> None:
    await world.worker()
    await world.tell()
    with pytest.raises(ModelNotFound, match="'x'"):
        world.door.model("x")
    with pytest.raises(ModelNotFound, match="no version '9'; it has 1"):
        world.door.model("m", "9")


async def test_a_swap_holds_the_queue_until_the_new_worker_is_there(world: World) -> None:
    await world.worker()
    await world.tell()
    world.workers[0].die()
    world.workers.clear()
    world.model(state="swapping", holding=True)
    await world.tell()
    asked = world.ask()
    await until(lambda: world.door.dispatcher.queued() == {"m": 1})
    await world.worker(generation=2, version="2")
    world.model(version="2", versions=("2",))
    await world.tell()
    assert (await asked).version == "2"
    world.clean()


async def test_holding_has_a_limit_in_time_and_in_number(world: World) -> None:
    world.model(state="swapping", holding=True, hold_s=0.05, hold_requests=1)
    await world.tell()
    asked = world.ask()
    await until(lambda: world.door.dispatcher.queued() == {"m": 1})
    with pytest.raises(NoWorker, match="1 requests wait"):
        await world.door.infer(world.call())
    with pytest.raises(NoWorker):
        await asked
    world.clean()


async def test_without_a_worker_and_no_hope_it_is_503_with_the_reason(world: World) -> None:
    world.model(state="failed", reason="weights are truncated")
    await world.tell()
    with pytest.raises(NoWorker, match="weights are truncated") as caught:
        await world.door.infer(world.call())
    assert caught.value.retry_after_s is not None


async def test_waiting_requests_end_when_their_model_fails(world: World) -> None:
    world.model(state="swapping", holding=True)
    await world.tell()
    asked = world.ask()
    await until(lambda: world.door.dispatcher.queued() == {"m": 1})
    world.model(state="failed", reason="rolled back in vain")
    await world.tell()
    with pytest.raises(NoWorker, match="in vain"):
        await asked
    world.clean()


async def test_the_first_request_loads_a_model_on_demand_and_waits(world: World) -> None:
    world.model(state="unloaded", on_demand=True)
    await world.tell()
    asks = [world.ask() for _ in range(3)]
    await until(lambda: world.door.dispatcher.queued() == {"m": 3})
    assert [m for m in world.told if isinstance(m, swire.WantModel)] == [swire.WantModel("m")]
    await world.worker()
    world.model()
    await world.tell()
    await asyncio.gather(*asks)
    world.clean()


async def test_a_named_version_is_served_by_that_version_only(world: World) -> None:
    await world.worker(slot="gpu0", version="1")
    await world.worker(slot="gpu1", version="2")
    world.model(version="1", versions=("1", "2"))
    await world.tell()
    assert (await world.door.infer(world.call(version="2"))).version == "2"
    assert (await world.door.infer(world.call())).version == "1"
    world.states["gpu1"] = ""  # type: ignore[assignment]
    await world.tell()
    with pytest.raises(NoWorker):
        await world.door.infer(world.call(version="2"))


async def test_the_canary_gets_its_share_and_a_session_stays_with_its_version(
    world: World,
) -> None:
    await world.worker(slot="gpu0", version="1")
    await world.worker(slot="gpu1", version="2")
    world.model(version="1", versions=("1", "2"), canary_version="2", canary_share=0.25)
    await world.tell()
    outcomes = await asyncio.gather(*(world.ask() for _ in range(200)))
    share = sum(o.version == "2" for o in outcomes) / 200
    assert 0.1 < share < 0.4
    for session in "abcdefgh":
        same = await asyncio.gather(*(world.ask(session=session) for _ in range(5)))
        assert len({o.version for o in same}) == 1


async def test_requests_waiting_for_a_withdrawn_canary_go_to_the_default(world: World) -> None:
    await world.worker(slot="gpu0", version="1")
    canary = await world.worker(slot="gpu1", version="2", rows=1, answer=None)
    world.model(version="1", versions=("1", "2"), canary_version="2", canary_share=1.0)
    await world.tell()
    first, second = world.ask(), world.ask()
    await flying(canary, 1)
    world.model()
    world.states["gpu1"] = ""  # type: ignore[assignment]
    await world.tell()
    assert (await second).version == "1"
    canary.reply(canary.items[0])
    assert (await first).version == "2"
    world.clean()


async def test_who_went_to_the_default_stands_in_no_other_line_any_more(world: World) -> None:
    """It was sent to the next canary all the same, and who came behind it there was forgotten."""
    default = await world.worker(slot="gpu0", version="1", rows=1, answer=None)
    canary = await world.worker(slot="gpu1", version="2", rows=1, answer=None)
    world.model(version="1", versions=("1", "2"), canary_version="2", canary_share=1.0)
    await world.tell()
    full = [world.ask(version="1"), world.ask(version="2")]
    await flying(default, 1)
    await flying(canary, 1)
    named, moved = world.ask(version="2"), world.ask()
    await until(lambda: world.door.dispatcher.queued() == {"m": 2})
    world.model(version="1", versions=("1", "2"))
    world.states["gpu1"] = ""  # type: ignore[assignment]
    await world.tell()
    another = await world.worker(slot="gpu2", version="2", rows=1, answer=None)
    await world.tell()
    await flying(another, 1)
    behind = world.ask(version="2")
    await until(lambda: world.door.dispatcher.queued() == {"m": 2})
    another.reply(another.items[0])
    assert (await named).version == "2"
    await flying(another, 1)
    another.reply(another.items[0])
    async with asyncio.timeout(5):
        assert (await behind).version == "2"
    default.reply(default.items[0])
    await flying(default, 1)
    default.reply(default.items[0])
    assert (await moved).version == "1"
    canary.reply(canary.items[0])
    await asyncio.gather(*full)
    world.clean()


async def test_a_draining_server_finishes_what_it_has_and_refuses_the_rest(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    running = world.ask()
    await flying(worker, 1)
    world.draining = True
    await world.tell()
    with pytest.raises(Draining):
        await world.door.infer(world.call())
    worker.reply(worker.items[0])
    await running
    world.clean()


async def test_urgent_requests_go_first(world: World) -> None:
    worker = await world.worker(rows=1, answer=None)
    await world.tell()
    asks = [world.ask(b"running")]
    await flying(worker, 1)
    asks += [world.ask(b"late", priority=5), world.ask(b"usual"), world.ask(b"urgent", priority=1)]
    await until(lambda: world.door.dispatcher.queued() == {"m": 3})
    order = []
    for _ in range(4):
        await flying(worker, 1)
        order.append(worker.data(worker.items[0].parts[0]))
        worker.reply(worker.items[0])
    await asyncio.gather(*asks)
    assert order == [b"running", b"urgent", b"usual", b"late"]


# -- streams ---------------------------------------------------------------------------------------


async def test_a_stream_gives_its_answers_in_order_and_is_paid_with_credit(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    call = world.call(method="generate")
    stream = world.door.stream(call)
    first = asyncio.create_task(anext(stream))
    await flying(worker, 1)
    item = worker.items[0]
    assert item.stream
    assert item.credit > 0
    for number in range(10):
        worker.reply(item, text=str(number), more=True)
    got = [await first] + [await anext(stream) for _ in range(9)]
    await until(lambda: worker.credits)
    worker.reply(item, text="end")
    got += [answer async for answer in stream]
    assert [a.text for a in got] == [*map(str, range(10)), "end"]
    assert call.served_version == "1"
    world.clean()


async def begun(world: World, worker: FakeWorker) -> AsyncGenerator[wire.Answer, None]:
    """A stream that has brought its first piece."""
    stream = world.door.stream(world.call(method="generate"))
    first = asyncio.create_task(anext(stream))
    await flying(worker, 1)
    worker.reply(worker.items[0], text="a", more=True)
    assert (await first).text == "a"
    return stream


async def test_a_stream_whose_worker_dies_midway_ends_with_an_error(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    stream = await begun(world, worker)
    worker.die()
    with pytest.raises(WorkerLost):
        await anext(stream)
    world.clean()


async def test_closing_a_stream_cancels_it_at_the_worker(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    stream = await begun(world, worker)
    await stream.aclose()
    await until(lambda: worker.cancelled == [1])
    worker.reply(worker.items[0], status="cancelled")
    await until(lambda: world.door.dispatcher.in_flight == 0)
    world.clean()

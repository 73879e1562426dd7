"""The front door with fake workers: who is answered, and what is left when somebody is not."""

from __future__ import annotations

import asyncio

import pytest

from gpusup.proxy import upstream
from gpusup.proxy.errors import (
    DeadlineExceeded,
    InputTooLarge,
    InvalidInput,
    OutOfMemory,
    ProxyError,
    WorkerLost,
)
from gpusup.worker import wire
from gpusup.worker.frame import MAX_FRAME_BYTES

from .conftest import World, flying, soon, until


async def test_a_request_is_answered_by_the_worker(world: World) -> None:
    await world.worker()
    await world.tell()
    outcome = await world.door.infer(world.call(b"hello"))
    assert outcome.answer.parts[0].data == b"hello"
    assert (outcome.version, outcome.answer.text) == ("1", "gpu0")
    assert outcome.headers() == {"Gpusup-Model-Version": "1"}
    world.clean()


async def test_requests_of_one_turn_go_in_one_frame(world: World) -> None:
    worker = await world.worker()
    await world.tell()
    await asyncio.gather(*(world.ask() for _ in range(20)))
    assert worker.frames == 1


class Ends:
    """Who waits for an answer without a task."""

    def __init__(self) -> None:
        self.answers: list[wire.Answer] = []

    def answered(self, answer: wire.Answer) -> None:
        self.answers.append(answer)

    def failed(self, error: ProxyError) -> None:
        raise error


async def test_a_lone_request_goes_at_once_and_a_second_one_with_those_of_its_turn(
    world: World,
) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    dispatcher = world.door.dispatcher
    ends = Ends()
    dispatcher.begin(world.call(), ends)
    dispatcher.hurry()
    assert dispatcher.flights() == {"gpu0": 1}
    for _ in range(2):
        dispatcher.begin(world.call(), ends)
        dispatcher.hurry()
    assert dispatcher.flights() == {"gpu0": 1}
    await flying(worker, 3)
    assert worker.frames == 2
    for item in list(worker.items):
        worker.reply(item)
    await until(lambda: len(ends.answers) == 3)
    # The first of those who come back is not alone, although nobody else is here yet.
    dispatcher.begin(world.call(), ends)
    dispatcher.hurry()
    assert dispatcher.flights() == {}
    await flying(worker, 1)
    worker.reply(worker.items[0])
    await until(lambda: len(ends.answers) == 4)
    world.clean()


async def test_a_worker_gets_no_more_rows_than_it_has_room_for(world: World) -> None:
    worker = await world.worker(rows=4, answer=None)
    await world.tell()
    asks = [world.ask(rows=2) for _ in range(4)]
    await flying(worker, 2)
    assert world.door.dispatcher.queued() == {"m": 2}
    for _ in range(4):
        await flying(worker, 1)
        worker.reply(worker.items[0])
    await asyncio.gather(*asks)
    world.clean()


async def test_one_larger_than_all_room_goes_to_an_idle_worker(world: World) -> None:
    await world.worker(rows=4)
    await world.tell()
    await world.door.infer(world.call(rows=9))
    world.clean()


async def test_the_worker_with_less_to_do_is_chosen(world: World) -> None:
    first = await world.worker(slot="gpu0", answer=None)
    second = await world.worker(slot="gpu1", answer=None)
    await world.tell()
    asks = [world.ask() for _ in range(10)]
    await until(lambda: len(first.items) + len(second.items) == 10)
    assert len(first.items) == len(second.items) == 5
    for worker in (first, second):
        for item in list(worker.items):
            worker.reply(item)
    await asyncio.gather(*asks)


async def test_what_a_worker_is_too_busy_for_goes_to_another(world: World) -> None:
    first = await world.worker(slot="gpu0", answer=None)
    await world.tell()
    asked = world.ask()
    await flying(first, 1)
    await world.worker(slot="gpu1")
    await world.tell()
    first.rows = 0
    first.busy(first.items[0])
    assert (await asked).answer.text == "gpu1"
    world.clean()


async def test_the_only_worker_is_asked_again_after_busy(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    asked = world.ask()
    await flying(worker, 1)
    worker.busy(worker.items[0])
    await flying(worker, 1)
    worker.reply(worker.items[0])
    await asked
    world.clean()


async def test_what_a_draining_worker_returns_goes_to_another(world: World) -> None:
    first = await world.worker(slot="gpu0", answer=None)
    await world.tell()
    asked = world.ask()
    await flying(first, 1)
    await world.worker(slot="gpu1")
    await world.tell()
    first.reply(first.items[0], status="draining", started=False)
    assert (await asked).answer.text == "gpu1"


# -- what no frame has room for --------------------------------------------------------------------


async def test_a_request_over_the_limit_of_a_frame_is_413_and_harms_nobody(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    before = set(worker.connections)
    params = {"x": "y" * MAX_FRAME_BYTES}
    running = world.ask(b"running")
    await flying(worker, 1)
    others = [world.ask(b"first"), world.ask(params=params), world.ask(b"last")]
    await flying(worker, 3)
    with pytest.raises(InputTooLarge, match=f"{MAX_FRAME_BYTES} are allowed") as caught:
        await others.pop(1)
    assert caught.value.status == 413
    with pytest.raises(InputTooLarge):
        await anext(world.door.stream(world.call(method="generate", params=params)))
    assert [worker.data(item.parts[0]) for item in worker.items] == [b"running", b"first", b"last"]
    for item in list(worker.items):
        worker.reply(item)
    await asyncio.gather(running, *others)
    assert worker.connections == before
    world.clean()


async def test_one_too_large_whose_client_leaves_at_once_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_FRAME_BYTES", 1000)
    await world.worker()
    await world.tell()
    asked = world.ask(params={"x": "y" * 1000})
    dispatcher = world.door.dispatcher
    while not dispatcher.flights():  # noqa: ASYNC110 (it is refused in the very next turn)
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: not dispatcher.in_flight)
    await world.door.infer(world.call())
    world.clean()


async def test_what_is_too_much_for_one_frame_goes_in_several(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_FRAME_BYTES", 1000)
    worker = await world.worker()
    await world.tell()
    await asyncio.gather(*(world.ask(params={"x": "y" * 600}) for _ in range(5)))
    assert worker.frames == 5
    world.clean()


# -- time, and clients that leave ------------------------------------------------------------------


async def test_a_deadline_in_the_queue_is_504(world: World) -> None:
    worker = await world.worker(rows=1, answer=None)
    await world.tell()
    running = world.ask()
    await flying(worker, 1)
    with pytest.raises(DeadlineExceeded, match="in the queue"):
        await world.door.infer(world.call(deadline=soon()))
    worker.reply(worker.items[0])
    await running
    world.clean()


async def test_a_deadline_at_the_worker_is_504_and_cancels(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    with pytest.raises(DeadlineExceeded, match="at a worker"):
        await world.door.infer(world.call(deadline=soon()))
    await until(lambda: worker.cancelled == [1])
    worker.reply(worker.items[0], status="cancelled")
    await until(lambda: world.door.dispatcher.in_flight == 0)
    world.clean()


async def test_a_queued_request_whose_client_leaves_is_never_sent(world: World) -> None:
    worker = await world.worker(rows=1, answer=None)
    await world.tell()
    running = world.ask()
    await flying(worker, 1)
    leaving = world.ask(b"leaving")
    await until(lambda: world.door.dispatcher.queued() == {"m": 1})
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    worker.reply(worker.items[0])
    await running
    assert not worker.items
    world.clean()


async def test_a_sent_request_whose_client_leaves_is_cancelled_there(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    leaving = world.ask()
    await flying(worker, 1)
    leaving.cancel()
    await until(lambda: worker.cancelled == [1])
    assert world.door.dispatcher.flights() == {"gpu0": 1}
    worker.reply(worker.items[0], status="cancelled")
    await until(lambda: world.door.dispatcher.flights() == {})
    world.clean()


@pytest.mark.parametrize(
    ("status", "error"),
    [("invalid", InvalidInput), ("oom", OutOfMemory), ("expired", DeadlineExceeded)],
)
async def test_a_workers_refusal_has_its_own_status(
    world: World, status: wire.Status, error: type[Exception]
) -> None:
    await world.worker(answer=lambda item: wire.Answer(item.id, status, text="because"))
    await world.tell()
    with pytest.raises(error, match="because"):
        await world.door.infer(world.call())


# -- the arena -------------------------------------------------------------------------------------

BULK = b"b" * 100_000


async def test_bulk_travels_in_the_arena_and_comes_back(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    asked = world.ask(BULK)
    await flying(worker, 1)
    assert isinstance(worker.items[0].parts[0].data, wire.Block)
    assert worker.data(worker.items[0].parts[0]) == BULK
    worker.reply(worker.items[0])
    await asked
    world.clean()


async def test_a_block_stays_leased_until_the_worker_is_through_though_its_client_left(
    world: World,
) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    asked = world.ask(BULK)
    await flying(worker, 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert world.door.arena.free < world.door.arena.total
    worker.reply(worker.items[0], status="cancelled")
    await until(lambda: world.door.arena.free == world.door.arena.total)
    world.clean()


@pytest.mark.parametrize("executing", [True, False])
async def test_a_block_comes_back_when_its_worker_dies(world: World, executing: bool) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    asked = world.ask(BULK, deadline=soon(0.2))
    await flying(worker, 1)
    if executing:
        worker.executing(worker.items)
    worker.die()
    result = (await asyncio.gather(asked, return_exceptions=True))[0]
    assert isinstance(result, WorkerLost if executing else DeadlineExceeded)
    world.clean()


async def test_a_block_comes_back_from_the_queue(world: World) -> None:
    worker = await world.worker(rows=1, answer=None)
    await world.tell()
    running = world.ask()
    await flying(worker, 1)
    with pytest.raises(DeadlineExceeded):
        await world.door.infer(world.call(BULK, deadline=soon()))
    assert world.door.arena.free == world.door.arena.total
    worker.reply(worker.items[0])
    await running
    world.clean()

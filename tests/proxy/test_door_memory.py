"""The front door and device memory: bands, leases, the degrade ladder."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpusup.proxy.errors import (
    DeadlineExceeded,
    QueueFull,
    ShedLoad,
)
from gpusup.supervisor import wire as swire
from gpusup.worker import wire

from .conftest import World, device, flying, soon, until


def zeros(count: int) -> wire.Part:
    return wire.Part("x", bytes(4 * count), "FP32", (1, count))


async def test_in_the_queue_band_a_worker_gets_one_at_a_time_and_the_rest_waits(
    world: World,
) -> None:
    worker = await world.worker(answer=None)
    world.devices = [device(watermark=0.87)]
    await world.tell()
    asks = [world.ask() for _ in range(6)]
    await flying(worker, 1)
    assert world.door.dispatcher.queued() == {"m": 5}
    with pytest.raises(QueueFull) as caught:
        await world.door.infer(world.call())
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    world.devices = [device(watermark=0.5)]
    world.door.dispatcher.on_devices(swire.DeviceUpdate(tuple(world.devices)))
    await flying(worker, 6)
    for item in list(worker.items):
        worker.reply(item)
    await asyncio.gather(*asks)
    world.clean()


async def test_in_the_shed_band_a_request_is_refused_with_the_use_in_the_body(
    world: World,
) -> None:
    await world.worker()
    world.devices = [device(watermark=0.95)]
    await world.tell()
    with pytest.raises(ShedLoad) as caught:
        await world.door.infer(world.call(request_id="r1"))
    error = caught.value
    assert (error.status, error.code) == (503, "SHED")
    assert error.extra["watermark"] == 0.95
    assert error.extra["total_bytes"] == 1000
    assert error.extra["free_bytes"] == 50
    sheds = [m for m in world.told if isinstance(m, swire.Shed)]
    assert [(s.before, s.after, s.request_id) for s in sheds] == [
        ("normal", "shed", ""),
        ("shed", "shed", "r1"),
    ]
    world.clean()


async def test_a_requests_cost_decides_its_band_and_is_leased_while_it_runs(world: World) -> None:
    world.model(peaks={"4/fp32/1": 500, "8/fp32/1": 850})
    worker = await world.worker(answer=None)
    await world.tell()
    call = world.call()
    call.parts = (zeros(4),)
    first = asyncio.create_task(world.door.infer(call))
    await flying(worker, 1)
    assert world.door.dispatcher.leased() == {"GPU-0": 500}
    second = world.call()
    second.parts = (zeros(8),)
    with pytest.raises(ShedLoad):  # 0.1 + 0.85: too much also when the first is done
        await world.door.infer(second)
    worker.reply(worker.items[0])
    await first
    world.clean()


async def test_an_unknown_device_is_admitted_by_rows_alone(world: World) -> None:
    world.model(peaks={"4/fp32/1": 5000})
    await world.worker()
    world.devices = [device(watermark=0.99, known=False)]
    await world.tell()
    await world.door.infer(world.call())
    world.clean()


async def test_a_shed_request_goes_down_the_ladder_within_its_limit(world: World) -> None:
    world.model(degrade=(("lower_precision", 1), ("cpu_fallback", 1)))
    gpu = await world.worker(answer=None, degrade=("lower_precision",))
    cpu = await world.worker(slot="cpu0", device="cpu", fallback=True, answer=None)
    world.devices = [device(watermark=0.95), device("cpu")]
    await world.tell()
    first = world.ask()
    await flying(gpu, 1)
    assert gpu.items[0].degrade == "lower_precision"
    second = world.ask()
    await flying(cpu, 1)
    with pytest.raises(ShedLoad):
        await world.door.infer(world.call())
    gpu.reply(gpu.items[0], degraded="lower_precision")
    assert (await first).headers()["Gpusup-Degraded"] == "lower_precision"
    cpu.reply(cpu.items[0], degraded="cpu_fallback")
    assert (await second).headers()["Gpusup-Degraded"] == "cpu_fallback"
    third = world.ask()
    await flying(gpu, 1)
    gpu.reply(gpu.items[0])
    await third
    world.clean()


async def test_a_degraded_request_that_ends_in_the_queue_gives_its_place_back(
    world: World,
) -> None:
    world.model(degrade=(("lower_precision", 1),))
    worker = await world.worker(answer=None, degrade=("lower_precision",))
    world.devices = [device(watermark=0.95)]
    await world.tell()
    first = world.ask(deadline=soon(0.3))
    await flying(worker, 1)
    worker.rows = 0
    worker.busy(worker.items[0])
    with pytest.raises(DeadlineExceeded, match="in the queue"):
        await first
    worker.rows = 64
    (connection,) = worker.connections
    connection.send(wire.Answers([], worker.load()))
    await until(lambda: world.door.dispatcher._workers.all()[0].allowance)
    second = world.ask()
    await flying(worker, 1)
    assert worker.items[0].degrade == "lower_precision"
    worker.reply(worker.items[0])
    await second
    world.clean()


async def test_a_degraded_request_that_is_back_in_line_stays_what_it_is(world: World) -> None:
    world.model(degrade=(("lower_precision", 2),))
    worker = await world.worker(answer=None, degrade=("lower_precision",))
    world.devices = [device(watermark=0.95)]
    await world.tell()
    asked = world.ask()
    await flying(worker, 1)
    worker.rows = 0
    worker.busy(worker.items[0])
    dispatcher = world.door.dispatcher
    await until(lambda: dispatcher.queued() == {"m": 1})
    (lane,) = dispatcher._active
    dispatcher._spill(lane, time.monotonic())
    assert dispatcher.queued() == {"m": 1}
    assert lane.served.degraded == {"lower_precision": 1}
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert lane.served.degraded == {"lower_precision": 0}
    world.clean()


async def test_what_waits_when_its_device_sheds_steps_down_or_is_refused(world: World) -> None:
    world.model(degrade=(("cpu_fallback", 1),))
    gpu = await world.worker(rows=1, answer=None)
    cpu = await world.worker(slot="cpu0", device="cpu", fallback=True, answer=None)
    world.devices = [device(), device("cpu")]
    await world.tell()
    first = world.ask()
    await flying(gpu, 1)
    second, third = world.ask(), world.ask()
    await until(lambda: world.door.dispatcher.queued() == {"m": 2})
    world.devices = [device(watermark=0.95), device("cpu")]
    await world.tell()
    # What computes there may make room by its end, so they wait for that.
    assert world.door.dispatcher.queued() == {"m": 2}
    gpu.reply(gpu.items[0])
    await first
    await flying(cpu, 1)
    assert cpu.items[0].degrade == "cpu_fallback"
    with pytest.raises(ShedLoad):
        await third
    cpu.reply(cpu.items[0], degraded="cpu_fallback")
    assert (await second).headers()["Gpusup-Degraded"] == "cpu_fallback"
    assert not gpu.items
    world.clean()


async def test_what_has_not_begun_at_a_suspect_worker_goes_to_another(world: World) -> None:
    first = await world.worker(slot="gpu0", answer=None)
    await world.tell()
    stuck, waits = world.ask(b"stuck"), world.ask(b"waits")
    await flying(first, 2)
    first.executing([first.items[0]])
    second = await world.worker(slot="gpu1")
    world.states["gpu0"] = "suspect"
    await world.tell()
    await until(lambda: first.recalled)
    assert first.recalled == [first.items[1].id]
    first.reply(first.items[1], status="cancelled", started=False)
    assert (await waits).answer.text == "gpu1"
    assert second.frames == 1
    first.reply(first.items[0])
    assert (await stuck).answer.text == "gpu0"
    world.clean()


async def test_nothing_is_asked_back_where_nobody_else_could_take_it(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    asked = world.ask()
    await flying(worker, 1)
    worker.executing([])
    world.states["gpu0"] = "suspect"
    await world.tell()
    worker.reply(worker.items[0])
    await asked
    assert not worker.recalled
    world.clean()


async def test_undegraded_requests_do_not_go_to_the_fallback_slot(world: World) -> None:
    gpu = await world.worker(rows=1, answer=None)
    cpu = await world.worker(slot="cpu0", device="cpu", fallback=True)
    await world.tell()
    first, second = world.ask(), world.ask()
    await flying(gpu, 1)
    gpu.reply(gpu.items[0])
    await flying(gpu, 1)
    gpu.reply(gpu.items[0])
    await asyncio.gather(first, second)
    assert cpu.frames == 0


async def test_a_queue_without_end_is_refused(world: World) -> None:
    worker = await world.worker(rows=1, answer=None)
    await world.tell()
    asks = [world.ask() for _ in range(1 + 256)]
    await until(lambda: world.door.dispatcher.queued() == {"m": 256})
    with pytest.raises(QueueFull):
        await world.door.infer(world.call())
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    assert len(worker.items) == 1


async def test_what_fits_as_soon_as_our_own_work_is_done_waits_instead_of_being_shed(
    world: World,
) -> None:
    world.model(peaks={"4/fp32/1": 700})  # 0.1 + 0.7, but twice that while the first one runs
    worker = await world.worker(answer=None)
    await world.tell()
    calls = []
    for _ in range(2):
        call = world.call()
        call.parts = (zeros(4),)
        calls.append(asyncio.create_task(world.door.infer(call)))
        await flying(worker, 1)
    assert not any(task.done() for task in calls)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_what_was_let_wait_is_shed_when_nothing_is_left_to_wait_for(world: World) -> None:
    """The device is calm by itself; only this request would be too much, now and later."""
    world.model(peaks={"4/fp32/1": 500, "8/fp32/1": 700})
    worker = await world.worker(answer=None)
    await world.tell()
    first = world.call()
    first.parts = (zeros(4),)
    running = asyncio.create_task(world.door.infer(first))
    await flying(worker, 1)
    second = world.call()
    second.parts = (zeros(8),)
    waiting = asyncio.create_task(world.door.infer(second))
    await asyncio.sleep(0)
    # Meanwhile somebody else has taken memory for good.
    world.devices = [device(watermark=0.4, reclaimable=200)]
    await world.tell()
    worker.reply(worker.items[0])
    await running
    async with asyncio.timeout(10):
        while not waiting.done():
            await world.tell()
            await asyncio.wait((waiting,), timeout=0.05)
    with pytest.raises(ShedLoad):
        await waiting
    world.clean()

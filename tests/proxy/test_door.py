"""The front door with fake workers: who is answered, and what is left when somebody is not."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpusup.proxy import upstream
from gpusup.proxy.errors import (
    DeadlineExceeded,
    Draining,
    InputRefused,
    InputTooLarge,
    InvalidInput,
    ModelNotFound,
    NoWorker,
    OutOfMemory,
    QueueFull,
    ShedLoad,
    WorkerLost,
)
from gpusup.supervisor import wire as swire
from gpusup.worker import progress, wire
from gpusup.worker.frame import MAX_FRAME_BYTES

from .conftest import World, device, until
from .fake_worker import FakeWorker


async def flying(worker: FakeWorker, count: int) -> None:
    await until(lambda: len(worker.items) >= count)


def zeros(count: int) -> wire.Part:
    return wire.Part("x", bytes(4 * count), "FP32", (1, count))


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


# -- death -----------------------------------------------------------------------------------------


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
    def held() -> int:
        fds = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum("gpusup-progress-gpu0" in os.readlink(fd) for fd in fds if fd.is_symlink())

    worker = await world.worker()
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


def soon(seconds: float = 0.05) -> float:
    return time.monotonic() + seconds


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


# -- memory ----------------------------------------------------------------------------------------


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


async def test_a_stream_whose_worker_dies_midway_ends_with_an_error(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    stream = world.door.stream(world.call(method="generate"))
    first = asyncio.create_task(anext(stream))
    await flying(worker, 1)
    worker.reply(worker.items[0], text="a", more=True)
    assert (await first).text == "a"
    worker.die()
    with pytest.raises(WorkerLost):
        await anext(stream)
    world.clean()


async def test_closing_a_stream_cancels_it_at_the_worker(world: World) -> None:
    worker = await world.worker(answer=None)
    await world.tell()
    stream = world.door.stream(world.call(method="generate"))
    first = asyncio.create_task(anext(stream))
    await flying(worker, 1)
    worker.reply(worker.items[0], text="a", more=True)
    await first
    await stream.aclose()
    await until(lambda: worker.cancelled == [1])
    worker.reply(worker.items[0], status="cancelled")
    await until(lambda: world.door.dispatcher.in_flight == 0)
    world.clean()


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

"""What a GPU's trouble does to its slots, and to nobody else."""

from __future__ import annotations

import pytest

from gpusup.supervisor import events as ev
from gpusup.supervisor import view
from gpusup.supervisor.slot import Standing
from gpusup.supervisor.xid import Verdict, judge

from .world import World, box


def up(world: World) -> World:
    world.until(world.all_ready)
    return world


def fault(world: World, action: Verdict, text: str, xid: int = 0) -> None:
    world.post(ev.DeviceFaulted(device="gpu0", action=action, text=text, xid=xid))


def test_a_fault_that_only_the_process_pays_for_is_not_charged_to_the_model() -> None:
    world = up(box(2))
    for _ in range(8):
        fault(world, "restart", "Xid 31: GPU memory page fault", 31)
        up(world)
    slot = world.fleet.slots["gpu0"]
    assert (slot.failed, slot.standing) == ("", Standing.SCHEDULABLE)
    assert slot.last_exit == "Xid 31: GPU memory page fault"
    assert world.life("gpu0").generation == 9
    assert world.life("gpu1").generation == 1


@pytest.mark.parametrize("action", ["reset", "node", "retire"])
def test_a_fault_that_needs_somebody_quarantines_with_its_sentence(action: Verdict) -> None:
    world = up(box(2))
    fault(world, action, f"Xid 119: {action}", 119)
    world.run(5)
    slot = world.fleet.slots["gpu0"]
    assert (slot.standing, slot.standing_why) == (Standing.QUARANTINED, f"Xid 119: {action}")
    assert world.fleet.devices["gpu0"].fault == f"Xid 119: {action}"
    assert world.serving("m") == ["1"]


def test_with_every_gpu_lost_the_reason_is_told_and_service_comes_back_by_itself() -> None:
    world = up(box(1))
    fault(world, "lost", "gpu0 has fallen off the bus")
    world.run(5)
    assert view.model_state(world.fleet, "m", world.now) == (
        "failed",
        "gpu0 is lost (gpu0 has fallen off the bus)",
    )
    assert view.readiness(world.fleet, world.now)[0] is False
    fault(world, "back", "seen again")
    up(world)


def test_a_driver_that_is_gone_is_waited_for_and_nobody_is_blamed() -> None:
    world = up(box(2))
    world.post(ev.DriverSeen(gone="driver/library version mismatch"))
    world.run(5)
    assert len(world.alive("gpu0") + world.alive("gpu1")) == 2  # what runs may well go on
    for slot in ("gpu0", "gpu1"):
        world.die(slot, 1, 70)
    world.run(60)
    assert world.state("gpu0") == "waiting"
    state, reason = view.model_state(world.fleet, "m", world.now)
    assert (state, "waits for the GPU driver: driver/library version" in reason) == (
        "loading",
        True,
    )
    assert not view.model_info(world.fleet, "m", world.now).holding
    assert len(world.workers) == 2
    world.post(ev.DriverSeen())
    up(world)
    assert world.fleet.slots["gpu0"].backoff.strikes == 0
    assert [t.text for t in world.told if "driver" in t.text] == [
        "the GPU driver is gone: driver/library version mismatch",
        "the GPU driver is back",
    ]


def test_unknown_memory_is_neither_free_nor_full() -> None:
    world = up(box(1))
    world.post(ev.DeviceSampled(device="gpu0", total=0, used=0, ours=0, known=False))
    assert world.fleet.books.room("gpu0") is None
    assert world.life("gpu0").state == "ready"
    world.die("gpu0", 1)
    assert world.state("gpu0") == "spawned"  # not known is no reason not to start


@pytest.mark.parametrize(
    ("xid", "action", "verdict"),
    [
        (31, None, "restart"),
        (31, 1, "reset"),  # the driver knows better than the table
        (79, None, "node"),
        (119, None, "reset"),
        (119, 0, "restart"),
        (64, None, "retire"),
        (63, None, "none"),
    ],
)
def test_the_drivers_word_goes_before_the_table(
    xid: int, action: int | None, verdict: Verdict
) -> None:
    assert judge(xid=xid, action=action).verdict == verdict

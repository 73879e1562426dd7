"""Decisions across slots: giving up, devices at fault, room, on-demand models, the random walk."""

from __future__ import annotations

import random

import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import events as ev
from gpusup.supervisor import verbs
from gpusup.supervisor.change import Change
from gpusup.supervisor.fleet import Refused
from gpusup.supervisor.life import OCCUPYING, State
from gpusup.supervisor.slot import Standing
from gpusup.supervisor.verbs import ReloadWish

from .world import GIB, World, box


def up(world: World) -> World:
    world.until(world.all_ready)
    return world


def crash(world: World, slot: str) -> None:
    world.die(slot, world.life(slot).generation, -11)


def test_a_killed_worker_is_started_again_at_once() -> None:
    world = up(box(1))
    crash(world, "gpu0")
    assert world.state("gpu0") == "spawned"


def test_crashes_in_a_row_wait_longer_and_longer_and_end_in_failed() -> None:
    world = box(1, behave=lambda launch: "crash")
    world.until(lambda: world.state("gpu0") == "failed", 60)
    assert len(world.workers) == world.config.supervision.backoff.crashes
    world.run(100, step=0.5)
    assert len(world.workers) == 5
    assert "5 failures" in world.fleet.slots["gpu0"].failed


def test_a_model_that_cannot_work_as_configured_is_not_tried_twice() -> None:
    world = box(1, behave=lambda launch: "config")
    world.run(30)
    assert (len(world.workers), world.state("gpu0")) == (1, "failed")


def test_out_of_memory_in_load_is_tried_once_more() -> None:
    world = box(1, behave=lambda launch: "oom")
    world.run(30)
    assert (len(world.workers), world.state("gpu0")) == (2, "failed")


def test_reset_failed_tries_again() -> None:
    world = box(1, behave=lambda launch: "config")
    world.run(1)
    world.behave = lambda launch: "good"
    world.verb(verbs.reset_failed, "gpu0", world.now)
    up(world)


def test_a_model_that_dies_on_two_devices_is_given_up_as_a_model() -> None:
    world = box(3, behave=lambda launch: "crash" if launch.slot != "gpu2" else "good")
    world.until(lambda: world.state("gpu0") == world.state("gpu1") == "failed", 100)
    assert "gpu0 and gpu1" in world.fleet.models["m"].failed
    assert world.serving("m") == ["1"]


def test_several_models_that_die_on_one_device_put_the_device_in_quarantine() -> None:
    models = {"a": ModelConfig(handler="x:Y"), "b": ModelConfig(handler="x:Y")}
    bad = lambda launch: "crash" if launch.device == "gpu0" else "good"  # noqa: E731
    world = box(2, models=models, behave=bad)
    world.until(lambda: world.fleet.slots["gpu0.0"].standing is Standing.QUARANTINED, 100)
    assert not world.fleet.models["a"].failed
    assert world.serving("a") == world.serving("b") == ["1"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_device_on_which_another_model_serves_is_not_to_blame(kind: str) -> None:
    models = {name: ModelConfig(handler="x:Y") for name in "abc"}
    bad = lambda launch: "good" if launch.assignment.model == "c" else "crash"  # noqa: E731
    world = box(1, kind=kind, models=models, behave=bad)
    slots = list(world.fleet.slots)
    world.until(lambda: [world.state(s) for s in slots] == ["failed", "failed", "ready"], 100)
    assert {s.standing for s in world.fleet.slots.values()} == {Standing.SCHEDULABLE}


def test_no_second_worker_starts_on_memory_that_is_not_back() -> None:
    world = up(box(1, memory_returns=False))
    crash(world, "gpu0")
    at = {"slot": "gpu0", "generation": 1}
    world.post(ev.MemoryReturned(**at, holders="pid 77 holds 9 bytes"))  # type: ignore[arg-type]
    world.run(20)
    assert world.state("gpu0") == "reclaiming"
    assert world.life("gpu0").holders == "pid 77 holds 9 bytes"
    world.memory_returns = True
    world.post(ev.MemoryReturned(**at))  # type: ignore[arg-type]
    up(world)


def test_an_unkillable_worker_quarantines_its_slot_and_the_rest_serves() -> None:
    world = up(box(2, kill_works=False))
    world.workers["gpu0", 1].batch_started = world.now
    world.run(40)
    assert world.state("gpu0") == "unkillable"
    assert world.fleet.slots["gpu0"].standing is Standing.QUARANTINED
    assert world.serving("m") == ["1"]
    with pytest.raises(Refused):
        world.verb(verbs.uncordon, "gpu0", world.now)


def test_a_lost_device_is_out_and_returns_by_itself() -> None:
    world = up(box(2))
    world.post(ev.DeviceFaulted(device="gpu1", action="lost", text="gpu1 has fallen off the bus"))
    world.run(1)
    assert world.fleet.slots["gpu1"].standing is Standing.LOST
    assert world.serving("m") == ["1"]
    world.post(ev.DeviceFaulted(device="gpu1", action="back", text="seen again"))
    up(world)


def test_a_fault_that_needs_a_reset_is_charged_to_the_slot_not_the_model() -> None:
    world = up(box(2))
    world.post(ev.DeviceFaulted(device="gpu0", action="reset", text="Xid 119", xid=119))
    world.run(5)
    slot = world.fleet.slots["gpu0"]
    assert (slot.standing, slot.failed) == (Standing.QUARANTINED, "")
    assert not world.alive("gpu0")
    assert not world.fleet.models["m"].failed


def test_the_supervisors_pause_kills_nobody() -> None:
    world = up(box(2))
    world.step(600)
    world.run(5)
    assert len(world.workers) == 2


def test_a_worker_that_does_not_fit_waits_and_says_for_what() -> None:
    world = box(1, gib=4, static=6 * GIB)
    world.run(2)
    assert world.state("gpu0") == "waiting"
    assert str(6 * GIB) in world.fleet.slots["gpu0"].waiting_for


def on_demand(idle: float = 0.0) -> ModelConfig:
    return ModelConfig(handler="x:Y", on_demand=True, idle_unload=idle)


def test_many_models_take_turns_on_one_device() -> None:
    models = {name: on_demand() for name in "abc"}
    world = box(1, gib=24, static=9 * GIB, models=models)
    world.run(1)
    assert not world.workers
    for name in "abc":
        world.post(ev.ModelWanted(model=name))
        world.until(lambda name=name: world.serving(name) == ["1"], 20)  # type: ignore[misc]
        world.post(ev.ModelUsed(models=(name,)))
    assert world.serving("a") == []
    assert world.serving("b") == ["1"]


def test_first_requests_at_once_load_once() -> None:
    world = box(1, models={"a": on_demand()})
    for _ in range(5):
        world.post(ev.ModelWanted(model="a"))
    world.until(lambda: world.serving("a") == ["1"], 20)
    assert len(world.workers) == 1


def test_an_idle_model_is_unloaded_and_comes_back_on_demand() -> None:
    world = box(1, models={"a": on_demand(idle=30.0)})
    world.post(ev.ModelWanted(model="a"))
    world.until(lambda: world.serving("a") == ["1"], 20)
    world.run(40)
    assert world.serving("a") == []
    world.post(ev.ModelWanted(model="a"))
    world.until(lambda: world.serving("a") == ["1"], 20)


def test_a_drained_slot_stays_empty_until_it_is_uncordoned() -> None:
    world = up(box(2))
    world.verb(verbs.drain, "gpu1", world.now, "me", None)
    world.run(10)
    assert (world.state("gpu1"), len(world.workers)) == ("empty", 2)
    world.verb(verbs.uncordon, "gpu1", world.now)
    up(world)


def test_a_drain_ends_though_the_slot_is_taken_back_and_its_worker_dies() -> None:
    """The heir that was prepared meanwhile follows at once: the slot is empty for nobody to see."""
    world = up(box(1, memory_returns=False))
    world.auto = False
    change = world.verb(verbs.drain, "gpu0", world.now, "me", None)
    assert isinstance(change, Change)
    world.verb(verbs.uncordon, "gpu0", world.now)
    assert change.is_active()
    world.workers["gpu0", 1].batch_started = world.now - 10  # it hangs, and is killed for that
    slot = world.fleet.slots["gpu0"]
    world.until(lambda: slot.state(world.now) == "reclaiming", 10)
    world.auto = True
    world.until(lambda: slot.successor is not None and slot.successor.state is State.HELD, 10)
    world.post(ev.MemoryReturned(slot="gpu0", generation=1))
    assert slot.worker is not None
    assert (change.state, change.text) == ("done", "")
    up(world)


def test_who_waits_for_a_slot_that_is_drained_meanwhile_is_told_so() -> None:
    world = up(box(1))
    world.verb(verbs.unload, "m", world.now)
    world.run(1)
    change = world.verb(verbs.load, "m", world.now)
    assert isinstance(change, Change)
    world.verb(verbs.drain, "gpu0", world.now, "me", None)
    world.run(1)
    assert (change.state, change.text) == ("failed", "gpu0 is cordoned: drain")


def test_routes_are_published_when_and_only_when_they_change() -> None:
    world = up(box(2))
    world.run(1)
    before = world.published
    world.run(10)
    assert world.published == before
    world.verb(verbs.cordon, "gpu0", world.now, "me", "")
    assert world.published == before + 1


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_slot_has_more_workers_than_it_may(seed: int) -> None:
    rng = random.Random(seed)
    world = box(3, seed=seed, static=rng.choice((GIB, 14 * GIB)))
    world.memory_returns = True
    for _ in range(250):
        slot = rng.choice(list(world.fleet.slots))
        alive = world.alive(slot)
        try:
            match rng.randrange(12):
                case deed if deed < 7:
                    world.operate(rng, deed, slot)
                case 7 if alive:
                    world.die(slot, rng.choice(alive).launch.generation, rng.choice((-9, 1, 78)))
                case 8:
                    action = rng.choice(("lost", "back", "restart"))
                    world.post(ev.DeviceFaulted(device=slot, action=action, text="walk"))  # type: ignore[arg-type]
                case 9:
                    bad = str(rng.randrange(1, 9))
                    how = rng.choice(("golden", "crash", "config", "good"))
                    world.behave = lambda launch, bad=bad, how=how: (  # type: ignore[misc]
                        how if launch.assignment.version == bad else "good"
                    )
                case 10:
                    world.verb(verbs.reset_failed, slot, world.now)
                case _:
                    world.run(rng.choice((0.05, 0.5, 5)))
        except Refused:
            pass
        world.step()
        for name, each in world.fleet.slots.items():
            lives = each.lives()
            assert len(lives) <= 2, name
            assert len(world.alive(name)) <= len([x for x in lives if x.state in OCCUPYING])
            serving = [x for x in lives if x.state is State.READY]
            assert len({x.generation for x in serving}) == len(serving)
        for device in world.devices:
            assert world.fleet.books.ledger.promised(device) <= world.devices[device].total
    # Left alone, with everything put right, the box heals by itself.
    world.behave = lambda launch: "good"
    for change in list(world.fleet.changes.values()):
        if change.state == "waiting":
            world.verb(verbs.rollback, "m", world.now)
    for slot in world.fleet.slots:
        world.post(ev.DeviceFaulted(device=slot, action="back", text="walk"))
    world.run(200, step=0.5)
    for slot in world.fleet.slots:
        world.verb(verbs.reset_failed, slot, world.now)
        world.verb(verbs.uncordon, slot, world.now)
    world.until(world.all_ready, 300)
    world.until(lambda: not any(c.is_active() for c in world.fleet.changes.values()), 300)
    assert len(set(world.serving("m"))) == 1


def test_the_next_worker_prepares_while_the_dead_ones_memory_is_not_back() -> None:
    world = up(box(1, memory_returns=False))
    crash(world, "gpu0")
    slot = world.fleet.slots["gpu0"]
    world.until(lambda: slot.successor is not None and slot.successor.state is State.HELD, 10)
    assert slot.state(world.now) == "reclaiming"
    assert world.serving("m") == []
    world.memory_returns = True
    world.post(ev.MemoryReturned(slot="gpu0", generation=1))
    up(world)
    assert len(world.workers) == 2
    assert slot.restarts == 1


def test_what_was_prepared_is_dropped_when_the_slot_is_drained_meanwhile() -> None:
    world = up(box(1, memory_returns=False))
    crash(world, "gpu0")
    world.run(1)
    world.verb(verbs.drain, "gpu0", world.now, "me", None)
    world.memory_returns = True
    world.post(ev.MemoryReturned(slot="gpu0", generation=1))
    world.run(5)
    assert not world.alive("gpu0")
    world.verb(verbs.uncordon, "gpu0", world.now)
    up(world)


def test_another_version_is_expected_to_take_what_this_one_does() -> None:
    world = up(box(1, static=9 * GIB))
    other = verbs.wished(world.fleet, "m", ReloadWish(version="2"))
    world.fleet.books._size_of = lambda assignment, kind: 1
    assert world.fleet.books.need(other, "gpu0")[0] >= 9 * GIB

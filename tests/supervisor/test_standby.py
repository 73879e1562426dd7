"""A standby takes over at a death, costs its worker nothing, and leaves for everything else."""

from __future__ import annotations

import random

import msgspec
import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import carry, standby, status, verbs
from gpusup.supervisor import events as ev
from gpusup.supervisor.backoff import PAUSE_LIMIT_S, PAUSE_S, Pause
from gpusup.supervisor.fleet import Refused
from gpusup.supervisor.life import Life, State
from gpusup.supervisor.rollout import Swap
from gpusup.supervisor.slot import Slot
from gpusup.supervisor.standby import WELL_S
from gpusup.supervisor.verbs import ReloadWish

from .test_carry import put_over
from .world import GIB, World, box

MODEL = ModelConfig(handler="x:Y", standby=True)


def world_of(slots: int = 1, **world: object) -> World:
    return box(slots, models={"m": MODEL}, **world)  # type: ignore[arg-type]


def is_held(slot: Slot) -> bool:
    return slot.standby is not None and slot.standby.state is State.HELD


def held(world: World, slot: str = "gpu0") -> Life:
    """The standby, when it is prepared."""
    world.until(lambda: is_held(world.fleet.slots[slot]), 100)
    found = world.fleet.slots[slot].standby
    assert found is not None
    return found


def words(world: World, slot: str = "gpu0") -> str:
    return status.slot_view(world.fleet.slots[slot], {}, [], world.now).standby


def test_it_is_prepared_when_the_worker_has_been_well_for_a_while() -> None:
    world = world_of()
    world.until(world.all_ready)
    assert words(world) == "none: when the worker has been ready for 2 s"
    world.run(WELL_S - 0.2)
    assert len(world.workers) == 1
    heir = held(world)
    assert world.workers["gpu0", 2].launch.held
    assert (words(world), heir.pid) == ("ready", world.workers["gpu0", 2].pid)
    assert world.state("gpu0") == "ready"
    assert status.overall(world.fleet, world.now) == ("ready", "")
    world.run(200, step=0.5)
    assert len(world.workers) == 2


def test_a_model_without_the_key_has_none() -> None:
    world = box(1)
    world.run(20)
    assert (len(world.workers), words(world)) == (1, "")


def test_it_takes_over_at_a_death_and_the_next_one_follows() -> None:
    world = world_of()
    heir = held(world)
    world.die("gpu0", 1)
    slot = world.fleet.slots["gpu0"]
    assert slot.worker is heir
    assert world.workers["gpu0", 2].went
    world.until(world.all_ready, 5)
    assert (slot.restarts, slot.last_exit) == (1, "signal 9")
    assert held(world).generation == 3
    assert len(world.workers) == 3


def test_it_waits_until_the_memory_of_the_dead_is_back() -> None:
    world = world_of(memory_returns=False)
    heir = held(world)
    world.die("gpu0", 1)
    world.run(30)
    assert (world.state("gpu0"), heir.state, len(world.workers)) == ("reclaiming", State.HELD, 2)
    world.memory_returns = True
    world.post(ev.MemoryReturned(slot="gpu0", generation=1))
    world.until(world.all_ready, 5)
    assert world.life("gpu0") is heir


def test_a_hang_is_followed_by_it_too() -> None:
    world = world_of()
    heir = held(world)
    world.workers["gpu0", 1].batch_started = world.now
    world.until(lambda: world.fleet.slots["gpu0"].worker is heir, 10)


def test_one_that_is_still_being_prepared_goes_on_without_stopping() -> None:
    world = world_of(memory_returns=False)
    world.until(lambda: world.fleet.slots["gpu0"].standby is not None)
    world.auto = False
    world.memory_returns = True
    world.die("gpu0", 1)
    world.auto = True
    world.until(world.all_ready, 5)
    assert (world.life("gpu0").generation, len(world.workers)) == (2, 2)


def test_it_waits_out_the_back_off() -> None:
    world = world_of()
    held(world)
    world.die("gpu0", 1)
    heir = held(world)
    world.die("gpu0", 2)  # the second death in a row
    slot = world.fleet.slots["gpu0"]
    assert (world.state("gpu0"), slot.worker, heir.state) == ("backoff", None, State.HELD)
    assert status.slot_view(slot, {}, [], world.now).pid == 0
    world.until(world.all_ready, 5)
    assert slot.worker is heir


def test_a_crash_loop_costs_no_second_process() -> None:
    world = world_of(behave=lambda launch: "crash")
    world.until(lambda: world.state("gpu0") == "failed", 100)
    world.run(60)
    assert len(world.workers) == world.config.supervision.backoff.crashes


def test_when_the_slot_is_given_up_it_goes() -> None:
    world = world_of()
    held(world)
    world.behave = lambda launch: "config"
    world.fleet.slots["gpu0"].failed = "given up"
    world.run(1)
    assert [w.launch.generation for w in world.alive("gpu0")] == [1]


def test_its_own_death_hurts_nobody_and_it_comes_back_later_each_time() -> None:
    world = world_of()
    pauses = []
    for _ in range(3):
        heir = held(world)
        began = world.now
        world.die("gpu0", heir.generation, -11)
        world.step()
        assert "the last one ended: signal 11; the next one in" in words(world)
        world.until(lambda: world.fleet.slots["gpu0"].standby is not None, 100)
        pauses.append(round(world.now - began))
    slot = world.fleet.slots["gpu0"]
    assert pauses == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert (slot.restarts, slot.last_exit, slot.backoff.strikes) == (0, "", 0)
    assert world.life("gpu0").generation == 1
    told = [t.text for t in world.told if t.kind == "standby"]
    assert told[0] == "gpu0: its standby ended (signal 11), the next one in 5 s"
    assert len(told) == 3


def test_one_that_cannot_be_prepared_is_not_tried_all_the_time() -> None:
    world = world_of(behave=lambda launch: "config" if launch.held else "good")
    world.run(100)
    assert world.serving("m") == ["1"]
    assert 3 <= len(world.workers) <= 6
    assert "bad: config" in words(world)


def test_one_that_hangs_is_found_before_it_is_needed() -> None:
    world = world_of()
    heir = held(world)
    worker = world.workers["gpu0", heir.generation]
    limit = world.config.supervision.beat_limit
    worker.beat = limit - 0.1
    world.run(1)
    assert heir.state is State.HELD
    worker.beat = limit + 0.1
    world.run(1)
    assert heir.exited
    assert "no beat for 20.1 s while held, the limit is 20 s" in words(world)
    assert world.state("gpu0") == "ready"


def test_pauses_have_a_limit() -> None:
    pause = Pause()
    assert [pause.fail("", 0) for _ in range(99)][-1] == PAUSE_LIMIT_S


def test_one_that_does_not_die_leaves_the_worker_in_peace() -> None:
    world = world_of()
    heir = held(world)
    world.kill_works = False
    world.verb(verbs.cordon, "gpu0", world.now, "me", "")
    world.run(40)
    assert heir.state is State.UNKILLABLE
    assert str(world.fleet.slots["gpu0"].standing) == "cordoned"
    world.verb(verbs.uncordon, "gpu0", world.now)
    assert world.serving("m") == ["1"]
    change = world.verb(verbs.reload, "m", ReloadWish(version="2"), world.now)
    assert isinstance(change, Swap)
    world.until(lambda: not change.is_active())
    assert (change.state, world.serving("m")) == ("rolled-back", ["1"])
    assert f"its standby, pid {heir.pid}, does not die" in change.text
    world.kill_works = True
    world.die("gpu0", 1)
    world.until(world.all_ready, 10)
    assert world.life("gpu0").generation == 3


# -- configuration and upgrades -------------------------------------------------------------------


def test_it_is_switched_on_and_off_without_a_new_worker() -> None:
    world = box(1)
    world.until(world.all_ready)
    need = world.fleet.books.need(world.life("gpu0").assignment, "gpu0")
    config = world.fleet.config.models["m"]
    change = world.verb(
        standby.switch, "m", msgspec.structs.replace(config, standby=True), world.now
    )
    assert change.state == "done"  # type: ignore[attr-defined]
    heir = held(world)
    assert world.fleet.books.need(world.life("gpu0").assignment, "gpu0") == need
    world.die("gpu0", 1)
    world.until(world.all_ready, 5)
    assert world.life("gpu0") is heir
    heir = held(world)
    world.verb(standby.switch, "m", config, world.now)
    world.run(20)
    assert heir.state is State.GONE
    assert (world.serving("m"), len(world.workers), words(world)) == (["1"], 3, "")
    assert world.fleet.config.models["m"] == config


def test_a_reload_may_bring_it_along() -> None:
    world = box(1)
    world.until(world.all_ready)
    wish = ReloadWish(version="2", set={"standby": True})
    change = world.verb(verbs.reload, "m", wish, world.now)
    world.until(lambda: not change.is_active())  # type: ignore[attr-defined]
    assert held(world).assignment.version == "2"


def test_an_upgrade_in_place_takes_it_along() -> None:
    world = world_of()
    heir = held(world)
    put_over(world)
    slot = world.fleet.slots["gpu0"]
    assert slot.standby is not None
    assert slot.standby.pid == heir.pid
    world.run(20)
    assert len(world.workers) == 2
    world.die("gpu0", 1)
    world.until(world.all_ready, 5)
    assert world.life("gpu0").pid == heir.pid
    put_over(world)
    held(world)
    world.die("gpu0", world.fleet.slots["gpu0"].standby.generation, -11)  # type: ignore[union-attr]
    put_over(world)
    world.step()
    assert "signal 11" in words(world)
    assert carry.export_fleet(world.fleet)["slots"][0]["standby_pause"][2] == 1


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_there_is_one_worker_and_at_most_one_beside_it(seed: int) -> None:
    rng = random.Random(seed)
    models = {"m": MODEL, "n": ModelConfig(handler="x:Z", standby=True, devices=("gpu0",))}
    world = box(2, seed=seed, models=models, static=rng.choice((GIB, 8 * GIB, 9 * GIB)))
    for _ in range(250):
        slot = rng.choice(list(world.fleet.slots))
        alive = world.alive(slot)
        try:
            match rng.randrange(12):
                case deed if deed < 7:
                    world.operate(rng, deed, slot, "mn")
                case 7 | 8 if alive:
                    world.die(slot, rng.choice(alive).launch.generation, rng.choice((-9, 1, 78)))
                case 9:
                    world.memory_returns = not world.memory_returns
                    if world.memory_returns:
                        for worker in world.workers.values():
                            worker.held_memory = False
                        for life in list(world.fleet.lives()):
                            at = {"slot": life.slot, "generation": life.generation}
                            world.post(ev.MemoryReturned(**at))  # type: ignore[arg-type]
                case 10:
                    config = world.fleet.config.models["m"]
                    config = msgspec.structs.replace(config, standby=not config.standby)
                    if world.fleet.active_change("m") is None:
                        world.verb(standby.switch, "m", config, world.now)
                case _:
                    world.run(rng.choice((0.05, 0.5, 5)))
        except Refused:
            pass
        world.step()
        for name, each in world.fleet.slots.items():
            assert len(world.alive(name)) <= len(each.lives()) <= 2, name
            if each.standby is not None and each.standby.state is State.HELD:
                assert each.standby.assignment == each.wanted
                assert not each.reserved_by
                assert each.takes_part()
        for device in world.devices:
            assert world.fleet.books.ledger.promised(device) <= world.devices[device].total
    world.memory_returns = True
    for life in list(world.fleet.lives()):
        world.post(ev.MemoryReturned(slot=life.slot, generation=life.generation))
    config = msgspec.structs.replace(world.fleet.config.models["m"], standby=True)
    world.run(100, step=0.5)
    for change in list(world.fleet.changes.values()):
        if change.is_active():
            world.verb(verbs.rollback, change.model, world.now)
    world.until(lambda: not any(c.is_active() for c in world.fleet.changes.values()), 300)
    world.verb(standby.switch, "m", config, world.now)
    for name in world.fleet.slots:
        world.verb(verbs.reset_failed, name, world.now)
        world.verb(verbs.uncordon, name, world.now)
    world.until(world.all_ready, 300)
    tight = world.static > 8 * GIB
    world.until(lambda: tight or all(map(is_held, world.fleet.slots.values())), 1000)

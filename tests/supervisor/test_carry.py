"""The fleet travels through an upgrade whole."""

from __future__ import annotations

import random

import msgspec
import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import carry, verbs
from gpusup.supervisor import events as ev
from gpusup.supervisor.fleet import Fleet
from gpusup.supervisor.verbs import ReloadWish

from .world import World, box


def carried(world: World) -> Fleet:
    """A new fleet, made of the bytes that would travel."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(carry.export_fleet(world.fleet)))
    fleet = Fleet(
        carry.config_of(state),
        {name: place for name, (place, _) in carry.places_of(state).items()},
        fits=lambda name, model, device, sharing: 1,
        size_of=lambda assignment, kind: world.static,
        rng=random.Random(1),
        now=world.now,
    )
    carry.restore_fleet(fleet, state)
    return fleet


def put_over(world: World) -> None:
    before = carry.export_fleet(world.fleet)
    world.fleet = carried(world)
    assert carry.export_fleet(world.fleet) == before


def kill(world: World, slot: str) -> None:
    world.die(slot, world.life(slot).generation)


def test_ready_workers_go_on_and_their_deaths_are_seen() -> None:
    world = box(2)
    world.until(world.all_ready)
    put_over(world)
    kill(world, "gpu0")
    world.until(world.all_ready)
    assert world.life("gpu0").generation == 2
    assert len(world.workers) == 3


def test_the_next_worker_still_prepares_while_memory_is_not_back() -> None:
    world = box(1, memory_returns=False)
    world.until(world.all_ready)
    put_over(world)
    kill(world, "gpu0")
    assert world.fleet.slots["gpu0"].successor is not None


def test_a_reload_of_one_slot_still_leaves_the_others_alone() -> None:
    world = box(2)
    world.until(world.all_ready)
    put_over(world)
    wish = ReloadWish(version="2", slots=("gpu1",))
    change = world.verb(verbs.reload, "m", wish, world.now)
    world.until(lambda: not change.is_active())  # type: ignore[attr-defined]
    wanted = {name: slot.wanted.version for name, slot in world.fleet.slots.items() if slot.wanted}
    assert wanted == {"gpu0": "1", "gpu1": "2"}
    assert world.fleet.models["m"].current.version == "1"


@pytest.mark.parametrize("steps", range(12))
def test_at_any_moment_of_a_start_or_an_end(steps: int) -> None:
    world = box(2, memory_returns=False)
    world.until(world.all_ready)
    world.workers["gpu0", 1].batch_started = world.now - 0.9
    kill(world, "gpu1")
    world.memory_returns = True
    for _ in range(steps):
        world.step()
    put_over(world)
    world.post(ev.MemoryReturned(slot="gpu1", generation=1))
    world.until(world.all_ready)
    assert {w.launch.slot for w in world.workers.values() if w.alive} == {"gpu0", "gpu1"}


def test_failed_cordoned_and_quarantined_slots_stay_what_they_are() -> None:
    world = box(3, behave=lambda launch: "config" if launch.slot == "gpu0" else "good")
    world.run(2)
    world.verb(verbs.cordon, "gpu1", world.now, "root", "new fan")
    world.post(ev.DeviceFaulted(device="gpu2", action="reset", text="Xid 119", xid=119))
    world.run(2)
    put_over(world)
    world.run(5)
    slots = world.fleet.slots
    assert "it can't work as configured" in slots["gpu0"].failed
    assert (str(slots["gpu1"].standing), slots["gpu1"].standing_why) == ("cordoned", "new fan")
    assert str(slots["gpu2"].standing) == "quarantined"
    assert world.fleet.devices["gpu2"].fault == "Xid 119"
    assert world.serving("m") == ["1"]


def test_an_unkillable_worker_stays_quarantined_and_its_late_death_is_noted() -> None:
    world = box(2, kill_works=False)
    world.until(world.all_ready)
    world.workers["gpu0", 1].batch_started = world.now
    world.run(40)
    put_over(world)
    world.run(40)
    assert world.state("gpu0") == "unkillable"
    world.die("gpu0", 1)
    assert world.state("gpu0") == "empty"
    assert str(world.fleet.slots["gpu0"].standing) == "quarantined"


def test_versions_tallies_and_changes_that_ended() -> None:
    world = box(1)
    world.until(world.all_ready)
    change = world.verb(verbs.reload, "m", ReloadWish(version="2"), world.now)
    world.until(lambda: not change.is_active())  # type: ignore[attr-defined]
    kill(world, "gpu0")
    world.until(world.all_ready)
    put_over(world)
    record = world.fleet.models["m"]
    assert record.previous is not None
    assert (record.current.version, record.previous.version) == ("2", "1")
    assert [c.state for c in world.fleet.changes.values()] == ["done"]
    assert world.fleet.slots["gpu0"].backoff.strikes == 1
    rollback = world.verb(verbs.rollback, "m", world.now)
    assert rollback.id == "2"  # type: ignore[attr-defined]
    world.until(lambda: world.serving("m") == ["1"])


def test_slots_laid_out_anew_keep_their_names() -> None:
    world = box(
        1, gib=80, models={"a": ModelConfig(handler="x:Y"), "b": ModelConfig(handler="x:Y")}
    )
    world.until(world.all_ready)
    world.verb(lambda fleet: fleet.replan("a", ModelConfig(handler="x:Y", workers=2), world.now))
    world.run(5)
    names = set(world.fleet.slots)
    assert len(names) == 3
    put_over(world)
    assert set(world.fleet.slots) == names
    world.run(5)
    assert world.all_ready()

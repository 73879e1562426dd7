"""A restart honours what was decided before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import events as ev
from gpusup.supervisor import verbs
from gpusup.supervisor.saved import Saved, restore, save
from gpusup.supervisor.slot import Standing
from gpusup.supervisor.store import Store
from gpusup.supervisor.verbs import ReloadWish

from .world import World, box


@pytest.fixture
def store(tmp_path: Path) -> Store[Saved]:
    return Store(tmp_path / "state.json", Saved)


def restarted(world: World, store: Store[Saved], **more: object) -> World:
    """The same box after its supervisor was started again, an hour of another clock later."""
    store.save(save(world.fleet, (), world.now))
    models = more.pop("models", None) or dict(world.config.models)
    return box(len(world.devices), models=models, now=7000.0, at_first=load_from(store), **more)  # type: ignore[arg-type]


def load_from(store: Store[Saved]) -> Callable[[World], object]:
    def load(world: World) -> None:
        saved = Store(store.path, Saved).load()
        assert saved is not None
        restore(world.fleet, saved, world.now)

    return load


def up(world: World) -> World:
    world.until(world.all_ready)
    return world


def test_cordoned_stays_cordoned_and_by_whom(store: Store[Saved]) -> None:
    world = up(box(2))
    world.verb(verbs.cordon, "gpu0", world.now, "ann", "new fan")
    again = restarted(world, store)
    again.run(5)
    slot = again.fleet.slots["gpu0"]
    assert (slot.standing, slot.standing_by, slot.standing_why) == ("cordoned", "ann", "new fan")
    assert not again.alive("gpu0")
    assert again.serving("m") == ["1"]


def test_failed_stays_failed_until_it_is_reset(store: Store[Saved]) -> None:
    world = box(1, behave=lambda launch: "crash")
    world.until(lambda: world.state("gpu0") == "failed")
    again = restarted(world, store)
    again.run(60)
    assert not again.workers
    again.verb(verbs.reset_failed, "gpu0", again.now)
    up(again)


def test_failed_with_another_configuration_gets_a_fresh_chance(store: Store[Saved]) -> None:
    world = box(1, behave=lambda launch: "config")
    world.until(lambda: world.state("gpu0") == "failed")
    up(restarted(world, store, models={"m": ModelConfig(handler="x:Mended")}))


def test_crashes_before_a_restart_count_after_it(store: Store[Saved]) -> None:
    world = box(1, behave=lambda launch: "crash")
    world.until(lambda: len(world.workers) == 3)
    again = restarted(world, store, behave=lambda launch: "crash")
    again.until(lambda: again.state("gpu0") == "failed")
    assert len(world.workers) + len(again.workers) <= 6


def test_a_slot_whose_worker_could_not_be_killed_stays_in_quarantine(store: Store[Saved]) -> None:
    world = up(box(2, kill_works=False))
    world.workers["gpu0", 1].batch_started = world.now
    world.run(40)
    assert world.state("gpu0") == "unkillable"
    again = restarted(world, store)
    again.run(60)
    slot = again.fleet.slots["gpu0"]
    assert slot.standing is Standing.QUARANTINED
    assert "does not die" in slot.standing_why
    assert not again.alive("gpu0")
    assert again.serving("m") == ["1"]


@pytest.mark.parametrize("action", ["reset", "node", "retire"])
def test_a_gpu_that_needs_somebody_stays_in_quarantine_with_its_sentence(
    store: Store[Saved], action: str
) -> None:
    world = up(box(2))
    fault = {"device": "gpu1", "action": action, "text": f"Xid 119: {action}"}
    world.post(ev.DeviceFaulted(**fault))  # type: ignore[arg-type]
    world.run(1)
    again = restarted(world, store)
    again.run(5)
    slot = again.fleet.slots["gpu1"]
    assert (slot.standing, slot.standing_why) == (Standing.QUARANTINED, f"Xid 119: {action}")
    assert not again.alive("gpu1")


def test_a_lost_gpu_is_looked_at_anew(store: Store[Saved]) -> None:
    world = up(box(2))
    world.post(ev.DeviceFaulted(device="gpu1", action="lost", text="fallen off the bus"))
    up(restarted(world, store))


def test_the_version_last_reloaded_is_served_and_generations_go_on(store: Store[Saved]) -> None:
    world = up(box(1))
    change = world.verb(verbs.reload, "m", ReloadWish(version="2"), world.now)
    world.until(lambda: not change.is_active())  # type: ignore[attr-defined]
    before = world.life("gpu0").generation
    again = up(restarted(world, store))
    assert again.serving("m") == ["2"]
    assert again.life("gpu0").generation == before + 1


def test_the_file_can_be_read_by_people(store: Store[Saved]) -> None:
    store.save(save(up(box(1)).fleet, ("a",), 0.0))
    data = msgspec.json.decode(store.path.read_bytes())["data"]
    assert data["slots"]["gpu0"]["standing"] == "schedulable"
    assert data["poisoned"] == ["a"]

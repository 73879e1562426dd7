"""How a slot would get another version, by the arithmetic of its device."""

from __future__ import annotations

import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import events as ev
from gpusup.supervisor import verbs
from gpusup.supervisor.fleet import Refused
from gpusup.supervisor.rollout import Swap
from gpusup.supervisor.swap_plan import way
from gpusup.supervisor.verbs import ReloadWish
from gpusup.supervisor.view import model_info

from .world import GIB, World, box


def up(world: World) -> World:
    world.until(world.all_ready)
    return world


def swap(world: World, **wish: object) -> Swap:
    change = world.verb(verbs.reload, "m", ReloadWish(**wish), world.now)  # type: ignore[arg-type]
    assert isinstance(change, Swap)
    return change


def how(world: World, static: int, **wish: object) -> str:
    """With a new version of `static` bytes."""
    wish = {"version": "9", "set": {"static": static}, **wish}
    return str(verbs.plan(world.fleet, "m", ReloadWish(**wish), world.now)[0]["strategy"])  # type: ignore[arg-type]


def on_first(gib: int = 24, slots: int = 2, static: int = 14 * GIB) -> World:
    """A model on gpu0 only; gpu1 has nothing to do."""
    models = {"m": ModelConfig(handler="x:Y", devices=("gpu0",))}
    return up(box(slots, gib=gib, models=models, static=static))


def test_the_strategy_follows_the_room() -> None:
    world = on_first(slots=1, static=4 * GIB)
    # 24 GiB x 0.92 = 22.08 GiB; 4.63 are held with the context, 1 is safety.
    assert how(world, 16 * GIB) == "surge"
    assert how(world, 18 * GIB) == "in-place"
    assert how(world, 22 * GIB) == "in-place"
    assert how(world, 23 * GIB) == "refused"
    assert how(world, 19 * GIB, strategy="surge") == "refused"
    assert how(world, 2 * GIB, strategy="in-place") == "in-place"


def test_a_spare_device_is_used_before_the_only_worker_has_to_leave() -> None:
    world = on_first()
    assert how(world, 14 * GIB) == "spare"
    assert how(world, 22 * GIB) == "in-place"  # no safety left there


def test_a_device_that_is_out_of_service_is_no_spare() -> None:
    models = {
        "m": ModelConfig(handler="x:Y", devices=("gpu0",)),
        "other": ModelConfig(handler="x:Z", devices=("gpu1",)),
    }
    world = up(box(2, models=models, static=14 * GIB))
    assert how(world, 14 * GIB) == "in-place"  # somebody works there
    world.verb(verbs.drain, "gpu1", world.now, "me", None)
    world.until(lambda: world.fleet.slots["gpu1"].worker is None)
    assert how(world, 14 * GIB) == "in-place"  # and now it is cordoned


def test_a_stand_in_serves_while_the_only_slot_is_swapped_and_leaves() -> None:
    world = on_first()
    change = swap(world, version="2")

    def ended() -> bool:
        assert world.serving("m")
        return not change.is_active()

    world.until(ended)
    assert change.state == "done"
    world.until(lambda: list(world.fleet.slots) == ["gpu0"])
    assert world.serving("m") == ["2"]
    assert world.fleet.books.ledger.promised("gpu1") == 0


@pytest.mark.parametrize("where", ["stand-in", "slot"])
def test_a_version_that_fails_leaves_no_stand_in_behind(where: str) -> None:
    world = on_first()
    world.behave = lambda launch: (
        "golden"
        if launch.assignment.version == "2" and (launch.slot != "gpu0") is (where == "stand-in")
        else "good"
    )
    change = swap(world, version="2")
    world.until(lambda: not change.is_active())
    assert change.state == "rolled-back"
    world.until(lambda: list(world.fleet.slots) == ["gpu0"])
    world.until(lambda: world.serving("m") == ["1"])


def test_what_does_not_fit_is_found_before_anything_is_touched() -> None:
    world = on_first(slots=1)
    launched = len(world.workers)
    change = swap(world, version="2", set={"static": 30 * GIB})
    world.until(lambda: not change.is_active())
    assert change.state == "failed"
    assert "does not fit" in change.text
    assert "30GiB" in change.text
    assert len(world.workers) == launched


def test_a_gap_that_is_longer_than_accepted_is_refused() -> None:
    world = on_first(slots=1)
    info = world.life("gpu0").info
    assert info is not None
    info.seconds.update({"import": 60.0, "weights": 2.0, "warm-up": 1.0})
    with pytest.raises(Refused, match="about 3s, --allow-gap accepts 2s") as refused:
        swap(world, version="2", allow_gap=2.0)
    assert refused.value.kind == "conflict"
    change = swap(world, version="2", allow_gap=4.0)
    assert model_info(world.fleet, "m", world.now).hold_s == 4.0
    world.until(lambda: not change.is_active())
    assert change.state == "done"
    assert model_info(world.fleet, "m", world.now).hold_s == 10.0


def test_some_slots_only_keep_their_version_apart_from_the_others() -> None:
    world = up(box(3))
    change = swap(world, version="2", slots=("gpu1",))
    world.until(lambda: not change.is_active())
    assert (change.state, sorted(world.serving("m"))) == ("done", ["1", "1", "2"])
    assert "gpu0, gpu2 as before" in change.text
    assert model_info(world.fleet, "m", world.now).mixed
    world.die("gpu1", world.life("gpu1").generation)
    world.until(world.all_ready)
    assert sorted(world.serving("m")) == ["1", "1", "2"]
    again = world.verb(verbs.rollback, "m", world.now)
    assert isinstance(again, Swap)
    world.until(lambda: not again.is_active())
    assert world.serving("m") == ["1", "1", "1"]
    assert not model_info(world.fleet, "m", world.now).mixed


def test_the_rest_can_follow_and_then_it_is_the_models_version() -> None:
    world = up(box(2))
    for slot in ("gpu0", "gpu1"):
        change = swap(world, version="2", slots=(slot,))
        world.until(lambda change=change: not change.is_active())  # type: ignore[misc]
        assert change.state == "done"
    assert world.fleet.models["m"].current.version == "2"
    previous = world.fleet.models["m"].previous
    assert previous is not None
    assert previous.version == "1"


def test_a_canary_on_all_of_the_named_slots_waits_too() -> None:
    world = up(box(2))
    change = swap(world, version="2", slots=("gpu1",), canary=0.3)
    world.until(lambda: change.state == "waiting")
    world.verb(verbs.rollback, "m", world.now)
    world.until(lambda: not change.is_active())
    assert world.serving("m") == ["1", "1"]


def test_a_canary_beside_the_old_worker_that_dies_is_taken_back() -> None:
    world = up(box(1))
    change = swap(world, version="2", canary=0.5)
    world.until(lambda: change.state == "waiting")
    heir = world.fleet.slots["gpu0"].successor
    assert heir is not None
    world.die("gpu0", heir.generation)
    world.until(lambda: not change.is_active())
    assert (change.state, world.serving("m")) == ("rolled-back", ["1"])


def test_a_restart_does_not_become_what_a_rollback_goes_back_to() -> None:
    world = up(box(2))
    swapped = swap(world, version="2")
    world.until(lambda: not swapped.is_active())
    restarted = world.verb(verbs.restart, "gpu0", world.now)
    assert isinstance(restarted, Swap)
    world.until(lambda: not restarted.is_active())
    previous = world.fleet.models["m"].previous
    assert previous is not None
    assert previous.version == "1"


def test_memory_that_is_not_known_makes_it_careful() -> None:
    world = on_first(slots=1)
    world.fleet.books.unknown("gpu0")
    slot = world.fleet.slots["gpu0"]
    found = way(world.fleet, slot, world.fleet.models["m"].current, world.now)
    assert (found.how, found.room) == ("in-place", None)


def test_a_slot_that_only_waits_is_not_said_to_back_off() -> None:
    world = up(box(1))
    world.post(ev.DriverSeen(gone="unloaded"))
    world.die("gpu0", 1)
    world.run(1)
    assert world.state("gpu0") == "waiting"
    (line,) = verbs.plan(world.fleet, "m", ReloadWish(version="2"), world.now)
    assert line["why"].startswith("nobody serves there (waiting); ")

"""Swaps, seen from outside: what serves at every moment, and what is left at the end."""

from __future__ import annotations

import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import verbs
from gpusup.supervisor.actions import Launch
from gpusup.supervisor.change import Change
from gpusup.supervisor.fleet import Refused
from gpusup.supervisor.rollout import Swap
from gpusup.supervisor.verbs import ReloadWish

from .world import World, box


def up(world: World) -> World:
    world.until(world.all_ready)
    return world


def swap(world: World, **wish: object) -> Swap:
    change = world.verb(verbs.reload, "m", ReloadWish(**wish), world.now)  # type: ignore[arg-type]
    assert isinstance(change, Swap)
    return change


def finish(world: World, change: Change, least: int = 0) -> None:
    def ended() -> bool:
        assert len(world.serving("m")) >= least
        return not change.is_active()

    world.until(ended)


def bad_version(version: str, how: str = "golden") -> object:
    return lambda launch: how if launch.assignment.version == version else "good"


def test_with_room_the_new_worker_starts_beside_the_old() -> None:
    world = up(box(1))
    change = swap(world, version="2")
    finish(world, change, least=1)
    assert (change.state, world.serving("m")) == ("done", ["2"])
    assert any("surge" in step.text for step in change.steps)


def test_without_room_slots_are_swapped_in_place_one_at_a_time() -> None:
    world = up(box(2, gib=24, static=14 * 2**30))
    change = swap(world, version="2")
    finish(world, change, least=1)
    assert (change.state, world.serving("m")) == ("done", ["2", "2"])
    assert any("in-place" in step.text for step in change.steps)


def test_the_only_slot_is_swapped_in_place_with_a_prepared_successor() -> None:
    world = up(box(1, gib=24, static=14 * 2**30))
    change = swap(world, version="2")
    world.until(lambda: world.fleet.slots["gpu0"].successor is not None)
    assert world.serving("m") == ["1"]
    finish(world, change)
    assert world.serving("m") == ["2"]
    assert "longest_gap_s" in change.numbers


@pytest.mark.parametrize("how", ["golden", "config", "crash", "oom"])
@pytest.mark.parametrize("strategy", ["surge", "in-place"])
def test_a_version_that_fails_is_taken_back_everywhere(how: str, strategy: str) -> None:
    world = box(2, gib=200)
    up(world)
    world.behave = bad_version("2", how)  # type: ignore[assignment]
    change = swap(world, version="2", strategy=strategy)
    finish(world, change, least=1)
    assert change.state == "rolled-back"
    assert world.serving("m") == ["1", "1"]
    assert world.fleet.models["m"].current.version == "1"


def test_a_version_that_fails_on_the_second_slot_leaves_the_first_as_it_was() -> None:
    world = box(2)
    up(world)

    def behave(launch: Launch) -> str:
        return "golden" if launch.assignment.version == "2" and launch.slot == "gpu1" else "good"

    world.behave = behave
    change = swap(world, version="2")
    finish(world, change, least=1)
    assert change.state == "rolled-back"
    assert world.serving("m") == ["1", "1"]


def test_when_the_old_one_does_not_come_back_the_change_says_that_there_is_no_model() -> None:
    world = box(1, static=14 * 2**30)
    up(world)
    world.behave = lambda launch: "config"
    change = swap(world, version="2")
    finish(world, change)
    # The successor failed while it prepared, so the old one was never touched.
    assert (change.state, world.serving("m")) == ("rolled-back", ["1"])
    world.behave = lambda launch: "golden" if launch.held else "config"
    change = swap(world, version="3")
    finish(world, change)
    assert change.state == "failed"
    assert "did not come back" in change.text
    assert world.serving("m") == []


def test_a_failed_check_touches_nothing() -> None:
    world = up(box(2))
    world.problem = "w.safetensors ends at byte 5, its header says 9"
    launches = len(world.workers)
    change = swap(world, version="2")
    finish(world, change, least=2)
    assert change.state == "failed"
    assert "byte 5" in change.text
    assert len(world.workers) == launches


def test_two_changes_at_once_on_one_model_are_refused_with_the_id_of_the_first() -> None:
    world = up(box(2))
    first = swap(world, version="2")
    with pytest.raises(Refused) as refused:
        swap(world, version="3")
    assert refused.value.change == first.id


def test_a_canary_waits_and_can_be_promoted_or_taken_back() -> None:
    for promote in (True, False):
        world = up(box(2))
        change = swap(world, version="2", canary=0.1)
        world.until(lambda change=change: change.state == "waiting")  # type: ignore[misc]
        assert sorted(world.serving("m")) == ["1", "2"]
        assert world.fleet.models["m"].canary_share == 0.1
        world.verb(verbs.promote if promote else verbs.rollback, "m", world.now)
        finish(world, change, least=1)
        assert world.serving("m") == (["2", "2"] if promote else ["1", "1"])
        assert world.fleet.models["m"].canary is None


def test_a_canary_in_the_only_slot_runs_beside_the_old_worker() -> None:
    world = up(box(1))
    change = swap(world, version="2", canary=0.5)
    world.until(lambda: change.state == "waiting")
    assert sorted(world.serving("m")) == ["1", "2"]
    world.verb(verbs.rollback, "m", world.now)
    finish(world, change, least=1)
    assert (change.state, world.serving("m")) == ("rolled-back", ["1"])


def test_rollback_goes_to_the_version_before() -> None:
    world = up(box(2))
    finish(world, swap(world, version="2"))
    change = world.verb(verbs.rollback, "m", world.now)
    assert isinstance(change, Change)
    finish(world, change, least=1)
    assert world.serving("m") == ["1", "1"]


def test_abort_takes_back_what_was_done() -> None:
    world = up(box(3))
    change = swap(world, version="2")
    world.until(lambda: "2" in world.serving("m"))
    world.verb(verbs.abort, change.id, world.now)
    finish(world, change, least=1)
    assert (change.state, world.serving("m")) == ("aborted", ["1", "1", "1"])


def test_a_crash_of_the_old_worker_in_the_middle_does_not_stop_the_swap() -> None:
    world = up(box(1, static=14 * 2**30))
    change = swap(world, version="2")
    world.until(lambda: world.fleet.slots["gpu0"].successor is not None)
    world.die("gpu0", 1)
    finish(world, change)
    assert (change.state, world.serving("m")) == ("done", ["2"])


def test_cordoned_slots_are_left_alone_and_get_the_version_later() -> None:
    world = up(box(2))
    world.verb(verbs.drain, "gpu1", world.now, "me", None)
    world.until(lambda: world.fleet.slots["gpu1"].worker is None)
    finish(world, swap(world, version="2"), least=1)
    world.verb(verbs.uncordon, "gpu1", world.now)
    up(world)
    assert world.serving("m") == ["2", "2"]


def test_fifty_swaps_leave_nothing_in_the_ledger() -> None:
    world = up(box(2))
    free = world.fleet.books.ledger.free("gpu0")
    for version in range(2, 52):
        change = swap(world, version=str(version))
        finish(world, change, least=1)
        assert change.state == "done"
    assert world.fleet.books.ledger.free("gpu0") == free
    assert sum(w.alive for w in world.workers.values()) == 2


def test_the_plan_shows_the_arithmetic_and_touches_nothing() -> None:
    world = up(box(2))
    lines = verbs.plan(world.fleet, "m", ReloadWish(version="2"), world.now)
    assert [line["strategy"] for line in lines] == ["surge", "surge"]
    assert "free" in lines[0]["why"]
    with pytest.raises(Refused, match="no model 'x'"):
        verbs.plan(world.fleet, "x", ReloadWish(), world.now)


def test_restart_replaces_a_ready_worker_without_a_hole() -> None:
    world = up(box(2, models={"m": ModelConfig(handler="x:Y")}))
    change = world.verb(verbs.restart, "gpu0", world.now)
    assert isinstance(change, Change)
    finish(world, change, least=1)
    assert change.state == "done"
    assert world.life("gpu0").generation == 2

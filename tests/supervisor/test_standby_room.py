"""A standby leaves for everything else: changes, an operator's words, workers that need memory."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor import events as ev
from gpusup.supervisor import standby, verbs
from gpusup.supervisor.backoff import Cause
from gpusup.supervisor.life import State
from gpusup.supervisor.placement import CONTEXT_BYTES
from gpusup.supervisor.rollout import Swap
from gpusup.supervisor.standby import MADE_ROOM_S
from gpusup.supervisor.verbs import ReloadWish

from .test_standby import MODEL, held, words, world_of
from .world import GIB, World, box


def promised(world: World) -> int:
    return world.fleet.books.ledger.promised("gpu0")


@pytest.mark.parametrize("strategy", ["surge", "in-place"])
def test_a_swap_ends_it_first_and_has_a_new_one_in_the_end(strategy: str) -> None:
    world = world_of(2)
    old = [held(world, name) for name in ("gpu0", "gpu1")]
    wish = ReloadWish(version="2", strategy=strategy)  # type: ignore[arg-type]
    change = world.verb(verbs.reload, "m", wish, world.now)
    assert isinstance(change, Swap)

    def ended() -> bool:
        assert world.serving("m")
        for slot in world.fleet.slots.values():
            assert not (slot.reserved_by and slot.standby), "two successors in one slot"
        return not change.is_active()

    world.until(ended)
    assert (change.state, world.serving("m")) == ("done", ["2", "2"])
    assert {life.state for life in old} == {State.GONE}
    assert {life.outcome and life.outcome.cause for life in old} == {Cause.REQUESTED}
    for name in ("gpu0", "gpu1"):
        assert held(world, name).assignment.version == "2"


def test_a_swap_that_fails_leaves_it_as_it_was() -> None:
    world = world_of()
    held(world)
    world.behave = lambda launch: "golden" if launch.assignment.version == "2" else "good"
    change = world.verb(verbs.reload, "m", ReloadWish(version="2"), world.now)
    assert isinstance(change, Swap)
    world.until(lambda: not change.is_active())
    assert (change.state, world.serving("m")) == ("rolled-back", ["1"])
    assert held(world).assignment.version == "1"


def test_while_a_canary_waits_there_is_none_beside_it() -> None:
    world = world_of()
    held(world)
    change = world.verb(verbs.reload, "m", ReloadWish(version="2", canary=0.5), world.now)
    assert isinstance(change, Swap)
    world.until(lambda: change.state == "waiting")
    world.run(20)
    assert sorted(world.serving("m")) == ["1", "2"]
    assert world.fleet.slots["gpu0"].standby is None
    world.verb(verbs.promote, "m", world.now)
    assert held(world).assignment.version == "2"


def test_the_memory_it_holds_counts_as_free_for_a_swap() -> None:
    world = world_of(static=9 * GIB)
    held(world)
    room = world.fleet.books.room("gpu0")
    (line,) = verbs.plan(world.fleet, "m", ReloadWish(version="2"), world.now)
    assert room is not None
    static = room + CONTEXT_BYTES - GIB  # the last GiB is safety
    wish = ReloadWish(version="9", set={"static": static})
    (line,) = verbs.plan(world.fleet, "m", wish, world.now)
    assert line["strategy"] == "surge", line
    wish = ReloadWish(version="9", set={"static": static + 1})
    (line,) = verbs.plan(world.fleet, "m", wish, world.now)
    assert line["strategy"] == "in-place", line


def test_a_neighbours_standby_leaves_where_the_new_version_needs_it() -> None:
    models = {"m": MODEL, "n": ModelConfig(handler="x:Z", standby=True)}
    world = box(1, models=models, static=9 * GIB)
    names = list(world.fleet.slots)
    for name in names:
        held(world, name)
    free = world.fleet.books.room("gpu0")
    assert free is not None
    most = free + standby.in_slot(world.fleet, world.fleet.slots[names[0]]) + CONTEXT_BYTES
    change = world.verb(verbs.reload, "m", ReloadWish(version="2", set={"static": most}), world.now)
    assert isinstance(change, Swap)
    world.until(lambda: not change.is_active())
    assert change.state == "done", change.text
    assert (world.serving("m"), world.serving("n")) == (["2"], ["1"])
    refused = world.verb(
        verbs.reload, "m", ReloadWish(version="3", set={"static": most + 9 * GIB}), world.now
    )
    assert isinstance(refused, Swap)
    assert (refused.state, "does not fit" in refused.text) == ("failed", True)


@pytest.mark.parametrize("verb", ["drain", "cordon", "unload", "lost", "restart", "stop", "kill"])
def test_whoever_takes_the_slot_out_of_use_ends_it(verb: str) -> None:
    world = world_of()
    heir = held(world)
    match verb:
        case "drain":
            world.verb(verbs.drain, "gpu0", world.now, "me", None)
        case "cordon":
            world.verb(verbs.cordon, "gpu0", world.now, "me", "")
        case "unload":
            world.verb(verbs.unload, "m", world.now)
        case "lost" | "restart":
            world.post(ev.DeviceFaulted(device="gpu0", action=verb, text="Xid"))
        case "stop":
            world.do(world.fleet.stop(world.now, 1.0))
        case _:
            world.do(world.fleet.kill_all(world.now))
    world.run(5)
    assert heir.state is State.GONE
    if verb == "restart":
        world.until(world.all_ready)
        held(world)
    else:
        world.run(20)
        assert len(world.workers) == 2
        assert len(world.alive("gpu0")) == (verb == "cordon")
    if verb == "stop":
        assert world.fleet.is_empty()
        assert promised(world) == 0
    if verb in ("drain", "cordon"):
        world.verb(verbs.uncordon, "gpu0", world.now)
        world.until(world.all_ready)
        held(world)


def test_a_restart_of_a_worker_in_trouble_begins_with_it() -> None:
    world = world_of()
    heir = held(world)
    world.workers["gpu0", 1].beat = world.config.supervision.suspect_after + 1
    world.until(lambda: world.state("gpu0") == "suspect")
    change = world.verb(verbs.restart, "gpu0", world.now)
    world.until(world.all_ready, 5)
    assert world.life("gpu0") is heir
    assert change.state == "done"  # type: ignore[attr-defined]
    assert heir.assignment is world.fleet.slots["gpu0"].wanted


def test_slots_laid_out_anew_leave_none_behind() -> None:
    world = world_of()
    old = held(world)
    config = msgspec.structs.replace(MODEL, workers=2)
    world.verb(lambda fleet: fleet.replan("m", config, world.now))
    world.run(20)
    assert old.state is State.GONE
    assert world.all_ready()


def test_none_is_prepared_where_a_context_has_no_room() -> None:
    world = world_of(gib=10, static=8 * GIB)
    world.until(world.all_ready)
    world.run(20)
    assert len(world.workers) == 1
    assert words(world).startswith("none: a context takes 640MiB of gpu0, ")


def test_on_a_cpu_it_needs_no_room() -> None:
    world = box(1, kind="cpu", gib=4, static=3 * GIB, models={"m": MODEL})
    held(world, "cpu0")
    assert world.fleet.books.ledger.promised("cpu0") == 3 * GIB


def test_its_context_is_promised_and_given_back() -> None:
    world = world_of()
    world.until(world.all_ready)
    alone = promised(world)
    heir = held(world)
    assert promised(world) == alone + CONTEXT_BYTES
    world.die("gpu0", heir.generation)
    assert promised(world) == alone


def test_a_worker_that_wants_to_start_there_comes_first() -> None:
    """The other model needs what the standby holds, though nobody else has to leave."""
    models = {
        "m": MODEL,
        "big": ModelConfig(handler="x:Z", on_demand=True, static=12 * GIB),
        "idle": ModelConfig(handler="x:Z", on_demand=True, static=GIB),
    }
    world = box(1, gib=24, static=7 * GIB, models=models)
    world.post(ev.ModelWanted(model="idle"))
    heir = held(world, "gpu0.0")
    free = world.fleet.books.room("gpu0")
    assert free is not None
    big = world.fleet.models["big"].current
    config = msgspec.structs.replace(big.config, static=free + 1)
    world.fleet.models["big"].current = dataclasses.replace(big, config=config)
    world.post(ev.ModelUsed(models=("m",)))
    world.post(ev.ModelWanted(model="big"))
    world.until(lambda: world.serving("big") == ["1"], 20)
    assert heir.outcome is not None
    assert heir.outcome.text == "it made room for the worker of gpu0.1"
    assert (world.serving("m"), world.serving("idle")) == (["1"], ["1"])
    world.run(2 * MADE_ROOM_S)
    assert words(world, "gpu0.0").startswith("none: a context takes")


def test_memory_that_others_take_is_given_up_first() -> None:
    world = world_of()
    heir = held(world)
    taken = 20 * GIB
    world.sample = lambda: world.post(  # type: ignore[method-assign]
        ev.DeviceSampled(device="gpu0", total=24 * GIB, used=GIB + taken, ours=GIB)
    )
    world.run(1)
    assert heir.state is State.GONE
    world.run(30)
    assert (len(world.workers), world.serving("m")) == (2, ["1"])
    taken = 0
    held(world)


def test_a_shortage_that_is_only_seen_for_a_moment_costs_nothing() -> None:
    """A worker that loads is promised its memory, and may pass for a stranger meanwhile."""
    world = world_of()
    heir = held(world)
    world.post(ev.DeviceSampled(device="gpu0", total=24 * GIB, used=21 * GIB, ours=GIB))
    assert world.fleet.books.room("gpu0") == 0
    world.run(1)
    assert heir.state is State.HELD


def test_the_caps_leave_room_for_the_contexts_of_standbys() -> None:
    with_one, without = world_of(), box(1)
    for world in (with_one, without):
        world.until(world.all_ready)
    caps = [w.fleet.books.cap(w.life("gpu0"), [], surge=False) for w in (without, with_one)]
    assert caps[0] - caps[1] == CONTEXT_BYTES

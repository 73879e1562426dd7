"""What the runtime makes of exits and of changes that end."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from gpusup.supervisor import events as ev
from gpusup.supervisor import verbs
from gpusup.supervisor.change import Change
from gpusup.supervisor.fleet import Fleet
from gpusup.supervisor.records import Events
from gpusup.supervisor.runtime import Runtime
from gpusup.supervisor.verbs import ReloadWish

from .test_carry import carried
from .world import World, box


def runtime_of(world: World, fleet: Fleet | None = None) -> Runtime:
    def nothing(*words: Any) -> None: ...

    around: Any = SimpleNamespace(
        publish=nothing,
        persist=nothing,
        reclaim=nothing,
        spec=nothing,
        tidy=nothing,
        was_host_oom=lambda: False,
    )
    links: Any = SimpleNamespace(expect=nothing, forget=nothing, send=nothing)
    launcher: Any = SimpleNamespace(launch=lambda *words: SimpleNamespace(pid=None))
    return Runtime(
        fleet or world.fleet,
        launcher=launcher,
        links=links,
        around=around,
        events=Events(),
        now=lambda: world.now,
    )


def up() -> World:
    world = box(1)
    world.until(world.all_ready)
    return world


def ended_swap(world: World) -> Change:
    change = world.verb(verbs.reload, "m", ReloadWish(version="2"), world.now)
    assert isinstance(change, Change)
    world.until(lambda: not change.is_active())
    return change


def test_a_change_that_ended_before_an_upgrade_is_not_told_again() -> None:
    world = up()
    ended_swap(world)
    runtime = runtime_of(world, carried(world))
    told: list[Change] = []
    runtime.on_change_end = told.append
    runtime.post(ev.Ticked())
    assert told == []


def test_a_change_that_ends_is_told_once_and_forgotten_with_the_fleets_own() -> None:
    world = up()
    runtime = runtime_of(world)
    told: list[Change] = []
    runtime.on_change_end = told.append
    change = ended_swap(world)
    for _ in range(3):
        runtime.post(ev.Ticked())
    assert told == [change]
    world.fleet.changes.clear()
    runtime.post(ev.Ticked())
    assert runtime._ended == set()


def test_a_start_for_which_there_is_no_descriptor_is_tried_again_later() -> None:
    world = up()
    runtime = runtime_of(world)

    def launch(*words: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    runtime.launcher.launch = launch  # type: ignore[assignment]
    runtime.post(ev.WorkerExited(slot="gpu0", generation=1, returncode=-9))
    runtime.post(ev.MemoryReturned(slot="gpu0", generation=1))
    slot = world.fleet.slots["gpu0"]
    world.now = slot.retry_at
    runtime.post(ev.Ticked())
    assert slot.last_exit == "cannot start a worker: Too many open files"
    assert slot.retry_at > world.now


@pytest.mark.parametrize(
    ("returncode", "last_error", "text"),
    [
        (1, "", "exit 1: ValueError: no such file"),
        (1, "the device failed", "exit 1: the device failed"),
        (-11, "", "signal 11"),
        (0, "", "exit 0"),
    ],
)
def test_an_exit_is_told_with_the_workers_last_line(
    returncode: int, last_error: str, text: str
) -> None:
    world = up()
    runtime = runtime_of(world)
    process: Any = SimpleNamespace(pid=1)
    runtime.adopt(("gpu0", 1), process)
    runtime.workers["gpu0", 1].last_error = last_error
    runtime.exit_callback(("gpu0", 1))(returncode, "ValueError: no such file")
    outcome = world.life("gpu0").outcome
    assert outcome is not None
    assert outcome.text == text

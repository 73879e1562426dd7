"""Leaks are watched as long as the worker lives, and no longer."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gpusup.conf.schema import LeakConfig
from gpusup.supervisor import tallies as tallies_module
from gpusup.supervisor.tallies import Tallies
from gpusup.worker.wire import Counters, Load, Memory, Pong

from .world import World, box


def tallies_of(world: World, told: list[str]) -> Tallies:
    fake: Any = SimpleNamespace(
        fleet=world.fleet,
        config=SimpleNamespace(leak=LeakConfig()),
        runtime=SimpleNamespace(tell=lambda kind, text, level, fields: told.append(kind)),
        collect_evidence=lambda *words: None,
    )
    return Tallies(fake)


def grow(world: World, tallies: Tallies, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour in which every request leaves a MiB behind."""
    for rows in range(0, 3000, 50):
        monkeypatch.setattr(tallies_module, "time", SimpleNamespace(monotonic=partial(float, rows)))
        tallies.on_pong(
            world.life("gpu0"),
            Pong(
                serial=rows,
                memory=Memory(allocated=rows * 2**20),
                counters=Counters(rows=rows),
                load=Load(0, 0, 0, 0.0),
            ),
        )


def test_a_slope_and_an_alarm_end_with_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    world = box(1)
    world.until(world.all_ready)
    told: list[str] = []
    tallies = tallies_of(world, told)
    grow(world, tallies, monkeypatch)
    assert list(tallies.leak_slopes()) == ["gpu0"]
    assert told == ["leak"]
    world.die("gpu0", 1)
    world.until(world.all_ready)
    assert tallies.leak_slopes() == {}
    grow(world, tallies, monkeypatch)
    assert told == ["leak", "leak"]
    assert set(tallies._leaks) == tallies._alarmed == {("gpu0", 2)}

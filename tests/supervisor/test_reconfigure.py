"""A configuration read again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusup.conf.load import load_file
from gpusup.supervisor.layout import DevicePlace
from gpusup.supervisor.reconfigure import reconfigure

from .world import GIB, World

MODEL = '[models.m]\nhandler = "gpusup.worker.digits:Digits"\n'


@pytest.mark.parametrize(
    ("more", "sections"),
    [
        ("", ""),
        ("[leak]\nrecycle = true\n", "[leak]"),
        ('[log]\nformat = "json"\n[watermark]\nqueue = 0.5\n', "[watermark], [log]"),
    ],
)
def test_a_section_that_needs_a_restart_is_named(tmp_path: Path, more: str, sections: str) -> None:
    path = tmp_path / "gpusup.toml"
    path.write_text(MODEL)
    loaded = load_file(path)
    world = World(loaded.config, {"gpu0": DevicePlace("gpu0", "cuda", "GPU-0", 24 * GIB)})
    told: list[str] = []
    runtime = SimpleNamespace(
        fleet=world.fleet, tell=lambda kind, text, level: told.append(f"{level}: {text}")
    )
    fake: Any = SimpleNamespace(loaded=loaded, runtime=runtime)
    path.write_text(more + MODEL)
    assert reconfigure(fake) == []
    text = f"warning: {sections} changed: takes effect at the next restart"
    assert told == ([text] if sections else [])


def test_a_standby_is_switched_without_a_new_worker(tmp_path: Path) -> None:
    path = tmp_path / "gpusup.toml"
    path.write_text(MODEL)
    loaded = load_file(path)
    world = World(loaded.config, {"gpu0": DevicePlace("gpu0", "cuda", "GPU-0", 24 * GIB)})
    world.until(world.all_ready)

    def change(verb: Any) -> Any:
        made, actions = verb(world.now)
        world.do(actions)
        return made

    runtime = SimpleNamespace(fleet=world.fleet, change=change, tell=lambda *words: None)
    box: Any = SimpleNamespace(loaded=loaded, runtime=runtime)
    slot = world.fleet.slots["gpu0"]
    path.write_text(MODEL + "standby = true\n")
    (number,) = reconfigure(box)
    assert world.fleet.changes[number].state == "done"
    world.until(lambda: slot.standby is not None)
    assert reconfigure(box) == []
    path.write_text(MODEL + 'standby = false\nbudget = "9s"\n')
    (number,) = reconfigure(box)  # something else as well: that is for new workers
    world.until(lambda: world.fleet.changes[number].state == "done")
    assert world.life("gpu0").generation > 2
    assert slot.standby is None

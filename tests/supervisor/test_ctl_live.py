"""What an operator sees while a change goes on."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from gpusup.supervisor.ctl_live import picture, watch

VIEW = {
    "id": "3",
    "title": "reload m to version 2",
    "state": "running",
    "age_s": 1.5,
    "steps": [[0.0, "checking version 2"]],
    "progress": {
        "stage": "surge",
        "slots_done": 1,
        "slots": 4,
        "slot": "gpu1",
        "phase": "weights",
        "loaded_bytes": 2**30,
        "total_bytes": 5 * 2**30,
    },
}


class Changes:
    """A client that is told of one view after the other."""

    def __init__(self, *views: Any) -> None:
        self.views = list(views)

    def get(self, *path: str) -> Any:
        return self.views.pop(0)


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def text_of(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_picture_has_the_slots_and_the_bytes() -> None:
    screen = console()
    screen.print(picture(VIEW))
    for words in ("reload m to version 2", "1/4 slots", "gpu1 weights", "1.0GiB of 5.0GiB"):
        assert words in text_of(screen)


def test_each_step_is_printed_once_and_the_last_view_comes_back() -> None:
    screen = console()
    ended = {**VIEW, "state": "done", "steps": [*VIEW["steps"], [2.0, "gpu1: serves"]]}  # type: ignore[misc]
    found = watch(Changes(VIEW, ended), "3", None, screen)  # type: ignore[arg-type]
    assert found is ended
    assert text_of(screen).count("checking version 2") == 1
    assert text_of(screen).count("gpu1: serves") == 1


def test_it_ends_when_its_time_is_over() -> None:
    assert watch(Changes(VIEW), "3", 0.0, console())["state"] == "running"  # type: ignore[arg-type]

"""A change as it goes on, live on a terminal: its steps, and a bar for what moves right now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from . import ctl_view
from .ctl_client import Client

LOOK_S: Final = 0.1
SPIN: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def watch(
    client: Client, change_id: str, until: float | None, console: Console | None = None
) -> Any:
    """Until the change has ended or waits for a word, or it is `until`. Returns its last view."""
    console = console or Console(highlight=False)
    told = 0
    with Live(console=console, transient=True, refresh_per_second=10) as live:
        while True:
            found = client.get("changes", change_id)
            steps = found.get("steps", ())
            for one in steps[told:]:
                live.console.print(Text(ctl_view.step(one)))
            told = len(steps)
            if found["state"] != "running":
                return found
            if until is not None and time.monotonic() >= until:
                return found
            live.update(picture(found))
            time.sleep(LOOK_S)


def picture(found: Mapping[str, Any]) -> Group:
    """One line for the whole change, and one for the worker that is being loaded."""
    progress = found.get("progress", {})
    age = found.get("age_s", 0.0)
    grid = Table.grid(padding=(0, 1))
    done, slots = progress.get("slots_done", 0), progress.get("slots", 0)
    head = f"{SPIN[int(age * 10) % len(SPIN)]} {found['title']}"
    bar = ProgressBar(total=max(1, slots), completed=done, width=24) if slots else ""
    grid.add_row(head, bar, f"{done}/{slots} slots" if slots else "", ctl_view.age(age))
    total, loaded = progress.get("total_bytes", 0), progress.get("loaded_bytes", 0)
    phase = " ".join(filter(None, (progress.get("slot"), progress.get("phase"))))
    if phase and total and progress.get("phase") in ("weights", "prepare"):
        part = ProgressBar(total=total, completed=min(loaded, total), width=24)
        grid.add_row(f"  {phase}", part, f"{ctl_view.size(loaded)} of {ctl_view.size(total)}", "")
    elif phase:
        grid.add_row(f"  {phase}", "", progress.get("stage", ""), "")
    return Group(grid)

"""`gpusupctl top`: devices with their bands, slots, queues and latencies, redrawn every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import ctl_view, exit_codes
from .ctl_client import Client, CtlError

_EVERY_S: Final = 1.0


def run(client: Client, *, once: bool) -> int:
    """Until Ctrl-C; with `once` one picture, also where there is no terminal."""
    console = Console(no_color=not ctl_view.colours_wanted(sys.stdout))
    if once or not console.is_terminal:
        width = None if console.is_terminal else 140
        before, at = client.get("status"), time.monotonic()
        time.sleep(_EVERY_S)  # a rate takes two looks
        now = client.get("status")
        per_second = rates(before, now, time.monotonic() - at)
        Console(no_color=console.no_color, width=width).print(picture(now, per_second))
        return exit_codes.OK
    before = client.get("status")
    at = time.monotonic()
    with Live(picture(before, {}), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_EVERY_S)
            try:
                now = client.get("status")
            except CtlError as error:
                # It may be restarting: the last picture stays, with the reason above it.
                silent = {**before, "state": "down", "reason": f"no answer: {error}"}
                live.update(picture(silent, {}), refresh=True)
                continue
            passed, at = time.monotonic() - at, time.monotonic()
            live.update(picture(now, rates(before, now, passed)), refresh=True)
            before = now


def rates(before: Mapping[str, Any], now: Mapping[str, Any], passed_s: float) -> dict[str, float]:
    """Requests a second of each model between two looks."""
    counts = {model["name"]: model["requests"] for model in before["models"]}
    return {
        model["name"]: max(0.0, (model["requests"] - counts[model["name"]]) / passed_s)
        for model in now["models"]
        if model["name"] in counts and passed_s > 0
    }


def picture(view: Mapping[str, Any], per_second: Mapping[str, float]) -> RenderableType:
    head = Text.assemble(
        ("gpusup ", "bold"),
        (view["state"], ctl_view.colour_of(view["state"])),
        f"  {view['listen']}  up {ctl_view.age(view['uptime_s'])}",
        f"  {view['reason']}" if view.get("reason") else "",
    )
    parts: list[RenderableType] = [head, _devices(view), _slots(view), _models(view, per_second)]
    running = [c for c in view.get("changes", ()) if c["state"] in ("running", "waiting")]
    if running:
        parts.append(_changes(running))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column not in ("why", "name"), overflow="ellipsis")
    return table


def _devices(view: Mapping[str, Any]) -> Table:
    marks = (view.get("queue_mark", 0.85), view.get("shed_mark", 0.92))
    table = _table("", "device", "band", "use", "", "free", "total", "leased", "foreign", "name")
    for device in view.get("devices", ()):
        known = device["known"]
        share = device["watermark"]
        table.add_row(
            device["name"],
            Text(device["band"], style=ctl_view.colour_of(device["band"])),
            ctl_view.bars(share if known else 0.0, marks=marks),
            f"{share:.0%}" if known else "?",
            ctl_view.size(device["free"]) if known else ctl_view.unread(device["age_s"]),
            ctl_view.size(device["total"]),
            ctl_view.size(device["leased"]),
            ctl_view.size(device["foreign"]),
            device.get("fault") or device.get("title", ""),
        )
    return table


def _slots(view: Mapping[str, Any]) -> Table:
    table = _table(
        "", "slot", "state", "since", "model", "gen", "in-flight", "queued", "memory", "why"
    )
    for slot in view.get("slots", ()):
        state = slot["state"]
        if slot["slot_state"] != "schedulable":
            state = f"{state},{slot['slot_state']}"
        memory = slot.get("memory", {})
        table.add_row(
            slot["slot"],
            Text(state, style=ctl_view.colour_of(state)),
            ctl_view.age(slot["since_s"]),
            f"{slot['model']}@{slot['version']}" if slot["model"] else "-",
            str(slot["generation"]),
            str(slot["in_flight"]),
            str(slot["queued"]),
            ctl_view.size(memory.get("reserved")),
            _why(slot),
        )
    return table


def _why(slot: Mapping[str, Any]) -> str:
    words = []
    if slot["state"] in ("loading", "warming", "held"):
        words.append(slot.get("phase", ""))
    words += [slot.get("why", ""), slot.get("successor", ""), ctl_view.standby(slot)]
    if slot.get("next_retry_s") is not None:
        words.append(
            f"{slot.get('last_exit', '')}; next try in {ctl_view.age(slot['next_retry_s'])}"
        )
    return "; ".join(word for word in words if word)


def _models(view: Mapping[str, Any], per_second: Mapping[str, float]) -> Table:
    table = _table("", "model", "state", "version", "ready", "req/s", "queued", "p50", "p99", "why")
    for model in view.get("models", ()):
        rate = per_second.get(model["name"])
        table.add_row(
            model["name"],
            Text(model["state"], style=ctl_view.colour_of(model["state"])),
            model["version"],
            f"{model['ready']}/{model['slots']}",
            "-" if rate is None else f"{rate:.1f}",
            str(model["queued"]),
            ctl_view.millis(model.get("p50_s")),
            ctl_view.millis(model.get("p99_s")),
            model.get("reason", ""),
        )
    return table


def _changes(running: list[Any]) -> Table:
    table = _table("", "change", "what", "state", "since", "why")
    for change in running:
        steps = change.get("steps") or ((0.0, ""),)
        table.add_row(
            change["id"],
            change["title"],
            Text(change["state"], style=ctl_view.colour_of(change["state"])),
            ctl_view.age(change["age_s"]),
            steps[-1][1],
        )
    return table

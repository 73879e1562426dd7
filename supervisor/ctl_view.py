"""How `gpusupctl` writes things down: tables, ages, sizes, changes. Plain text, light imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "bold": "1", "dim": "2"}
_GOOD = {"ready", "schedulable", "normal", "serving", "done"}
_BAD = {"failed", "unkillable", "quarantined", "lost", "down", "shed", "rolled-back"}


def colours_wanted(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def colour_of(word: str) -> str:
    return "green" if word in _GOOD else "red" if word in _BAD else "yellow"


def age(seconds: float | None) -> str:
    """0.4s, 12s, 5m03s, 7h12m, 3d04h."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(count: int | None) -> str:
    """Bytes with the units of the configuration file: 512MiB, 23.5GiB."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.1f}GiB"


def millis(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}ms"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, colours: bool = False
) -> list[str]:
    """Aligned columns, two spaces between them. Colour never changes the alignment."""
    cells = [[str(cell) if cell != "" else "-" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    lines = ["  ".join(h.ljust(w) for h, w in zip(head, widths, strict=True)).rstrip()]
    if colours:
        lines[0] = coloured(lines[0], "dim")
    for row in cells:
        padded = []
        for name, cell, width in zip(head, row, widths, strict=True):
            text = cell.ljust(width)
            if colours and name in ("STATE", "SLOT-STATE", "BAND") and cell != "-":
                text = coloured(cell, colour_of(cell)) + " " * (width - len(cell))
            padded.append(text)
        lines.append("  ".join(padded).rstrip())
    return lines


def status(view: Mapping[str, Any], *, wide: bool = False, colours: bool = False) -> list[str]:
    """What `gpusupctl status` prints."""
    state = view["state"]
    first = (
        f"gpusup {view['version']} is {coloured(state, colour_of(state)) if colours else state}"
        f" on {view['listen']}, pid {view['pid']}, up {age(view['uptime_s'])}"
    )
    lines = [first]
    if view.get("reason"):
        lines.append(f"  {view['reason']}")
    lines.append("")
    lines += _slots(view["slots"], wide=wide, colours=colours)
    if view.get("models"):
        lines += ["", *_models(view["models"], colours=colours)]
    if view.get("devices"):
        lines += ["", *_devices(view["devices"], wide=wide, colours=colours)]
    if wide and view.get("proxies"):
        head = ("PROXY", "STATE", "PID", "RESTARTS", "CONNECTIONS", "QUEUED")
        lines += ["", *table(head, [
            (p["name"], p["state"], str(p["pid"]), str(p["restarts"]), str(p["connections"]),
             str(p["queued"]))
            for p in view["proxies"]
        ], colours=colours)]  # fmt: skip
    running = [c for c in view.get("changes", ()) if c["state"] in ("running", "waiting")]
    if running:
        lines += ["", *changes(running, colours=colours)]
    return lines


def _slots(slots: Sequence[Mapping[str, Any]], *, wide: bool, colours: bool) -> list[str]:
    if not slots:
        return ["no slots"]
    head = ["SLOT", "STATE", "SINCE", "MODEL", "PID", "GEN", "RESTARTS", "IN-FLIGHT", "MEMORY"]
    if wide:
        head += ["DEVICE", "SLOT-STATE", "QUEUED", "BEAT", "PROGRESS", "RETRY", "LAST-EXIT"]
    head.append("WHY")
    rows = []
    for slot in slots:
        shown = slot["state"]
        if not wide and slot["slot_state"] != "schedulable":
            shown = f"{shown},{slot['slot_state']}"
        model = f"{slot['model']}@{slot['version']}" if slot["model"] else ""
        memory = slot.get("memory", {})
        row = [
            slot["slot"], shown, age(slot["since_s"]), model, str(slot["pid"] or ""),
            str(slot["generation"]), str(slot["restarts"]), str(slot["in_flight"]),
            size(memory["reserved"]) if "reserved" in memory else "",
        ]  # fmt: skip
        why = slot.get("why", "")
        if slot.get("phase") and slot["state"] in ("loading", "warming"):
            why = f"{slot['phase']} {why}".strip()
        why = "; ".join(filter(None, (why, standby(slot))))
        retry = slot.get("next_retry_s")
        if wide:
            row += [
                slot["device"], slot["slot_state"], str(slot["queued"]),
                age(slot.get("beat_age_s")), age(slot.get("progress_age_s")), age(retry),
                slot.get("last_exit", ""),
            ]  # fmt: skip
        elif retry is not None:
            why = f"{why}; next try in {age(retry)}".removeprefix("; ")
        rows.append([*row, why])
    return table(head, rows, colours=colours)


def standby(slot: Mapping[str, Any]) -> str:
    """ "standby ready", how far it is, or why there is none; "" where none is configured."""
    said = slot.get("standby", "")
    if said.startswith("none"):
        return f"no standby{said.removeprefix('none')}"
    return f"standby {said}" if said else ""


def _models(models: Sequence[Mapping[str, Any]], *, colours: bool) -> list[str]:
    head = ("MODEL", "STATE", "VERSION", "READY", "QUEUED", "P50", "P99", "WHY")
    rows = []
    for model in models:
        version = model["version"]
        if model.get("canary_version"):
            share = f"{model['canary_share']:.0%}"
            version = f"{version}, {share} {model['canary_version']}"
        rows.append(
            (
                model["name"],
                model["state"],
                version,
                f"{model['ready']}/{model['slots']}",
                str(model["queued"]),
                millis(model.get("p50_s")),
                millis(model.get("p99_s")),
                model.get("reason", ""),
            )
        )
    return table(head, rows, colours=colours)


def unread(age_s: float) -> str:
    return f"{age(age_s)} old" if age_s >= 0 else "never read"


def _devices(devices: Sequence[Mapping[str, Any]], *, wide: bool, colours: bool) -> list[str]:
    head = ["DEVICE", "BAND", "USE", "FREE", "TOTAL", "LEASED", "FOREIGN", "NAME"]
    if wide:
        head += ["FIGURES", "AGE", "RELEASE"]
    rows = []
    for device in devices:
        known = device["known"]
        row = [
            device["name"],
            device["band"],
            f"{device['watermark']:.0%}" if known else "unknown",
            size(device["free"]) if known else unread(device["age_s"]),
            size(device["total"]),
            size(device["leased"]),
            size(device["foreign"]),
            device.get("fault") or device.get("title") or device["uuid"] or device["kind"],
        ]
        if wide:
            row += [
                device.get("source", ""),
                age(device["age_s"]) if device["age_s"] >= 0 else "never",
                device.get("release", ""),
            ]
        rows.append(row)
    return table(head, rows, colours=colours)


def changes(found: Sequence[Mapping[str, Any]], *, colours: bool = False) -> list[str]:
    head = ("CHANGE", "STATE", "AGE", "TOOK", "WHAT", "RESULT")
    rows = [
        (
            change["id"],
            change["state"],
            age(change["age_s"]),
            age(change.get("took_s")),
            change["title"],
            change.get("text", ""),
        )
        for change in found
    ]
    return table(head, rows, colours=colours)


def change(found: Mapping[str, Any], *, colours: bool = False) -> list[str]:
    """One change with its steps."""
    state = found["state"]
    shown = coloured(state, colour_of(state)) if colours else state
    lines = [f"change {found['id']}: {found['title']}: {shown}"]
    if found.get("text"):
        lines[0] += f": {found['text']}"
    lines += [step(one) for one in found.get("steps", ())]
    lines += [f"  {name} = {value}" for name, value in found.get("numbers", {}).items()]
    return lines


def step(one: Sequence[Any]) -> str:
    after, text = one
    return f"  +{after:7.3f}s  {text}"


def event(found: Mapping[str, Any]) -> str:
    """One event as a line: time, kind, text, fields."""
    import time

    stamp = time.strftime("%H:%M:%S", time.localtime(found.get("time", 0)))
    text = str(found.get("text", ""))
    fields = " ".join(f"{k}={v}" for k, v in (found.get("fields") or {}).items() if v != "")
    return f"{stamp} {found.get('kind', ''):<10} {text}{'  ' + fields if fields else ''}"


def bars(share: float, width: int = 20, marks: Sequence[float] = ()) -> str:
    """A bar of `width` characters with the watermarks in it."""
    filled = round(max(0.0, min(1.0, share)) * width)
    cells = ["█"] * filled + ["·"] * (width - filled)
    for mark in marks:
        at = min(width - 1, int(mark * width))
        cells[at] = "┃" if cells[at] == "█" else "│"
    return "".join(cells)


def out(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()

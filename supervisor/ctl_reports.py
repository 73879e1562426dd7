"""How `gpusupctl` shows plans, leases and bucket advice as text. Light imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ctl_view import size, table


def plan(found: Mapping[str, Any]) -> list[str]:
    """Who holds what of each device, and what is left, as a sum to check."""
    lines: list[str] = []
    for device in found.get("devices", ()):
        lines.append(f"{device['device']}: {size(device['total'])} in all")
        rows = []
        for holder in device.get("holders", ()):
            who = f"{holder['slot']} (generation {holder['generation']})"
            kind = "measured" if holder.get("settled") else "expected"
            rows.append((who, size(holder["static"]), size(holder["peak"]), kind))
        if rows:
            head = ("HOLDER", "AT REST", "BATCHES", "KNOWN")
            lines += [f"  {line}" for line in table(head, rows)]
        lines.append(f"  room for more: {size(device['room'])}")
    return lines


def leases(found: Mapping[str, Any]) -> list[str]:
    """Bytes promised to work in flight, by device and proxy; and the proxies' own load."""
    rows = [
        (device, proxy, size(count))
        for device, by_proxy in found.get("leases", {}).items()
        for proxy, count in by_proxy.items()
    ]
    lines = table(("DEVICE", "PROXY", "LEASED"), rows) if rows else ["no leases"]
    arenas = found.get("arena", {})
    if arenas:
        load = [
            (
                proxy,
                str(sum(found.get("in_flight", {}).get(proxy, {}).values())),
                str(sum(found.get("queued", {}).get(proxy, {}).values())),
                f"{size(arena['free'])} of {size(arena['total'])}",
            )
            for proxy, arena in arenas.items()
        ]
        lines += ["", *table(("PROXY", "IN-FLIGHT", "QUEUED", "ARENA FREE"), load)]
    return lines


def buckets(found: Mapping[str, Any]) -> list[str]:
    """Proposals of input shapes, each with the share of padding it would leave."""
    lines = [f"{found['model']}: {found['requests']} requests of {found['shapes']} shapes"]
    now = found.get("padding_now")
    if found.get("current"):
        known = "some shapes fit in none" if now is None else f"{now:.1%} padding"
        lines.append(f"  now: {_shapes(found['current'])}: {known}")
    one = found.get("padding_with_one_bucket")
    if one is not None:
        lines.append(f"  with one bucket: {one:.1%} padding")
    for proposal in found.get("proposals", ()):
        lines.append(
            f"  {len(proposal['buckets'])} buckets: {_shapes(proposal['buckets'])}: "
            f"{proposal['padding']:.1%} padding, {proposal['saves']:.1%} less"
        )
    if found.get("note"):
        lines.append(f"  {found['note']}")
    return lines


def reload_plan(found: Mapping[str, Any]) -> list[str]:
    """What `reload-model --dry-run` shows."""
    head = ("SLOT", "STRATEGY", "NEEDS", "ROOM", "WHY")
    return table(
        head,
        [
            (
                row["slot"],
                row["strategy"],
                size(row.get("need_bytes")),
                size(row.get("room_bytes")),
                row.get("why", ""),
            )
            for row in found.get("plan", ())
        ],
    )


def _shapes(shapes: Any) -> str:
    return ", ".join("x".join(str(side) for side in shape) for shape in shapes)

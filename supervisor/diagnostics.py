"""What is written down when a device changes its band or a request is refused for memory. Pure.

Enough to answer, a week later, the only question that matters: who had it?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpusup.worker.wire import Memory, Pong

from .probe_wire import DeviceSample
from .wire import DeviceInfo, Shed

#: Of a memory_summary; the first lines are the table that matters.
SUMMARY_LINES: Final = 40


def memory_record(
    shed: Shed,
    *,
    info: DeviceInfo | None,
    sample: DeviceSample | None,
    workers: Mapping[str, Pong],
    pids: Mapping[int, str],
    names: Mapping[int, str],
    summaries: Mapping[str, str] | None = None,
    at: float = 0.0,
) -> dict[str, Any]:
    """One record, fit for JSON. Sizes in bytes.

    `workers`: slot -> its last word. `pids`: pid -> slot, for what is ours. `names`: pid -> name of
    the process, ours and others'. `summaries`: slot -> memory_summary text. `at`: seconds since
    the epoch.
    """
    record: dict[str, Any] = {
        "at": at,
        "device": shed.device,
        "before": shed.before,
        "after": shed.after,
        "watermark": round(shed.watermark, 4),
        "projected": round(shed.projected, 4),
        "cost": shed.cost,
        "leased": shed.leased,
        "in_flight": shed.in_flight,
    }
    if shed.model:
        record["model"] = shed.model
    if shed.request_id:
        record["request_id"] = shed.request_id
    if info is not None:
        record["memory"] = {
            "total": info.total,
            "free": info.free,
            "reclaimable": info.reclaimable,
            "foreign": info.foreign,
            "known": info.known,
            "age_s": round(info.age_s, 3),
            "source": info.source,
        }
    record["workers"] = [
        {"slot": slot, **_memory(pong.memory), "running": list(pong.running)}
        for slot, pong in sorted(workers.items())
    ]
    if sample is not None and sample.processes is not None:
        record["processes"] = [
            {
                "pid": process.pid,
                "name": names.get(process.pid, ""),
                "slot": pids.get(process.pid, ""),
                "foreign": process.pid not in pids,
                "used": process.used,
            }
            for process in sorted(
                sample.processes, key=lambda process: process.used or 0, reverse=True
            )
        ]
    record["running"] = sorted({r for pong in workers.values() for r in pong.running})
    record["top_allocations"] = {
        slot: head(text) for slot, text in sorted((summaries or {}).items()) if text
    }
    return record


def head(text: str, lines: int = SUMMARY_LINES) -> list[str]:
    """The first lines of a memory_summary, without its ruler lines."""
    kept = [line.rstrip() for line in text.splitlines() if line.strip(" |=-+")]
    return kept[:lines]


def _memory(memory: Memory) -> dict[str, int]:
    return {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "peak": memory.peak,
        "static": memory.static,
        "context": memory.context,
    }

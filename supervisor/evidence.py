"""What is written down when memory runs short or a model leaks: who had it, and what ran."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from gpusup.worker import wire as worker_wire

from . import actions as act
from . import wire
from .change import Change
from .diagnostics import memory_record
from .fleet import Fleet, Refused
from .pulse import Pulse
from .reclaim import process_name
from .records import Records
from .runtime import Runtime
from .worker_link import WorkerLinks

log = logging.getLogger("gpusup.supervisor")


class Evidence:
    """A part of the box (box.py), which has the fields named here."""

    fleet: Fleet
    runtime: Runtime
    pulse: Pulse
    records: Records
    links: WorkerLinks

    def on_shed(self, proxy: str, shed: wire.Shed) -> None:
        """A band changed or a request was shed: write down who had the memory."""
        text = (
            f"{shed.device}: {shed.before} -> {shed.after} at {shed.projected:.1%} projected"
            f"{f', {shed.model} shed' if shed.model else ''}"
        )
        self.runtime.tell("band", text, "warning", {"device": shed.device, "proxy": proxy})
        self.records.later(shed.device, lambda summaries: self._memory_record(shed, summaries))
        if shed.after == "shed":
            for life in self.fleet.lives():
                if life.device == shed.device:
                    self.links.send(life.slot, life.generation, worker_wire.Trim())
                    ask = worker_wire.AskReport("memory_summary")
                    self.links.send(life.slot, life.generation, ask)

    def _memory_record(self, shed: wire.Shed, summaries: dict[str, str]) -> dict[str, Any]:
        here = [x for x in self.fleet.lives() if x.device == shed.device and not x.exited]
        sample = self.pulse.sample(shed.device, time.monotonic())
        pongs = {}
        for life in here:
            known = self.runtime.workers.get((life.slot, life.generation))
            if known and known.pong:
                pongs[life.slot] = known.pong
                if text := known.reports.get("memory_summary"):
                    summaries[life.slot] = text
        pids = {life.pid: life.slot for life in here}
        listed = {p.pid for p in (sample.processes or ())} if sample else set()
        return memory_record(
            shed,
            info=next((i for i in self.pulse.infos if i.name == shed.device), None),
            sample=sample,
            workers=pongs,
            pids=pids,
            names={pid: process_name(pid) for pid in {*pids, *listed}},
            summaries=summaries,
            at=time.time(),
        )

    def collect_evidence(self, kind: str, slot: str, fields: dict[str, Any]) -> None:
        life = self.fleet.slots[slot].worker
        if life is not None:
            ask = worker_wire.AskReport("memory_summary")
            self.links.send(slot, life.generation, ask)
        known = self.runtime.workers.get((slot, life.generation)) if life else None

        def record(summaries: dict[str, str]) -> dict[str, Any]:
            text = known.reports.get("memory_summary", "") if known else ""
            return {"kind": kind, "slot": slot, "at": time.time(), **fields, "memory_summary": text}

        self.records.later(f"{kind}-{slot}", record)

    def recycle(self, verb: Callable[[float], tuple[Change, list[act.Action]]]) -> None:
        """Replace a leaking worker by the swap path, as soon as the present step is through."""

        def start() -> None:
            try:
                self.runtime.change(verb)
            except Refused as refused:
                log.warning("leaking worker not replaced: %s", refused)

        asyncio.get_running_loop().call_soon(start)

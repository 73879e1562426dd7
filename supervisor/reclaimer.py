"""Watches until each dead worker's memory is back, and goes on watching when the limit is over."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from .reclaim import Release, describe, wait_released

if TYPE_CHECKING:
    from .box import Box

log = logging.getLogger("gpusup.supervisor")

AGAIN_S: Final = 2.0


class Reclaimer:
    def __init__(self, box: Box) -> None:
        self._box = box
        self._tasks: set[asyncio.Task[None]] = set()
        self.last: dict[str, Release] = {}

    def last_on(self, device: str) -> str:
        """For people: how the last release on a device went, "" if there was none."""
        slots = [s.name for s in self._box.fleet.slots.values() if s.device == device]
        found = [name for name in self.last if name in slots]
        return f"{found[-1]}: {describe(self.last[found[-1]])}" if found else ""

    def start(self, slot: str, generation: int, device: str, pid: int) -> None:
        task = asyncio.get_running_loop().create_task(self._watch(slot, generation, device, pid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, slot: str, generation: int, device: str, pid: int) -> None:
        limit = self._box.config.supervision.reclaim_limit
        while True:
            release = await self._wait(device, pid, limit)
            self.last.pop(slot, None)  # the latest stands last
            self.last[slot] = release
            if release.returned:
                if release.text:
                    log.warning("%s: %s", slot, release.text)
                self._box.runtime.reclaimed(slot, generation, "")
                return
            log.error("%s: %s", slot, release.text)
            self._box.runtime.reclaimed(slot, generation, release.text)
            limit = AGAIN_S

    async def _wait(self, device: str, pid: int, limit: float) -> Release:
        box = self._box
        fleet = box.runtime.fleet
        ledger = fleet.books.ledger

        def others() -> int:
            alive = box.pulse.memory_on(device)
            held = sum(max(m.reserved, m.allocated) + m.context for m in alive)
            return held + ledger.foreign(device)

        def ours() -> set[int]:
            return {life.pid for life in fleet.lives() if not life.exited} | box.probe.pids()

        return await wait_released(
            device=device,
            kind=fleet.devices[device].place.kind,
            pid=pid,
            latest=box.probe.latest,
            idle_at=box.pulse.baselines.idle_at(device),
            others=others,
            ours=ours,
            limit_s=limit,
        )

"""The orderly end: nothing new, finish what is there, end the workers, go."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .box import Box

log = logging.getLogger("gpusup.supervisor")

#: What is left of the drain limit for workers once the proxies have gone.
LAST_S: Final = 2.0


async def leave(box: Box) -> int:
    """Nothing new, finish what is there, end the workers, go."""
    limit = box.config.server.drain_limit
    log.info("stopping: %s", box.stop_reason)
    box.notify.stopping(box.stop_reason)
    box.notify.extend(limit + 2 * LAST_S)
    box.fleet.stopping = True
    box.runtime.perform(box.fleet.advance)
    forced = asyncio.get_running_loop().create_task(box.force.wait())
    # Balancers shall see that we are not ready before connections are no longer taken.
    await asyncio.wait((forced,), timeout=box.config.server.drain_notice)
    gone = asyncio.get_running_loop().create_task(box.proxies.stop(limit))
    await asyncio.wait((forced, gone), return_when=asyncio.FIRST_COMPLETED)
    box.runtime.perform(lambda now: box.fleet.stop(now, LAST_S))
    await _empty_within(box, limit)
    if not box.fleet.is_empty():
        box.runtime.perform(box.fleet.kill_all)
        await _empty_within(box, LAST_S)
    left = [life for life in box.fleet.lives() if not life.exited]
    for life in left:
        log.error("%s: pid %d does not die", life.slot, life.pid)
    box.save_now()
    box.end_children()
    await box.close_dashboard()
    await box.control.close()
    box.links.close()
    box.listeners.close()
    box.family.stop_janitor()
    return 1 if box.force.is_set() or left else 0


async def _empty_within(box: Box, seconds: float) -> None:
    """Until no worker is left, an operator loses patience, or the time is over."""
    until = time.monotonic() + seconds
    while not box.fleet.is_empty() and time.monotonic() < until:
        if box.force.is_set() and seconds > LAST_S:
            return
        await asyncio.sleep(0.02)

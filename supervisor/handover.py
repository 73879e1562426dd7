"""An upgrade in place, as the box goes through it: may it be now, can it be, what goes along.

    why = obstacle(box)            # "" if nothing is in the way
    await rehearse()               # a fresh interpreter imports the new code; raises ReexecError
    state = export(box)            # lets go of everything; nothing of the box works afterwards
    ...                            # execve (reexec.py), or, if that fails, straight on
    restore(box, state)            # in a new Box, before its loop looks at anything

Nothing is stopped for it but the probe, which holds no state of ours.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gpusup.conf.schema import Config

from . import carry
from .devices import Places
from .family import clean_env
from .life import State
from .poison import Poison
from .reexec import SCHEMA, ReexecError
from .zygotes import ZygoteLauncher

if TYPE_CHECKING:
    from .box import Box

_REHEARSE_S: Final = 60.0
_REHEARSAL: Final = (
    "import gpusup.supervisor.box, gpusup.supervisor.run, gpusup.supervisor.reexec as r;"
    "print('schema', r.SCHEMA)"
)


def obstacle(box: Box) -> tuple[str, str]:
    """(What is in the way, the change that is it), or ("", "")."""
    if box.fleet.stopping:
        return "gpusup is stopping", ""
    for change in box.fleet.changes.values():
        if change.is_active():
            return f"change {change.id} ({change.title}) is under way", change.id
    for life in box.fleet.lives():
        if life.state is State.SPAWNED:
            return f"{life.slot}: a worker is just being started; try again in a moment", ""
    for known in box.runtime.workers.values():
        if known.process.pid is None:
            return f"{known.process.slot}: a worker is just being started", ""
    return "", ""


async def rehearse() -> None:
    """Whether the code to go on with can be loaded and understands us. Raises ReexecError."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", _REHEARSAL, env=clean_env(),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise ReexecError(f"cannot start {sys.executable}: {error.strerror}") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), _REHEARSE_S)
    except TimeoutError:
        process.kill()
        raise ReexecError(f"the new code did not load within {_REHEARSE_S:g} s") from None
    if process.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ReexecError(f"the new code can't be loaded: {last[0][:300]}")
    if out.split() != [b"schema", str(SCHEMA).encode()]:
        text = out.decode(errors="replace").strip()
        raise ReexecError(f"the new code reads {text}, ours is {SCHEMA}: restart the service")


def export(box: Box) -> dict[str, Any]:
    """All that goes along. The descriptors in it are under keys in `_fd` (reexec.py)."""
    proxies = box.proxies.export()  # first: what it drops must not be in the tallies any more
    inner = {
        "fleet": carry.export_fleet(box.fleet),
        "known": [
            [*key, known.last_error, known.ready_at] for key, known in box.runtime.workers.items()
        ],
        "tallies": box.tallies.export(),
        "events": box.events.export(),
        "poison": box.poison.export(),
        "baselines": box.pulse.baselines.export(),
        "probe": box.probe.export(),
        "serial": box.serial,
    }
    living = [known.process for known in box.runtime.workers.values() if not known.process.exited]
    return {
        # Packed by itself: what users call their settings must not look like a descriptor.
        "box": msgspec.msgpack.encode(inner),
        "workers": [process.export() for process in living],
        "zygotes": box.launcher.export() if isinstance(box.launcher, ZygoteLauncher) else None,
        "links": box.links.export(),
        "proxies": proxies,
        "logs": box.logs.export(),
        "listeners": box.listeners.export(),
        "janitor": box.family.let_go_of_janitor(),
    }


class Carried:
    """What came over, as the new box asks for it. Raises msgspec's errors if it can't be read."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self.inner: dict[str, Any] = msgspec.msgpack.decode(state["box"])

    @property
    def config(self) -> Config:
        return carry.config_of(self.inner["fleet"])

    @property
    def places(self) -> Places:
        return carry.places_of(self.inner["fleet"])

    def restore_fleet(self, box: Box) -> None:
        """Before the runtime is made."""
        carry.restore_fleet(box.fleet, self.inner["fleet"])
        box.poison = Poison.restore(self.inner["poison"])
        box.tallies.restore(self.inner["tallies"])
        box.serial = self.inner["serial"]
        for proxy, report in box.tallies.latest.items():
            box.fleet.books.ledger.leased(proxy, report.leased)

    def restore_workers(self, box: Box) -> None:
        """When the runtime is there."""
        box.pulse.baselines.restore(self.inner["baselines"])
        known = {(row[0], row[1]): row[2:] for row in self.inner["known"]}
        for row in self.state["workers"]:
            key = (row["slot"], row["generation"])
            process = box.launcher.adopt(row, box.runtime.exit_callback(key))
            box.runtime.adopt(key, process)
            found = box.runtime.workers[key]
            found.last_error, found.ready_at = known[key]
        box.links.restore(self.state["links"])
        for life in box.fleet.lives():
            if life.state is State.RECLAIMING:
                box.reclaim(life.slot, life.generation, life.device, life.pid)
        box.runtime.tell("reexec", f"went on with new code at {time.strftime('%H:%M:%S')}")

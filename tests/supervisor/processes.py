"""Small real processes for tests: waiting for their end without sleeping, and scripts to run."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

LIMIT_S = 20.0


async def gone(pid: int, limit_s: float = LIMIT_S) -> None:
    """Returns when the process is dead (a zombie counts). Raises TimeoutError."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    loop.add_reader(pidfd, dead.set)
    try:
        async with asyncio.timeout(limit_s):
            await dead.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def script(folder: Path, name: str, body: str) -> str:
    """An executable Python script."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class Told:
    """Collects what is called back, and lets a test wait for the next."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    def __call__(self, *args: object) -> None:
        self.queue.put_nowait(args)

    async def next(self, limit_s: float = LIMIT_S) -> tuple[object, ...]:
        async with asyncio.timeout(limit_s):
            return await self.queue.get()

    @property
    def empty(self) -> bool:
        return self.queue.empty()

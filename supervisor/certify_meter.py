"""What the machine itself has left for a program while others work: a bare loop is timed.

Latencies of a service rise with what else runs for two reasons: it waits for a core, or the core is
slower, as one is that shares its execution units, caches and clock with a busy neighbour. The loop
does nothing but compute, with the precedence that a service has, so it sees the machine's share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from gpusup.conf.precedence import prefer

#: Some 5 ms of work, 20 times a second: too little to be in anybody's way.
_LOOP: Final = """\
import time
while True:
    time.sleep(0.045)
    began = time.perf_counter()
    x = 1
    for _ in range(60000):
        x = (x * 48271) % 2147483647
    print(time.perf_counter() - began, flush=True)
"""


def background(
    words: list[str], *, stdout: int = subprocess.DEVNULL, env: Any = None
) -> subprocess.Popen[str]:
    """As any other program on this machine: with a session of its own, and no precedence."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
        start_new_session=True,
    )
    # Who was started at a raised nice value may not lower it again: then its children keep that.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, process.pid, 0)
    return process


def start() -> subprocess.Popen[str]:
    """The loop. It writes the seconds of each turn, one a line."""
    process = background([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE)
    prefer(process.pid)
    return process


@asynccontextmanager
async def metered(found: list[float]) -> AsyncIterator[None]:
    """Appends the median of the loop's seconds within the block, if there was time for one."""
    process = start()
    try:
        yield
    finally:
        process.kill()
        said, _ = await asyncio.to_thread(process.communicate)
        # The last line may be cut.
        if times := [float(line) for line in said.splitlines(keepends=True) if line[-1] == "\n"]:
            found.append(statistics.median(times))

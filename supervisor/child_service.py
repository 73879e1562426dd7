"""`gpusup run` as a child of a command that needs a service of its own: demo and certify."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

STOP_LIMIT_S: Final = 40.0

T = TypeVar("T")


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """SIGTERM ends it as Ctrl-C does: the service of ours is stopped first."""
    task = asyncio.ensure_future(work)
    with contextlib.suppress(NotImplementedError, ValueError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def start(config: Path, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """`env`: on top of ours. All that it prints goes to `log`. Raises OSError."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "gpusup.supervisor", "run", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C is for us; we stop it in order
        )


async def stop(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, and SIGKILL if that is not enough. Returns the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return await asyncio.to_thread(process.wait, STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)

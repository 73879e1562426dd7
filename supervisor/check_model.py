"""Whether a new version of a model would load: asked of a fresh process, with nothing touched.

Also the first guess of what a worker will take, from the size of its weights.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gpusup.conf.places import weights_of

from .actions import Assignment
from .family import Family, clean_env

CHECK_LIMIT_S: Final = 120.0
#: Without a file to look at: a context and a small model.
GPU_REST_BYTES: Final = 640 * 2**20
CPU_REST_BYTES: Final = 64 * 2**20


def size_of(assignment: Assignment, kind: str) -> int:
    """Bytes a worker will take at rest, guessed: its weights, and a CUDA context on a GPU."""
    base = GPU_REST_BYTES if kind == "cuda" else CPU_REST_BYTES
    weights = weights_of(assignment.config.weights, assignment.version)
    with suppress(OSError):
        if weights and Path(weights).is_file():
            return base + Path(weights).stat().st_size
    return base


class ModelCheck:
    def __init__(self, family: Family, on_done: Callable[[str, str], None]) -> None:
        """`on_done(change, problem)`, problem "" if all is well."""
        self._family = family
        self._on_done = on_done
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, change: str, assignment: Assignment) -> None:
        task = asyncio.get_running_loop().create_task(self._run(change, assignment))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, change: str, assignment: Assignment) -> None:
        try:
            problem = await asyncio.wait_for(self._ask(assignment), CHECK_LIMIT_S)
        except TimeoutError:
            problem = f"importing {assignment.config.handler} took over {CHECK_LIMIT_S:g} s"
        except OSError as error:
            problem = f"cannot start a process for the check: {error.strerror}"
        self._on_done(change, problem)

    async def _ask(self, assignment: Assignment) -> str:
        config = assignment.config
        process = await asyncio.create_subprocess_exec(
            config.python or sys.executable,
            "-m",
            "gpusup.worker.precheck",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_env({**config.env, "CUDA_VISIBLE_DEVICES": ""}),
        )
        self._family.adopt(process.pid)
        asked = {"config": msgspec.to_builtins(config), "version": assignment.version}
        try:
            out, err = await process.communicate(msgspec.msgpack.encode(asked))
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        try:
            answer = msgspec.json.decode(out)
        except msgspec.DecodeError:
            last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            return f"the check ended with exit {process.returncode}: {last[0][:300]}"
        return str(answer["problem"])

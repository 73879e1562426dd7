"""Whether a new version of a model would load: asked of a fresh process, with nothing touched.

Also the first guess of what a worker will take, from the size of its weights.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gpusup.conf.places import weights_of

from .actions import Assignment
from .family import Family, clean_env, kill

#: (interpreter, question, descriptor for the answer, told the pid or 0) -> whether it can.
Fork = Callable[[str, bytes, int, Callable[[int], None]], bool]

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
        if weights:  # shards in a folder
            return base + sum(f.stat().st_size for f in Path(weights).glob("*.safetensors"))
    return base


class ModelCheck:
    def __init__(
        self, family: Family, on_done: Callable[[str, str], None], fork: Fork | None = None
    ) -> None:
        """`on_done(change, problem)`, problem "" if all is well. `fork`: ZygoteLauncher.check."""
        self._family = family
        self._on_done = on_done
        self._fork = fork
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
        question = msgspec.msgpack.encode(
            {
                "model": assignment.model,
                "config": msgspec.to_builtins(assignment.config),
                "version": assignment.version,
            }
        )
        answer = await self._ask_fork(assignment.config.python, question)
        return await self._ask_exec(assignment, question) if answer is None else answer

    async def _ask_fork(self, python: str, question: bytes) -> str | None:
        """The quick way; None if there is no zygote for it."""
        if self._fork is None:
            return None
        loop = asyncio.get_running_loop()
        started: asyncio.Future[int] = loop.create_future()
        ended: asyncio.Future[tuple[int, str]] = loop.create_future()

        def on_end(returncode: int, words: str) -> None:
            if not ended.done():
                ended.set_result((returncode, words))

        def on_pid(pid: int) -> None:
            if pid:
                self._family.adopt(pid)
                self._family.watch(pid, on_end)
            if not started.done():
                started.set_result(pid)
            elif pid:
                kill(pid)  # nobody waits for it any more

        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            forked = self._fork(python, question, write_fd, on_pid)
        finally:
            os.close(write_fd)
        pid = 0
        try:
            pid = await started if forked else 0
            if not pid:
                return None
            returncode, words = await ended
            # The answer is shorter than a pipe is long, so it is all there by now.
            return _answer(os.read(read_fd, 65536), returncode, words)
        except asyncio.CancelledError:
            started.cancel()
            if pid:
                kill(pid)
            raise
        finally:
            os.close(read_fd)

    async def _ask_exec(self, assignment: Assignment, question: bytes) -> str:
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
        try:
            out, err = await process.communicate(question)
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return _answer(out, process.returncode or 0, last[0][:300])


def _answer(out: bytes, returncode: int, words: str) -> str:
    try:
        return str(msgspec.json.decode(out)["problem"])
    except msgspec.DecodeError:
        return f"the check ended with exit {returncode}{f': {words}' if words else ''}"

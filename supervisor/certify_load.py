"""The load generator of `gpusup certify`: client processes that keep to a Poisson schedule.

A closed loop of clients slows down with the server and hides its worst moments. Here each request
has a moment at which it is due, and its latency counts from there, sent late or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpusup.conf.precedence import prefer

from .certify_math import Sample

#: Longer than a service's own deadline (60 s, if it has the usual one): its word is wanted.
REQUEST_LIMIT_S: Final = 75.0
#: From the order to the first request: all clients must have read it by then.
LEAD_S: Final = 0.05
_LINE_LIMIT: Final = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request to send again and again. `weight`: its share among all."""

    data: bytes
    headers: Mapping[str, str]
    weight: float = 1.0
    title: str = ""


class LoadError(Exception):
    """The generator itself failed. One line."""


@dataclass(slots=True)
class Load:
    """`clients` processes that send to one URL. One run at a time."""

    clients: Sequence[asyncio.subprocess.Process]
    url: str
    _seed: int = 1

    async def run(self, rate: float, seconds: float) -> list[Sample]:
        """Requests at `rate` a second for so long; returns when the last was answered."""
        await self._begin(rate, seconds)
        return await self._collect()

    @asynccontextmanager
    async def running(self, rate: float) -> AsyncIterator[list[Sample]]:
        """In the background of the block. The list is filled when the block ends."""
        found: list[Sample] = []
        await self._begin(rate, 10**9)
        try:
            yield found
        finally:
            await self._order({"stop": True})
            found += await self._collect()

    async def _begin(self, rate: float, seconds: float) -> None:
        share = rate / len(self.clients)
        start = time.monotonic() + LEAD_S
        for client in self.clients:
            self._seed += 1  # for each of its own: none repeats what another sent
            plan = {"rate": share, "seconds": seconds, "start": start, "seed": self._seed}
            await _write(client, {"run": plan})

    async def _order(self, order: Mapping[str, Any]) -> None:
        for client in self.clients:
            await _write(client, order)

    async def _collect(self) -> list[Sample]:
        found: list[Sample] = []
        for client in self.clients:
            assert client.stdout is not None
            line = await client.stdout.readline()
            if not line:
                raise LoadError("a client process of the load generator has ended")
            found += [Sample(*row) for row in json.loads(line)]
        found.sort(key=lambda sample: sample.due)
        return found


@asynccontextmanager
async def generator(url: str, bodies: Sequence[Body], folder: Path) -> AsyncIterator[Load]:
    """`folder`: for the bodies, which the clients read once. As many clients as the cores allow."""
    count = max(1, min(8, (os.cpu_count() or 1) // 4))
    told = []
    for number, body in enumerate(bodies):
        path = _write_body(folder, number, body.data)
        told.append({"path": str(path), "headers": dict(body.headers), "weight": body.weight})
    setup = {"url": url, "bodies": told, "limit_s": REQUEST_LIMIT_S}
    processes: list[asyncio.subprocess.Process] = []
    try:
        for _ in range(count):
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "gpusup.supervisor.certify_client",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_LIMIT,
                    start_new_session=True,
                )
            )
        for process in processes:
            prefer(process.pid)  # in reality they are elsewhere, and nothing here slows them
            await _write(process, setup)
        for process in processes:
            assert process.stdout is not None
            if await process.stdout.readline() != b"ready\n":
                raise LoadError("a client process of the load generator did not start")
        yield Load(clients=processes, url=url)
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _write_body(folder: Path, number: int, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"body-{number}"
    path.write_bytes(data)
    return path


async def _write(process: asyncio.subprocess.Process, order: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError) as error:
        raise LoadError("a client process of the load generator has ended") from error

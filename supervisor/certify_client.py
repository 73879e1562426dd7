"""One client process of `gpusup certify`: sends on schedule, whatever the server does.

Reads one JSON object a line: first the setup, then `{"run": {...}}` and `{"stop": true}`; answers
each run with one line of results. All moments are time.monotonic, which processes share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from .certify_math import LOST, UNSENT, arrivals

#: More open requests than this and the generator would measure itself.
OPEN_LIMIT: Final = 3000
CODE_BYTES: Final = 4096


class Client:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._url: str = setup["url"]
        self._bodies = [(Path(b["path"]).read_bytes(), dict(b["headers"])) for b in setup["bodies"]]
        self._weights = [float(b["weight"]) for b in setup["bodies"]]
        self._limit_s: float = setup["limit_s"]
        self._stop = asyncio.Event()
        self._done: list[tuple[float, float, float, int, str, str]] = []

    async def run(self, plan: dict[str, Any]) -> list[tuple[float, float, float, int, str, str]]:
        """Until `seconds` are over or `stop`; then waits for what is open."""
        self._stop.clear()
        self._done = []
        start, seconds = float(plan["start"]), float(plan["seconds"])
        rng = random.Random(plan["seed"])
        numbers = range(len(self._bodies))
        tasks: set[asyncio.Task[None]] = set()
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        timeout = aiohttp.ClientTimeout(total=self._limit_s)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            for after in arrivals(plan["rate"], rng):
                if after >= seconds:
                    break
                due = start + after
                if await self._wait_until(due):
                    break
                if len(tasks) >= OPEN_LIMIT:
                    self._done.append((due, due, due, UNSENT, "", ""))
                    continue
                body = rng.choices(numbers, self._weights)[0]
                task = asyncio.create_task(self._send(session, due, body))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if not self._stop.is_set():
                await self._wait_until(start + seconds)
            if tasks:
                await asyncio.wait(tasks)
        return self._done

    def stop(self) -> None:
        self._stop.set()

    async def _wait_until(self, moment: float) -> bool:
        """True: stopped."""
        left = moment - time.monotonic()
        if left > 0:
            try:
                async with asyncio.timeout(left):
                    await self._stop.wait()
            except TimeoutError:
                pass
        return self._stop.is_set()

    async def _send(self, session: aiohttp.ClientSession, due: float, number: int) -> None:
        body, headers = self._bodies[number]
        sent = time.monotonic()
        status, code, version = LOST, "", ""
        try:
            async with session.post(self._url, data=body, headers=headers) as response:
                answer = await response.read()
                status = response.status
                version = response.headers.get("Gpusup-Model-Version", "")
                if status >= 400:
                    code = _code_of(answer)
        except TimeoutError:
            code = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            code = type(error).__name__
            # A kept connection may be closed just as it is used; that request was never begun.
        self._done.append((due, sent, time.monotonic(), status, code, version))


def _code_of(answer: bytes) -> str:
    try:
        told = json.loads(answer[:CODE_BYTES])
        return str(told.get("code") or told["error"].get("code", ""))
    except (ValueError, AttributeError, KeyError, TypeError):
        return ""


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    client = Client(json.loads(await reader.readline()))
    gc.collect()
    gc.freeze()
    gc.disable()  # its pauses would be taken for the server's; between runs it may work
    running: asyncio.Task[None] | None = None

    async def go(plan: dict[str, Any]) -> None:
        found = await client.run(plan)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        gc.collect()

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while line := await reader.readline():
        order = json.loads(line)
        if "run" in order:
            running = asyncio.create_task(go(order["run"]))
        else:
            client.stop()
    if running is not None:
        client.stop()
        await running


if __name__ == "__main__":
    uvloop.run(main())

"""Clients in closed loop that write down every answer, for the runs in which something breaks."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`what`: "ok", "http-502", "client-timeout", "refused", or the error's class.

    Times are of `time.perf_counter`.
    """

    began: float
    ended: float
    what: str
    pid: int = 0
    number: int = 0
    version: str = ""
    text: str = ""


def request(op: str, **more: Any) -> bytes:
    """No two are alike, so that no server may remember one by its content."""
    return json.dumps({"op": op, "id": uuid.uuid4().hex, "pad": "x" * 35, **more}).encode()


@dataclass(kw_only=True)
class Clients:
    """`body` makes the body of each request. After an error a client pauses `pause_s`."""

    url: str
    count: int
    body: Callable[[], bytes]
    timeout_s: float = 10.0
    pause_s: float = 0.01
    think_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    in_flight: dict[int, float] = field(default_factory=dict)  # client -> its request's start

    async def __aenter__(self) -> Clients:
        self._tasks = [asyncio.create_task(self._loop(i)) for i in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):  # not by the cancel: a client broke on the way
                raise ended

    async def _loop(self, client: int) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            while True:
                self.in_flight[client] = time.perf_counter()
                answer = await self.ask(session, self.body(), self.timeout_s)
                self.answers.append(answer)
                await asyncio.sleep(self.think_s if answer.what == "ok" else self.pause_s)

    async def ask(self, session: aiohttp.ClientSession, body: bytes, timeout_s: float) -> Answer:
        """One request; errors are values."""
        began = time.perf_counter()
        limit = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Content-Type": "application/json"}
        found: dict[str, Any] = {}
        try:
            async with session.post(self.url, data=body, headers=headers, timeout=limit) as reply:
                data = await reply.read()
                version = reply.headers.get("Gpusup-Model-Version", "")
                if reply.status == 200:
                    said = json.loads(data)
                    found = {"what": "ok", "pid": said["pid"], "number": said.get("number", 0)}
                    found["version"] = version
                else:
                    found = {"what": f"http-{reply.status}"}
                    found["text"] = data[:200].decode(errors="replace")
        except TimeoutError:
            found = {"what": "client-timeout"}
        except aiohttp.ClientConnectorError:
            found = {"what": "refused"}
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            found = {"what": type(error).__name__}
        return Answer(began=began, ended=time.perf_counter(), **found)

    async def served_since(self, moment: float, limit_s: float) -> bool:
        """Whether every client's request from before `moment` ended, and many newer ones did."""
        return await self.until(
            lambda seen: (
                min(self.in_flight.values()) > moment
                and sum(answer.began > moment for answer in seen) > 10 * self.count
            ),
            limit_s,
        )

    async def until(
        self, true: Callable[[list[Answer]], bool], limit_s: float, step_s: float = 0.05
    ) -> bool:
        """Look at the answers until `true` of them or `limit_s` is over; whether it became true."""
        end = time.perf_counter() + limit_s
        while time.perf_counter() < end:
            if true(self.answers):
                return True
            await asyncio.sleep(step_s)
        return true(self.answers)

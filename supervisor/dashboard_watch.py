"""What the dashboard shows: one look at the service every second, five minutes of them kept.

Each look is told to all listeners as one server-sent event: `tick`, or `lost` while nobody answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import aiohttp
import msgspec

EVERY_S: Final = 1.0
#: Five minutes, so that a page opened after an incident still shows it.
HISTORY: Final = 300
EVENTS: Final = 200
CHANGES: Final = 12
CLIENTS: Final = 32
#: Ticks that a client may be behind before it is dropped; it connects again by itself.
BEHIND: Final = 5
_CALL_S: Final = 5.0


class Source(Protocol):
    """Where the figures come from."""

    async def get(self, path: str) -> Mapping[str, Any]:
        """Raises OSError if nobody answers."""
        ...


class ControlSource:
    """The control API on its Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> Mapping[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path),
                timeout=aiohttp.ClientTimeout(total=_CALL_S),
            )
        try:
            async with self._session.get(f"http://gpusup{path}") as response:
                body = await response.read()
                if response.status != 200:
                    raise OSError(f"{path} was answered {response.status}")
                found: Mapping[str, Any] = msgspec.json.decode(body)
                return found
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise OSError(f"no answer from {self._path}: {_words(error)}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _words(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or error
    return getattr(cause, "strerror", None) or str(cause) or type(error).__name__


class Watch:
    """Looks every second, remembers five minutes, and tells whoever listens."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._events: deque[Mapping[str, Any]] = deque(maxlen=EVENTS)
        self._serial = 0
        self._counts: tuple[int, float, dict[str, int]] = (0, 0.0, {})
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self.latest: bytes = b""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self.look()
            due = max(due + EVERY_S, loop.time() + EVERY_S / 10)
            await asyncio.sleep(due - loop.time())

    async def look(self) -> None:
        """One look, told to all. Never raises for a service that is gone."""
        try:
            status = await self._source.get("/status")
            if status["pid"] != self._counts[0]:
                self._serial = 0  # another service: its events count from one again
            changes = (await self._source.get("/changes"))["changes"]
            events = (await self._source.get(f"/events?since={self._serial}"))["events"]
        except OSError as error:
            self._tell(sse("lost", {"reason": str(error), "at": time.time()}))
            return
        at = time.time()
        point = self._point(status, at)
        self._history.append(point)
        news = events[-EVENTS:]
        self._events.extend(news)
        if events:
            self._serial = events[-1]["serial"]
        tick = {"at": at, "status": status, "changes": _recent(changes), "point": point}
        self.latest = msgspec.json.encode(tick)
        self._tell(sse("tick", {**tick, "events": news}))

    def _point(self, status: Mapping[str, Any], at: float) -> dict[str, Any]:
        """What the curves need of one moment. `rate`: None where there is nothing to compare."""
        pid, then, before = self._counts
        counts = {model["name"]: int(model["requests"]) for model in status["models"]}
        same = pid == status["pid"] and at > then
        self._counts = (status["pid"], at, counts)
        return {
            "at": at,
            "models": {
                model["name"]: {
                    "rate": max(0.0, (counts[model["name"]] - before[model["name"]]) / (at - then))
                    if same and model["name"] in before
                    else None,
                    "p50_s": model["p50_s"],
                    "p99_s": model["p99_s"],
                    "queued": model["queued"],
                }
                for model in status["models"]
            },
            "devices": {
                d["name"]: d["watermark"] if d["known"] else None for d in status["devices"]
            },
        }

    def hello(self) -> bytes:
        return sse(
            "hello",
            {
                "history": list(self._history),
                "events": list(self._events),
                "tick": msgspec.Raw(self.latest) if self.latest else None,
            },
        )

    def listen(self) -> asyncio.Queue[bytes | None]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        queue.put_nowait(self.hello())
        self._listeners.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._listeners.discard(queue)

    def crowded(self) -> bool:
        return len(self._listeners) >= CLIENTS

    def end(self) -> None:
        for queue in self._listeners:
            queue.put_nowait(None)

    def _tell(self, message: bytes) -> None:
        for queue in list(self._listeners):
            if queue.qsize() >= BEHIND:
                self._listeners.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(message)


def _recent(changes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All that run, and the last that ended; newest first."""
    ordered = sorted(changes, key=lambda change: change["age_s"])
    active = [c for c in ordered if c["state"] in ("running", "waiting")]
    return active + [c for c in ordered if c["state"] not in ("running", "waiting")][:CHANGES]


def sse(kind: str, value: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"

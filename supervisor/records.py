"""The event stream: the last things that happened, for operators, and those who follow it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Final

KEPT: Final = 2000
#: A follower that reads more slowly than this many events behind loses the oldest.
BEHIND: Final = 1000


class Events:
    def __init__(self) -> None:
        self._ring: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._followers: set[asyncio.Queue[dict[str, Any]]] = set()
        self._serial = 0

    def add(self, kind: str, text: str, fields: dict[str, Any]) -> None:
        self._serial += 1
        event = {
            "serial": self._serial,
            "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
            "kind": kind,
            "text": text,
            **{k: v for k, v in fields.items() if k not in ("serial", "time", "kind", "text")},
        }
        self._ring.append(event)
        for queue in self._followers:
            if queue.qsize() >= BEHIND:
                queue.get_nowait()
            queue.put_nowait(event)

    def since(self, serial: int = 0) -> list[dict[str, Any]]:
        return [event for event in self._ring if event["serial"] > serial]

    async def follow(self, serial: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """Those after `serial` (None: only new ones), then each as it happens, without end."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._followers.add(queue)
        try:
            for event in self.since(serial) if serial is not None else ():
                yield event
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)

"""What the connections of one proxy have in common on the short way: see flight.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from .door import Door
from .errors import ProxyError
from .generate_routes import is_text
from .heads import Head, Heads

if TYPE_CHECKING:
    from .flight import Flight

_PREFIXES: Final = 256

#: Told of each request that ended: id, method, path, route, status, seconds, bytes, client, and
#: why it was refused.
Ended = Callable[[str, str, str, str, int, float, int, str, ProxyError | None], None]


class Shared:
    """What the connections of a proxy have in common."""

    def __init__(self, door: Door, ended: Ended) -> None:
        self.door = door
        self.dispatcher = door.dispatcher
        self.ended = ended
        self.heads = Heads()
        self.compress = door.config.server.compress
        self.logs = bool(door.config.log.requests)
        self._prefixes: dict[tuple[str, str, str, bool, str, bool], bytes] = {}
        self._second = 0
        self._date = b""
        self._receiving: dict[Flight, None] = {}
        self._watching: asyncio.TimerHandle | None = None
        self._limit_s = door.config.server.body_timeout

    def takes(self, head: Head) -> bool:
        """Whether it is as plain as its head looks; before any of its body is read."""
        door = self.door
        if head.length > door.reader.limit:
            return False
        try:
            model = door.dispatcher.models.get(head.model or door.default_model())
            return model is not None and not (
                (model.methods or head.accept) and is_text(model, head.accept)
            )
        except ProxyError:
            return False

    def date(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._date

    def prefix(
        self, version: str, degraded: str, content_type: str, varies: bool, coding: str, packs: bool
    ) -> bytes:
        """The lines of a good answer's head that are often the same. Raises ValueError."""
        key = (version, degraded, content_type, varies, coding, packs)
        known = self._prefixes.get(key)
        if known is None:
            headers = {"Gpusup-Model-Version": version}
            if degraded:
                headers["Gpusup-Degraded"] = degraded
            headers["Content-Type"] = content_type
            vary = [*(["Accept"] if varies else []), *(["Accept-Encoding"] if packs else [])]
            if vary:
                headers["Vary"] = ", ".join(vary)
            if coding:
                headers["Content-Encoding"] = coding
            if len(self._prefixes) >= _PREFIXES:
                self._prefixes.clear()
            known = self._prefixes[key] = lines(200, headers)
        return known

    # -- bodies on their way ---------------------------------------------------------------------

    def watch(self, flight: Flight) -> None:
        self._receiving[flight] = None
        if self._watching is None:
            self._watch_on()

    def unwatch(self, flight: Flight) -> None:
        self._receiving.pop(flight, None)

    def _watch_on(self) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.call_later(min(0.25, self._limit_s / 4), self._look)

    def _look(self) -> None:
        self._watching = None
        now = time.monotonic()
        for flight in list(self._receiving):
            flight.look(now)
        if self._receiving:
            self._watch_on()


def lines(status: int, headers: dict[str, str]) -> bytes:
    """Status and headers, without the blank line. Raises ValueError on a line break in them."""
    text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if text.count("\r") != len(headers) or text.count("\n") != len(headers):
        raise ValueError("a header has a line break in it")
    reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {status} {reason}\r\n{text}Server: gpusup\r\n".encode()

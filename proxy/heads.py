"""What the head of a plain prediction request says, worked out once for each different head. Pure.

Clients that keep a connection send the same head again and again. Only what a `Head` can hold goes
the short way (express.py): everything unusual, and everything wrong, is aiohttp's and the
handlers' to deal with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from aiohttp.http import HttpVersion11
from aiohttp.http_parser import RawRequestMessage

from . import raw_codec
from .errors import InvalidInput
from .http_rules import header_priority, read_timeout, trace_params

#: A head longer than this goes the long way, and so many different ones are remembered.
LONGEST: Final = 2048
_MOST: Final = 512

#: Only bytes that begin so are looked at.
STARTS: Final = (b"POST /predictions/", b"PUT /predictions/", b"POST /infer ", b"PUT /infer ")

_PATH: Final = re.compile(r"/predictions/([A-Za-z0-9._-]+)(?:/([A-Za-z0-9._-]+))?")
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
#: Headers with which a request is no plain one.
_UNUSUAL: Final = ("Expect", "Transfer-Encoding", "Content-Encoding", "Upgrade")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    method: str
    path: str
    route: str
    model: str  # "": the default one
    version: str | None
    length: int  # of the body
    content_type: str | None
    json: bool  # or may be: the body has to be read to know what it is
    accept: str | None
    accept_encoding: str | None
    timeout_s: float | None
    priority: int
    params: dict[str, Any]
    session: str
    request_id: str | None  # as the client sent it


def head_of(message: RawRequestMessage) -> Head | None:
    """None: not for the short way."""
    headers = message.headers
    if (
        message.version != HttpVersion11
        or message.should_close
        or message.upgrade
        or message.chunked
        or any(name in headers for name in _UNUSUAL)
    ):
        return None
    length = headers.get("Content-Length", "")
    if not _LENGTH.fullmatch(length):
        return None
    name, version = "", None
    if message.path == "/infer":
        route = "/infer"
    else:
        found = _PATH.fullmatch(message.path)
        if found is None or found[1] in (".", "..") or found[2] in (".", ".."):
            return None
        name, version = found[1], found[2]
        route = "/predictions/{model}" + ("/{version}" if version else "")
    content_type = headers.get("Content-Type")
    kind = raw_codec.media_type(content_type)
    if kind == raw_codec.MULTIPART:
        return None
    try:
        return Head(
            method=message.method,
            path=message.path,
            route=route,
            model=name,
            version=version,
            length=int(length),
            content_type=content_type,
            json=raw_codec.is_read(kind),
            accept=headers.get("Accept"),
            accept_encoding=headers.get("Accept-Encoding"),
            timeout_s=read_timeout(headers),
            priority=header_priority(headers),
            params=trace_params(headers),
            session=headers.get("Gpusup-Session", ""),
            request_id=headers.get("X-Request-Id"),
        )
    except InvalidInput:
        return None


class Heads:
    """Heads by their bytes. Clients choose them, so the number is bounded."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}
        self.get = self._known.get

    def learn(self, text: bytes, head: Head) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[text] = head

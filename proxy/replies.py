"""Answers on their way out: bare `application/json`, compressed where it pays, joined if small."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from gpusup.supervisor.wire import Reply

from . import compression
from .door import REQUEST_ID, Door
from .errors import (
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotFound,
    NotImplementedHere,
    ProxyError,
    QueueFull,
    SupervisorLost,
)
from .v2_checks import ShapeRefused

JSON_HEADERS: Final = {"Content-Type": "application/json"}

#: From here on work is done in a thread, so that the loop goes on serving the others.
THREAD_FROM: Final = 2**20
DEFLATE_IN_THREAD: Final = 64 * 1024
_JOIN_UP_TO: Final = 256 * 1024

_encode: Final = msgspec.json.Encoder().encode


def say(told: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Any JSON value."""
    return web.Response(
        status=status, body=_encode(told), headers={**JSON_HEADERS, **(headers or {})}
    )


async def respond(
    door: Door, request: web.Request, headers: dict[str, str], *pieces: bytes
) -> web.StreamResponse:
    """A body in one or more pieces; `headers` has its Content-Type and is changed here."""
    length = sum(map(len, pieces))
    if length >= compression.SMALLEST and door.config.server.compress:
        wanted = request.headers.get(hdrs.ACCEPT_ENCODING)
        coding = compression.choose(wanted, headers["Content-Type"], length)
        vary = headers.get("Vary")
        headers["Vary"] = f"{vary}, Accept-Encoding" if vary else "Accept-Encoding"
        if coding:
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if length < DEFLATE_IN_THREAD:
                packed = compression.deflate(whole, coding)
            else:
                packed = await asyncio.to_thread(compression.deflate, whole, coding)
            headers["Content-Encoding"] = coding
            return web.Response(body=packed, headers=headers)
    if len(pieces) == 1:
        return web.Response(body=pieces[0], headers=headers)
    if length <= _JOIN_UP_TO:
        return web.Response(body=b"".join(pieces), headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = length
    await response.prepare(request)
    for piece in pieces:
        if piece:
            await response.write(piece)
    await response.write_eof()
    return response


def tell_shape(door: Door, request: web.Request, model: str, error: ShapeRefused) -> None:
    length = request.content_length or 0
    tell_shape_of(door, request.remote or "", model, request[REQUEST_ID], length, error)


def tell_shape_of(
    door: Door, client: str, model: str, request_id: str, length: int, error: ShapeRefused
) -> None:
    """A refused shape that would have exploded, with its features, to the supervisor's log."""
    door.counts.add("gpusup_refused_total", ("shape",))
    door.notice(
        "shape-refused",
        {
            "client": client,
            "model": model,
            "request_id": request_id,
            "body_bytes": length,
            **error.fields,
        },
    )


async def ask(door: Door, method: str, path: str) -> Reply:
    """A good answer of the supervisor's control API. Raises what any other means to a client."""
    reply = await door.ask(method, path)
    if (refused := refusal_of(reply)) is not None:
        raise refused
    return reply


def refusal_of(reply: Reply) -> ProxyError | None:
    """What a control answer other than 2xx means to a client of the front door."""
    if reply.status < 300:
        return None
    try:
        said = msgspec.json.decode(reply.body)
        text = said["error"] if isinstance(said["error"], str) else said["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        text = f"the supervisor answered {reply.status}"
    match reply.status:
        case 404:
            return ModelNotFound(text) if "model" in text else NotFound(text)
        case 403:
            return Forbidden(text)
        case 429 | 409:
            return QueueFull(text, retry_after_s=1)
        case 501:
            return NotImplementedHere(text)
        case status if 400 <= status < 500:
            return InvalidInput(text)
        case _:
            return SupervisorLost(text, retry_after_s=1)

"""Server-sent events: the status is held until the first item, slow readers are waited for only so
long, and a stream that a fault cuts short never looks complete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final

from aiohttp import web

from gpusup.worker.wire import Answer

from .errors import ProxyError

#: A comment line now and then keeps middle boxes from hanging up.
PING_S: Final = 15.0
_PING: Final = b": ping\n\n"

HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(data: bytes) -> bytes:
    """One event. Data of several lines is one event of several data lines."""
    if b"\n" in data or b"\r" in data:
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"
    return b"data: " + data + b"\n\n"


async def serve(
    request: web.Request,
    answers: AsyncIterator[Answer],
    *,
    render: Callable[[Answer], Iterable[bytes]],
    last: Callable[[], Iterable[bytes]],
    failed: Callable[[ProxyError], bytes],
    headers: dict[str, str],
    write_timeout_s: float,
    ping_s: float = PING_S,
) -> web.StreamResponse:
    """Send `answers` as events: `render` makes their data, `last` that of the end.

    What fails before the first answer is raised, so it still gets a status. What fails later is
    told as one event (`failed`), and then the connection is cut without the mark of a complete
    body. `answers` is closed on every path, which cancels the work.
    """
    try:
        try:
            first = await anext(answers)
        except StopAsyncIteration:
            first = None
        response = web.StreamResponse(headers={**HEADERS, **headers})
        await response.prepare(request)
        stream = _Stream(response, request, write_timeout_s)
        pinging = asyncio.create_task(stream.ping(ping_s))
        try:
            if first is not None:
                await stream.send(render(first))
                first = None
                async for answer in answers:
                    await stream.send(render(answer))
            await stream.send(last())
        except ProxyError as error:
            await stream.send([failed(error)])
            stream.cut()
            return response
        finally:
            pinging.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await pinging
        with stream.limit():
            await response.write_eof()
        return response
    finally:
        close = getattr(answers, "aclose", None)
        if close is not None:
            await close()


class _Stream:
    def __init__(self, response: web.StreamResponse, request: web.Request, timeout_s: float):
        self._response = response
        self._request = request
        self._timeout_s = timeout_s
        self._sent = 0

    async def send(self, events: Iterable[bytes]) -> None:
        """Waits while the reader is behind. Raises ConnectionError if it stays so."""
        data = b"".join(map(event, events))
        if data:
            self._sent += 1
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._response.write(data)
        except TimeoutError:
            self._abort()
            raise ConnectionResetError("the reader of a stream stalled") from None

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._timeout_s, self._abort)
        try:
            yield
        finally:
            timer.cancel()

    def _abort(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    def cut(self) -> None:
        """End the connection after what was sent, without the last chunk."""
        self._response.force_close()
        transport = self._request.transport
        if transport is not None:
            transport.close()

    async def ping(self, every_s: float) -> None:
        while True:
            before = self._sent
            await asyncio.sleep(every_s)
            if self._sent == before:
                await self._write(_PING)

"""Connections on which plain prediction requests go the short way.

aiohttp makes a request object, two tasks, a routing and a response object of each request; that is
most of what a small prediction costs. Here a request whose head is one of those in heads.py, and
whose connection is at rest, is taken off the bytes before aiohttp sees it, and answered from the
callback that brings the worker's answer. Bulk is received straight into the arena. Everything else
is fed to aiohttp as it came: it may not notice what went by before.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from aiohttp import web
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from .flight import Flight
from .heads import LONGEST, STARTS, Head, head_of
from .shared import Shared

_END: Final = b"\r\n\r\n"
#: How long the rest of a refused body is read and dropped, so that its client sees the answer.
LINGER_S: Final = 2.0
#: An answer up to this is joined with its head.
_JOIN: Final = 64 * 1024


class _Nobody:
    """Of a parser that only looks at a head."""

    def pause_reading(self) -> None: ...

    def resume_reading(self, resume_parser: bool = True) -> None: ...


_NOBODY: Final[Any] = _Nobody()


class Express(RequestHandler):
    __slots__ = ("_clean", "_early", "_flight", "_limits", "_parked", "_shared", "_unrested")

    def __init__(self, manager: web.Server, shared: Shared, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._shared = shared
        #: Nothing of a request that has not ended is in aiohttp's parser.
        self._clean = True
        self._early = b""
        self._flight: Flight | None = None
        #: While there is a flight: what aiohttp's task waits for, out of reach of its other code,
        #: for which this connection is therefore busy.
        self._parked: asyncio.Future[None] | None = None
        self._unrested = False  # answered, but the client has not taken all of it

    # -- in --------------------------------------------------------------------------------------

    @property
    def early(self) -> bool:
        """Whether something has come that nobody has looked at yet."""
        return bool(self._early)

    def data_received(self, data: bytes) -> None:
        flight = self._flight
        if flight is not None:
            self._meanwhile(flight, data)
            return
        waiter = self._waiter
        if waiter is None and self._task_handler is not None and not self._request_count:
            # So early that aiohttp's task has not run yet: it is in the loop's queue.
            if not self._early:
                self._loop.call_soon(self._deliver_early)
            self._early += data
            return
        if (
            not self._clean
            or waiter is None
            or not data
            or self._messages
            or waiter.done()
            or self._close
            or self._force_close
            or self._upgraded
        ):
            self._clean = self._clean and not data
            super().data_received(data)
            return
        end = data.find(_END, 0, LONGEST) + 4
        if end > 3:
            text = data[:end]
            head = self._shared.heads.get(text) or self._learn(text)
            if (
                head is not None
                and len(data) - end <= head.length
                and self._shared.takes(head)
                and self.transport is not None
            ):
                self._parked, self._waiter = waiter, None
                self._request_in_progress = True
                self._request_count += 1
                self._flight = flight = Flight(self._shared, self, head)
                flight.start(data, end)
                return
        super().data_received(data)
        self._clean = end > 3 and self._is_clean(data, end)

    def _deliver_early(self) -> None:
        data, self._early = self._early, b""
        if self.transport is not None:
            if self._waiter is None:
                self._request_count = 1  # not even now: aiohttp keeps it for its task
                self._clean = False
            self.data_received(data)

    def _learn(self, text: bytes) -> Head | None:
        if not text.startswith(STARTS):
            return None
        parser = HttpRequestParser(
            _NOBODY,
            self._loop,
            2**16,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            auto_decompress=False,
        )
        try:
            messages, upgraded, _ = parser.feed_data(text)
        except Exception:  # aiohttp will say what is wrong with it
            return None
        if len(messages) != 1 or upgraded:
            return None
        head = head_of(messages[0][0])
        # Those that are different each time need not be remembered.
        if head is not None and head.request_id is None and not head.params:
            self._shared.heads.learn(text, head)
        return head

    def _is_clean(self, data: bytes, end: int) -> bool:
        """Whether `data`, fed to aiohttp in a clean state, was exactly one request."""
        if len(self._messages) != 1:
            return False
        message, payload = self._messages[0]
        return (
            isinstance(message, RawRequestMessage)
            and not message.chunked
            and payload.is_eof()
            and end + payload.total_bytes == len(data)
        )

    def _meanwhile(self, flight: Flight, data: bytes) -> None:
        if flight.receiving:
            data = flight.more(data)
        if data:  # a next request, before this one was answered
            self._clean = False
            super().data_received(data)

    def receive(self, flight: Flight, view: memoryview) -> None:
        """The next bytes fill `view`, then `flight` has its body."""
        self._divert(Sink(self, flight, view))

    def hold(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def _divert(self, sink: asyncio.BufferedProtocol) -> None:
        """What comes goes there, until `revert`."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            # How it reads is settled when reading begins.
            transport.pause_reading()
            transport.set_protocol(sink)
            transport.resume_reading()

    def revert(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            transport.set_protocol(self)
            transport.resume_reading()

    # -- out -------------------------------------------------------------------------------------

    def answer(self, head: bytes, body: bytes, *, close: bool, unread: int) -> None:
        """The one answer of the flight. `unread`: bytes of its body that were not received."""
        self._flight = None
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        transport = self.transport
        if transport is None:
            return
        if len(body) <= _JOIN:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        manager = self._manager
        if manager is not None:
            manager.requests_count += 1
        if close or self._close or self._force_close:
            self._close = True
            if unread:
                self._divert(Drop(self, unread))
                self._loop.call_later(LINGER_S, self.hang_up)
            else:
                transport.close()
        elif self._paused:
            self._unrested = True
        else:
            self._rest()

    def hang_up(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unrested:
            self._unrested = False
            self._rest()

    def _rest(self) -> None:
        """Wait for the next request, which may be here already."""
        waiter, self._parked = self._parked, None
        self._waiter = waiter
        if self._close:  # since it was answered
            self.hang_up()
            return
        if self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)
            return
        if self._keepalive_timeout > 0:
            at = self._loop.time() + self._keepalive_timeout
            self._next_keepalive_close_time = at
            if self._keepalive_handle is None:
                self._keepalive_handle = self._loop.call_at(at, self._process_keepalive)

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 (aiohttp's)
        """The flight may end within the time; aiohttp's task has nothing to wait for then."""
        if self._flight is not None:
            self._force_close = True  # after the answer
            self._handler_waiter = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._handler_waiter
            self._handler_waiter = None
            self._request_in_progress = False
        if self._parked is not None:
            self._parked.cancel()
        await super().shutdown(timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._request_in_progress = False
            flight.left()
        super().connection_lost(exc)


class _Diverted(asyncio.BufferedProtocol):
    """Takes what comes in the place of `owner`, which still hears of all else."""

    def __init__(self, owner: Express) -> None:
        self._owner = owner

    def eof_received(self) -> None: ...

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)


class Sink(_Diverted):
    """Receives the rest of a flight's body where it is to lie; then gives the connection back."""

    def __init__(self, owner: Express, flight: Flight, view: memoryview) -> None:
        super().__init__(owner)
        self._flight = flight
        self._view = view
        self._left = len(view)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[-self._left :]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        self._flight.count += nbytes
        if not self._left:
            self._owner.revert()
            self._flight.whole()


class Drop(_Diverted):
    """Reads what nobody wants."""

    def __init__(self, owner: Express, count: int) -> None:
        super().__init__(owner)
        self._left = count
        self._buffer = bytearray(64 * 1024)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left <= 0:
            self._owner.hang_up()

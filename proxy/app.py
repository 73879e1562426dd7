"""The aiohttp application: what every answer carries, and the settings it runs with."""

from __future__ import annotations

import asyncio
import logging
import random
import select
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler

from gpusup.conf.log import event
from gpusup.conf.places import host_port

from .door import REFUSED, REQUEST_ID, Door
from .errors import Internal, InvalidInput, MethodNotAllowed, NotFound, ProxyError
from .express import LINGER_S, Express
from .shared import Shared

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log: Final = logging.getLogger("gpusup.proxy.http")

_HANDSHAKE_S: Final = 10.0

#: Balancers ask for these several times a second.
_UNLOGGED: Final = frozenset(
    {"/livez", "/readyz", "/healthz", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready"}
)

_OVERLOAD: Final = (429, 503)

#: What a label may say; anything else is a client's invention, and there is no end to those.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

#: Their texts may quote what the client sent, and a log is no place for that. It has the text.
_QUOTING: Final = (400, 422)


class OtherStatus(ProxyError):
    """What aiohttp itself raises, in our form."""

    code = "HTTP_ERROR"

    def __init__(self, error: web.HTTPException) -> None:
        super().__init__(error.reason)
        self.status = error.status  # type: ignore[misc]


class Guard:
    """Around the whole application: whatever happens inside becomes an answer, is counted, and has
    its id. A middleware would do the same for some microseconds more."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._counts = door.counts
        self._sampled = door.config.log.requests

    def ended(
        self,
        request_id: str,
        method: str,
        path: str,
        route: str,
        status: int,
        seconds: float,
        length: int,
        remote: str,
        refused: ProxyError | None,
    ) -> None:
        """Count it; what was refused, and a sample of the rest, goes to the log."""
        self._counts.observe(
            "http_server_request_duration_seconds",
            (route, method if method in _METHODS else "_OTHER", str(status)),
            seconds,
        )
        if refused is not None and status in _OVERLOAD:
            refused = None  # there may be very many; the metrics count them
        if route not in _UNLOGGED and (
            refused is not None
            or self._sampled >= 1
            or (self._sampled and random.random() < self._sampled)
        ):
            why = {} if refused is None else {"code": refused.code}
            if refused is not None and status not in _QUOTING:
                why["error"] = str(refused)
            event(
                "request",
                "info" if refused is None else "warning",
                **why,
                request_id=request_id,
                method=method,
                path=path,
                status=status,
                seconds=round(seconds, 6),
                bytes=length,
                remote=remote,
            )

    async def __call__(self, handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request)
        door = self._door
        begun = time.monotonic()
        request_id = door.name_request(request)
        status = 499
        try:
            try:
                response = await handler(request)
            except ProxyError as error:
                response = door.refuse(request, error)
            except web.HTTPMethodNotAllowed as error:
                allow = ", ".join(sorted(error.allowed_methods))
                response = door.refuse(
                    request,
                    MethodNotAllowed(
                        f"{request.method} is not allowed here, {allow} is",
                        headers={"Allow": allow},
                    ),
                )
            except web.HTTPNotFound:
                response = door.refuse(request, NotFound(f"nothing is at {request.path[:200]}"))
            except web.HTTPException as error:
                response = door.refuse(request, OtherStatus(error))
            except UnicodeDecodeError:
                response = door.refuse(request, InvalidInput("the request is not UTF-8"))
            except ConnectionError:
                raise asyncio.CancelledError from None  # the client left while it was answered
            except Exception as error:
                # Ours to mend: the log has where, the client only that.
                _log.exception("cannot answer %s %s: %r", request.method, request.path, error)
                response = door.refuse(request, Internal("internal error"))
            status = response.status
            return response
        finally:
            took = time.monotonic() - begun
            match = request._match_info
            resource = match.route.resource if match is not None else None
            route = resource.canonical if resource is not None else "unmatched"
            refused = request.get(REFUSED)
            logs = self._sampled or refused is not None
            self.ended(
                request_id,
                request.method,
                request.path,
                route,
                status,
                took,
                (request.content_length or 0) if logs else 0,
                (request.remote or "") if logs else "",
                refused,
            )


def make_app(door: Door) -> web.Application:
    app = web.Application(client_max_size=door.reader.limit)

    async def dress(request: web.Request, response: web.StreamResponse) -> None:
        headers = response.headers
        headers["Server"] = "gpusup"
        headers["X-Request-Id"] = request.get(REQUEST_ID) or door.name_request(request)
        if "Cache-Control" not in headers:
            headers["Cache-Control"] = "no-store"
        if door.draining:
            response.force_close()
            headers["Connection"] = "close"

    app.on_response_prepare.append(dress)
    return app


_CLIENTS_FAULT: Final = (BadHttpMessage, web.RequestPayloadError, ConnectionError)


class Quiet(logging.Filter):
    """Broken clients are no errors of ours, and nobody may fill the disk by breaking things."""

    def __init__(self, a_second: int = 10) -> None:
        super().__init__()
        self._a_second = a_second
        self._second = 0
        self._said = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is not None:
            if isinstance(record.exc_info[1], _CLIENTS_FAULT):
                return False
            record.msg = f"{record.getMessage()}: {record.exc_info[1]!r}"
            record.args = ()
            record.exc_info = None
        second = int(record.created)
        if second != self._second:
            self._second, self._said = second, 0
        self._said += 1
        return self._said <= self._a_second and record.levelno >= logging.INFO


def _check(door: Door) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        await door.check(request)
        return await handler(request)

    return check


class Runner(web.AppRunner):
    """Its settings are those of the server section; `door.checks` must be complete by `setup`."""

    __slots__ = ("_guard", "_shared")

    def __init__(self, app: web.Application, door: Door) -> None:
        server = door.config.server
        parser_log = logging.getLogger("gpusup.proxy.parser")
        if not parser_log.filters:
            parser_log.addFilter(Quiet())
        # One misspelt name here and aiohttp would silently run with none of these settings.
        super().__init__(
            app,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            keepalive_timeout=server.idle_timeout,
            lingering_time=LINGER_S,
            max_line_size=server.header_limit,
            max_field_size=server.header_limit,
            max_headers=100,
            shutdown_timeout=server.drain_limit,
            logger=parser_log,
        )
        self._guard = Guard(door)
        #: Keys and origins are looked at in handlers, which the short way does without.
        plain = not door.checks and not server.cors_origins
        self._shared = Shared(door, self._guard.ended) if plain else None
        if door.checks:
            app.middlewares.insert(0, _check(door))

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.request_handler = partial(self._guard, server.request_handler)
        return server

    def connection(self) -> RequestHandler:
        """The protocol for a new connection."""
        server = self._server
        assert server is not None
        if self._shared is None:
            return server()
        return Express(server, self._shared, loop=server._loop, **server._kwargs)

    def close_idle(self) -> None:
        """Close the connections on which nothing is asked and nothing has arrived.

        Not by their `close`: aiohttp then drops what comes, be it the rest of a request that has
        begun, and lets an idle connection stay open, so that its client would ask in vain.
        """
        server = self._server
        assert server is not None
        idle: dict[int, RequestHandler] = {}
        arrived = select.poll()
        for connection in server.connections:
            waiter, transport = connection._waiter, connection.transport
            if waiter is None or waiter.done() or transport is None:
                continue
            if isinstance(connection, Express) and connection.early:
                continue
            fd = transport.get_extra_info("socket").fileno()
            idle[fd] = connection
            arrived.register(fd, select.POLLIN)
        for fd, _ in arrived.poll(0):
            del idle[fd]
        for connection in idle.values():
            connection.force_close()


class Site(web.BaseSite):
    """The inherited listening socket. Beyond `most` connections the kernel's backlog waits. Who
    takes nothing of an answer for `unread_s` is dropped (0: never)."""

    def __init__(
        self,
        runner: Runner,
        sock: socket.socket,
        *,
        most: int,
        unread_s: float = 0.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context)
        self._connection = runner.connection
        self._sock = sock
        self._most = most
        self._unread_ms = int(unread_s * 1000)
        self._accepting = False
        self._opening: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        scheme = "https" if self._ssl_context else "http"
        if self._sock.family == socket.AF_UNIX:
            return f"{scheme}://unix:{self._sock.getsockname()}:"
        return f"{scheme}://{host_port(*self._sock.getsockname()[:2])}"

    async def start(self) -> None:
        await super().start()
        self._sock.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._later = None
        self._accepting = True
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        self._later = loop.call_later(seconds, self._resume)

    def connections(self) -> int:
        server = self._runner.server
        return (len(server._connections) if server is not None else 0) + len(self._opening)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        # A few at a time: the other proxies listen to the same socket.
        for _ in range(8):
            if self.connections() >= self._most:
                self._pause(0.05)
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors, most likely. The backlog waits; trying again at once
                # would only burn the processor.
                _log.warning("cannot accept a connection: %s", error.strerror)
                self._pause(0.5)
                return
            sock.setblocking(False)
            if self._unread_ms and sock.family != socket.AF_UNIX:
                # Who takes nothing of an answer for so long is dropped, by the kernel.
                with suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unread_ms)
            task = loop.create_task(self._open(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket) -> None:
        server = self._runner.server
        if server is None:
            sock.close()
            return
        with suppress(OSError, ssl.SSLError):  # gone already, or no TLS
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection,
                sock,
                ssl=self._ssl_context,
                ssl_handshake_timeout=_HANDSHAKE_S if self._ssl_context else None,
            )

    async def stop(self) -> None:
        if self._accepting:
            self._accepting = False
            asyncio.get_running_loop().remove_reader(self._sock)
            if self._later is not None:
                self._later.cancel()
        await super().stop()

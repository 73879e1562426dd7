"""The front door, as the HTTP handlers see it: read a body, look a model up, have it answered.

A handler does

    body = await door.read(request)
    try:
        model = door.model(name, version)
        call = Call(model=name, version=version, parts=(body.part("body", content_type=...),),
                    leases=body.leases, deadline=door.deadline(model, timeout_s), ...)
        outcome = await door.infer(call)
    finally:
        body.release()

and lets every ProxyError through: the app turns it into an answer. So it does with CancelledError,
which means that the client has left.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from gpusup.conf.schema import Config
from gpusup.supervisor.wire import ModelInfo, Notice, Reply, Snapshot
from gpusup.worker import wire

from .arena import INLINE_BYTES
from .errors import ModelNotFound, ProxyError

_NOTICES_A_SECOND: Final = 5
#: Bytes at either end of an input by which nearly all can be told apart.
_END: Final = 256

if TYPE_CHECKING:
    from .arena import Arena, Lease
    from .body import Body, BodyReader
    from .counts import Counts
    from .dispatch import Dispatcher
    from .link import Link

#: Key of the request's id in `request[...]`, set before any handler runs.
REQUEST_ID: Final = web.RequestKey("request_id", str)
#: Why it was refused, for the log.
REFUSED: Final = web.RequestKey("refused", ProxyError)

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True, eq=False)
class Call:
    """One request for one model. Times are CLOCK_MONOTONIC seconds.

    `parts`: data over 64 KiB should be `Block`s of the arena (Body.part sees to it), and then
    `leases` holds what they lie in: the dispatcher keeps those until the worker is done with them,
    however the request ends.
    """

    model: str
    parts: tuple[wire.Part, ...]
    version: str | None = None  # as the client named it; None: the default, or the canary
    method: wire.Method = "predict"
    rows: int = 1
    deadline: float = 0.0  # 0: the model's request timeout from now on
    priority: int = 0  # 1 is highest, 0 the default (ranks as 2)
    params: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    session: str = ""  # the Gpusup-Session header; sticky canary choice
    leases: Sequence[Lease] = ()
    received: float = 0.0
    served_version: str = ""  # set when it is sent to a worker

    def input_hash(self, arena: memoryview) -> str:
        """Names the input across proxies and workers, as "LENGTH-ENDS-DIGEST". Reads all of it."""
        digest = hashlib.blake2b(self.model.encode(), digest_size=16)
        for part in self.parts:
            digest.update(f"\0{part.name}\0{part.datatype}\0{part.shape}\0".encode())
            match part.data:
                case wire.Block(offset=offset, length=length):
                    digest.update(arena[offset : offset + length])
                case bytes() as data:
                    digest.update(data)
        return f"{self._looks_like(arena)}{digest.hexdigest()}"

    def _looks_like(self, arena: memoryview) -> str:
        """How its hash begins: its length, and a checksum of the ends of its inputs."""
        check = 0
        for part in self.parts:
            data: bytes | memoryview
            if isinstance(part.data, wire.Block):
                data = arena[part.data.offset : part.data.offset + part.data.length]
            else:
                data = part.data
            check = zlib.crc32(data[-_END:], zlib.crc32(data[:_END], check))
        return f"{self.length()}-{check:08x}-"

    def length(self) -> int:
        """Bytes of all its inputs."""
        return sum(
            len(part.data) if isinstance(part.data, bytes) else part.data.length
            for part in self.parts
        )

    def is_one_of(self, hashes: Collection[str], arena: memoryview) -> bool:
        """Nearly all requests look different from those few: they need not be read."""
        start = self._looks_like(arena)
        return any(h.startswith(start) for h in hashes) and self.input_hash(arena) in hashes


@dataclass(slots=True, frozen=True)
class Outcome:
    """An answer with status "ok", and the version that gave it."""

    answer: wire.Answer
    version: str

    def headers(self) -> dict[str, str]:
        headers = {"Gpusup-Model-Version": self.version}
        if self.answer.degraded:
            headers["Gpusup-Degraded"] = self.answer.degraded
        return headers


class Door:
    """`checks` run before each request's body is read, may look at its head, and raise a ProxyError
    (API keys)."""

    def __init__(
        self,
        config: Config,
        *,
        dispatcher: Dispatcher,
        link: Link,
        arena: Arena,
        reader: BodyReader,
        counts: Counts,
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.link = link
        self.arena = arena
        self.reader = reader
        self.counts = counts
        self._prefix = f"{secrets.token_hex(6)}-"  # unique among proxies and their generations
        self._requests = 0
        self.checks: list[Callable[[web.Request], Awaitable[None]]] = []
        self.rereads: list[Callable[[], None]] = []  # on reload: API keys and the like
        #: (path prefix, body of an error): how surfaces other than the raw and v2 ones say it.
        self.error_bodies: list[tuple[str, Callable[[ProxyError, str], bytes]]] = []
        self._notice_second = 0
        self._notices = 0
        self.stopping = False  # this process is leaving: every answer says `Connection: close`

    @property
    def snapshot(self) -> Snapshot:
        return self.dispatcher.snapshot

    @property
    def draining(self) -> bool:
        return self.stopping or self.snapshot.draining

    @property
    def ready(self) -> bool:
        return self.snapshot.ready and not self.draining

    def model(self, name: str, version: str | None = None) -> ModelInfo:
        """Raises ModelNotFound (404). A known model may still have no worker: see its `state`."""
        model = self.dispatcher.models.get(name)
        if model is None:
            raise ModelNotFound(f"unknown model {name!r}")
        if version is not None and not self.dispatcher.knows_version(model, version):
            known = ", ".join(sorted({model.version, *model.versions}))
            raise ModelNotFound(f"model {name!r} has no version {version!r}; it has {known}")
        return model

    def default_model(self) -> str:
        """For paths that name none. Raises ModelNotFound if there is no obvious one."""
        if self.config.server.default_model:
            return self.config.server.default_model
        models = self.snapshot.models
        if len(models) == 1:
            return models[0].name
        raise ModelNotFound(
            f"{len(models)} models are configured and server.default_model names none of them"
        )

    def named(self, request: web.Request) -> str | None:
        """The model that its path means, if it means one. Raises ModelNotFound."""
        name: str | None = request.match_info.get("model")
        return self.default_model() if name is None and request.path == "/infer" else name

    def deadline(self, model: ModelInfo, *asked_s: float | None) -> float:
        """The smallest of the model's limit and what the client asked for, from now on."""
        limit = model.request_timeout_s or self.config.server.request_timeout
        for seconds in asked_s:
            if seconds is not None and 0 < seconds < limit:
                limit = seconds
        return time.monotonic() + limit

    async def read(self, request: web.Request) -> Body:
        """The whole body. Raises BodyTooLarge, BodyTimeout, BrokenBody, UnsupportedMedia, or
        ArenaFull.

        The caller releases it, on every path.
        """
        return await self.reader.read(request)

    async def read_bytes(self, request: web.Request) -> bytes:
        """The whole body, with nothing to release. Raises what `read` does."""
        body = await self.read(request)
        try:
            return body.copy()
        finally:
            body.release()

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """`expect_handler` of every route that reads a body: refuses before 100-continue."""
        try:
            await self.check(request)
            if (name := self.named(request)) is not None:
                self.model(name, request.match_info.get("version"))
            return await self.reader.expect(request)
        except ProxyError as error:
            return self.refuse(request, error)

    async def check(self, request: web.Request) -> None:
        for check in self.checks:
            await check(request)

    def refuse(self, request: web.Request, error: ProxyError) -> web.Response:
        """The answer that says so, in the form of the surface that was asked."""
        request_id = request.get(REQUEST_ID) or self.name_request(request)
        request[REFUSED] = error
        body = self.error_body(request.path, error, request_id)
        response = web.Response(status=error.status, body=body, headers=error.all_headers())
        if error.close:
            response.force_close()
        return response

    def error_body(self, path: str, error: ProxyError, request_id: str) -> bytes:
        """What the surface with that path says."""
        for prefix, say in self.error_bodies:
            if path.startswith(prefix):
                return say(error, request_id)
        return error.body(request_id)

    def name_request(self, request: web.Request) -> str:
        """The client's X-Request-Id if it is a sane one, else our own; kept with the request."""
        request[REQUEST_ID] = named = self.id_of(request.headers.get("X-Request-Id"))
        return named

    def id_of(self, named: str | None) -> str:
        if named is None or _SANE_ID.fullmatch(named) is None:
            self._requests += 1
            return f"{self._prefix}{self._requests:x}"
        return named

    def notice(self, kind: str, fields: dict[str, Any]) -> None:
        """A line for the supervisor's log and event stream; a few a second, the rest is dropped."""
        second = int(time.monotonic())
        if second != self._notice_second:
            self._notice_second, self._notices = second, 0
        self._notices += 1
        if self._notices <= _NOTICES_A_SECOND:
            self.link.send(Notice(kind, fields))

    def infer(self, call: Call) -> Coroutine[Any, Any, Outcome]:
        """One answer, always with status "ok". Raises a ProxyError for everything else."""
        for part in call.parts:
            if isinstance(part.data, bytes) and len(part.data) > INLINE_BYTES:
                return self._infer_parked(call)
        return self.dispatcher.infer(call)

    async def _infer_parked(self, call: Call) -> Outcome:
        parked = await self._park(call)
        try:
            return await self.dispatcher.infer(call)
        finally:
            for lease in parked:
                lease.release()

    async def stream(self, call: Call) -> AsyncGenerator[wire.Answer, None]:
        """Many answers: all but the last have `more`. What fails before the first is raised by the
        first `__anext__`, so peek before the status is sent. Close it (aclose) to cancel."""
        parked = await self._park(call)
        try:
            async with aclosing(self.dispatcher.stream(call)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            for lease in parked:
                lease.release()

    async def _park(self, call: Call) -> list[Lease]:
        """Bulk that a codec made (inflated, from base64, converted) goes into the arena too: a
        frame has no room for it. The caller releases."""
        parked: list[Lease] = []
        parts: list[wire.Part] = []
        try:
            for part in call.parts:
                if isinstance(part.data, bytes) and len(part.data) > INLINE_BYTES:
                    size = len(part.data)
                    wait = max(0.0, call.deadline - time.monotonic()) if call.deadline else 60.0
                    lease = await self.arena.lease(size, wait)
                    parked.append(lease)
                    lease.view[:] = part.data
                    block = wire.Block(lease.offset, size)
                    part = msgspec.structs.replace(part, data=block)
                parts.append(part)
        except BaseException:
            for lease in parked:
                lease.release()
            raise
        if parked:
            call.parts = tuple(parts)
            call.leases = (*call.leases, *parked)
        return parked

    async def ask(self, method: str, path: str) -> Reply:
        """A call of the supervisor's control API. Raises SupervisorLost."""
        return await self.link.ask(method, path)

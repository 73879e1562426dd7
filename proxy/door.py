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
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gpusup.conf.schema import Config
from gpusup.supervisor.wire import ModelInfo, Reply, Snapshot
from gpusup.worker import wire

from .errors import ModelNotFound

if TYPE_CHECKING:
    from .arena import Arena, Lease
    from .body import Body, BodyReader
    from .counts import Counts
    from .dispatch import Dispatcher
    from .link import Link

#: Key of the request's id in `request[...]`, set before any handler runs.
REQUEST_ID = "request_id"


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
    cost: int | None = None  # device bytes, if the caller knows better than the measured peaks
    received: float = 0.0

    def input_hash(self, arena: memoryview) -> str:
        """Names the input across proxies and workers. Reads all of it: not for each request."""
        digest = hashlib.blake2b(self.model.encode(), digest_size=16)
        for part in self.parts:
            digest.update(f"\0{part.name}\0{part.datatype}\0{part.shape}\0".encode())
            match part.data:
                case wire.Block(offset=offset, length=length):
                    digest.update(arena[offset : offset + length])
                case bytes() as data:
                    digest.update(data)
        return digest.hexdigest()


@dataclass(slots=True, frozen=True)
class Outcome:
    """An answer with status "ok", who gave it, and how long its stages took (seconds)."""

    answer: wire.Answer
    version: str
    slot: str
    queue_s: float  # in this proxy
    total_s: float  # from `infer` to the answer

    def headers(self) -> dict[str, str]:
        headers = {"Gpusup-Model-Version": self.version}
        if self.answer.degraded:
            headers["Gpusup-Degraded"] = self.answer.degraded
        return headers


class Door:
    """`checks` run before each request's body is read, may look at its head, and raise a ProxyError
    (API keys). `inflate` undoes a Content-Encoding: (data, coding, limit in bytes) -> bytes,
    raising ProxyError; without it coded bodies are refused with 415."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        dispatcher: Dispatcher,
        link: Link,
        arena: Arena,
        reader: BodyReader,
        counts: Counts,
    ) -> None:
        self.config = config
        self.name = name
        self.dispatcher = dispatcher
        self.link = link
        self.arena = arena
        self.reader = reader
        self.counts = counts
        self.checks: list[Callable[[web.Request], None]] = []
        self.stopping = False  # this process is leaving: every answer says `Connection: close`

    @property
    def snapshot(self) -> Snapshot:
        return self.dispatcher.snapshot

    @property
    def draining(self) -> bool:
        return self.stopping or self.snapshot.draining

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

    def deadline(self, model: ModelInfo, timeout_s: float | None = None) -> float:
        """The smaller of the model's limit and what the client asked for, from now on."""
        limit = model.request_timeout_s or self.config.server.request_timeout
        if timeout_s is not None and 0 < timeout_s < limit:
            limit = timeout_s
        return time.monotonic() + limit

    async def read(self, request: web.Request) -> Body:
        """The whole body. Raises BodyTooLarge, BodyTimeout, BrokenBody, UnsupportedMedia, or
        ArenaFull.

        The caller releases it, on every path.
        """
        return await self.reader.read(request)

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """`expect_handler` of every route that reads a body: refuses before 100-continue."""
        return await self.reader.expect(request)

    async def infer(self, call: Call) -> Outcome:
        """One answer, always with status "ok". Raises a ProxyError for everything else."""
        return await self.dispatcher.infer(call)

    def stream(self, call: Call) -> AsyncIterator[wire.Answer]:
        """Many answers: all but the last have `more`. What fails before the first is raised by the
        first `__anext__`, so peek before the status is sent. Close it (aclose) to cancel."""
        return self.dispatcher.stream(call)

    async def ask(self, method: str, path: str, body: bytes = b"") -> Reply:
        """A call of the supervisor's control API. Raises SupervisorLost."""
        return await self.link.ask(method, path, body)

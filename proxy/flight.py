"""One plain prediction request on its short way: body, admission, the worker's answer, bytes.

It does what handlers.predict does, by the same functions, but from callbacks and not in a task.
What would take long (large JSON, compression) or has to wait (room in the arena for what a codec
made) is still done in a task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import Answer

from . import compression, raw_codec
from .arena import INLINE_BYTES, Lease
from .body import Body, too_slow
from .door import Call
from .errors import Internal, ProxyError
from .handlers import bytes_to_convert, decode
from .heads import Head
from .replies import DEFLATE_IN_THREAD, THREAD_FROM, tell_shape_of
from .shared import Shared, lines
from .v2_checks import ShapeRefused

if TYPE_CHECKING:
    from .express import Express
    from .workers import Entry

_log: Final = logging.getLogger("gpusup.proxy.http")


class Flight:
    """From the head to the answer. `receiving`: its body is not whole yet."""

    __slots__ = (
        "_begun",
        "_body",
        "_call",
        "_chunks",
        "_entry",
        "_lead",
        "_lease",
        "_owner",
        "_seen",
        "_seen_at",
        "_shared",
        "_task",
        "_waited",
        "count",
        "head",
        "receiving",
        "request_id",
    )

    def __init__(self, shared: Shared, owner: Express, head: Head) -> None:
        self._shared = shared
        self._owner = owner
        self.head = head
        self.request_id = shared.door.id_of(head.request_id)
        self._begun = time.monotonic()
        self.receiving = False
        self.count = 0  # bytes of the body that are there
        self._chunks: list[bytes] = []
        self._lease: Lease | None = None
        self._body: Body | None = None
        self._call: Call | None = None
        self._entry: Entry | None = None
        self._task: asyncio.Task[None] | None = None
        self._lead = False
        self._seen = 0
        self._seen_at = self._begun
        self._waited = 0.0  # for the arena, which is not the client's fault

    # -- the body --------------------------------------------------------------------------------

    def start(self, data: bytes, end: int) -> None:
        """`data` from `end` on is what is there of it."""
        size = self.head.length
        self.count = len(data) - end
        if size <= INLINE_BYTES:
            if self.count == size:
                self._body = Body(data[end:], self._shared.door.arena)
                self._go()
            else:
                self.receiving = True
                self._chunks.append(data[end:])
                self._shared.watch(self)
            return
        self.receiving = True
        lease = self._shared.door.arena.try_lease(size)
        if lease is not None:
            self._take(lease, memoryview(data)[end:])
        else:
            self._chunks.append(data[end:])
            self._owner.hold()
            self._do(self._wait_for_room(size))

    async def _wait_for_room(self, size: int) -> None:
        began = time.monotonic()
        limit_s = self._shared.door.config.server.request_timeout
        try:
            lease = await self._shared.door.arena.lease(size, limit_s)
        finally:
            self._waited = time.monotonic() - began
            self._owner.go_on()
        self._task = None
        early, self._chunks = b"".join(self._chunks), []
        self._take(lease, memoryview(early))

    def _take(self, lease: Lease, early: memoryview) -> None:
        self._lease = lease
        lease.length = self.head.length
        view = lease.view
        view[: len(early)] = early
        self._body = Body(view, self._shared.door.arena, lease)
        if len(early) == len(view):
            self.whole()
            return
        self._seen_at = time.monotonic()
        self._shared.watch(self)
        self._owner.receive(self, view[len(early) :])

    def more(self, data: bytes) -> bytes:
        """A piece of a small body. Returns what came behind its end."""
        missing = self.head.length - self.count
        rest = data[missing:]
        self._chunks.append(data[:missing] if rest else data)
        self.count += len(data) - len(rest)
        if self.count == self.head.length and self._task is None:  # else it waits for room
            self._body = Body(b"".join(self._chunks), self._shared.door.arena)
            self._chunks = []
            self.whole()
        return rest

    def whole(self) -> None:
        self._shared.unwatch(self)
        self.receiving = False
        self._go()

    def look(self, now: float) -> None:
        """Whether its client is too slow."""
        if self.count != self._seen:
            self._seen, self._seen_at = self.count, now
        server = self._shared.door.config.server
        elapsed = now - self._begun - self._waited
        limit_s = server.body_timeout
        if now - self._seen_at > limit_s or (
            elapsed > limit_s and self.count < server.body_min_rate * elapsed
        ):
            self._refuse(too_slow(server, self.count, elapsed))

    # -- to the worker ---------------------------------------------------------------------------

    def _go(self) -> None:
        body = self._body
        assert body is not None
        try:
            door = self._shared.door
            head = self.head
            model = door.model(head.model or door.default_model(), head.version)
            if head.json and len(body) >= THREAD_FROM:
                self._do(self._decode_apart(model, body))
                return
            self._send(model, *self._decode(model, body))
        except ProxyError as error:
            self._refuse(error)
        except Exception as error:
            self._broken(error)

    def _decode(self, model: ModelInfo, body: Body) -> tuple[Any, int, bool]:
        try:
            return decode(self._shared.door, model, body, self.head.content_type)
        except ShapeRefused as error:
            tell_shape_of(
                self._shared.door, self._remote(), model.name, self.request_id, len(body), error
            )
            raise

    async def _decode_apart(self, model: ModelInfo, body: Body) -> None:
        made = await asyncio.to_thread(self._decode, model, body)
        self._task = None
        self._send(model, *made)

    def _send(self, model: ModelInfo, parts: Any, rows: int, lead: bool) -> None:
        head, body = self.head, self._body
        assert body is not None
        self._lead = lead
        self._call = call = Call(
            model.name,
            parts,
            head.version,
            rows=rows,
            deadline=self._shared.door.deadline(model, head.timeout_s),
            priority=head.priority,
            params=head.params,
            request_id=self.request_id,
            session=head.session,
            leases=body.leases,
            received=self._begun,
        )
        for part in parts:
            if isinstance(part.data, bytes) and len(part.data) > INLINE_BYTES:
                self._do(self._infer(call))
                return
        self._entry = self._shared.dispatcher.begin(call, self)
        self._shared.dispatcher.hurry()

    async def _infer(self, call: Call) -> None:
        outcome = await self._shared.door.infer(call)
        self._task = None
        self._respond(outcome.answer)

    # -- and back (workers.Waits) ----------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        entry, self._entry = self._entry, None
        assert entry is not None
        try:
            self._shared.dispatcher.ended(entry, answer)
            self._respond(answer)
        except ProxyError as error:
            self._refuse(error)
        except Exception as error:
            self._broken(error)

    def failed(self, error: ProxyError) -> None:
        entry, self._entry = self._entry, None
        assert entry is not None
        self._shared.dispatcher.count_failure(entry.call, error, entry.arrived)
        self._refuse(error)

    def _respond(self, answer: Answer) -> None:
        accept = self.head.accept
        parts = answer.parts
        if len(parts) == 1 and parts[0].datatype == "":
            made = raw_codec.encode(parts, accept)
        elif sum(map(bytes_to_convert, parts)) < THREAD_FROM:
            made = raw_codec.encode(parts, accept, lead=self._lead)
        else:
            self._do(self._encode_apart(answer))
            return
        self._pack(answer, made)

    async def _encode_apart(self, answer: Answer) -> None:
        encode = partial(raw_codec.encode, answer.parts, self.head.accept, lead=self._lead)
        made = await asyncio.to_thread(encode)
        self._task = None
        self._pack(answer, made)

    def _pack(self, answer: Answer, made: raw_codec.RawAnswer) -> None:
        shared = self._shared
        length = len(made.body)
        packs = length >= compression.SMALLEST and shared.compress
        coding = ""
        if packs:
            wanted = self.head.accept_encoding
            coding = compression.choose(wanted, made.content_type, length)
            if coding and length >= DEFLATE_IN_THREAD:
                self._do(self._pack_apart(answer, made, coding))
                return
        body = compression.deflate(made.body, coding) if coding else made.body
        self._good(answer, made, coding, packs, body)

    async def _pack_apart(self, answer: Answer, made: raw_codec.RawAnswer, coding: str) -> None:
        body = await asyncio.to_thread(compression.deflate, made.body, coding)
        self._task = None
        self._good(answer, made, coding, True, body)

    def _good(
        self, answer: Answer, made: raw_codec.RawAnswer, coding: str, packs: bool, body: bytes
    ) -> None:
        call = self._call
        assert call is not None
        prefix = self._shared.prefix(
            call.served_version, answer.degraded, made.content_type, made.varies, coding, packs
        )
        self._write(200, prefix + b"Cache-Control: no-store\r\n", body)

    def _refuse(self, error: ProxyError) -> None:
        body = self._shared.door.error_body(self.head.path, error, self.request_id)
        headers = error.all_headers()
        unread = self.head.length - self.count if self.receiving else 0
        headers.pop("Connection", None)
        if "Cache-Control" not in headers:
            headers["Cache-Control"] = "no-store"
        close = error.close or unread > 0
        head = lines(error.status, headers)
        self._write(error.status, head, body, close=close, unread=unread, refused=error)

    def _broken(self, error: Exception) -> None:
        # Ours to mend: the log has where, the client only that.
        head = self.head
        _log.exception("cannot answer %s %s: %r", head.method, head.path, error, exc_info=error)
        self._refuse(Internal("internal error"))

    def _write(
        self,
        status: int,
        head: bytes,
        body: bytes,
        *,
        close: bool = False,
        unread: int = 0,
        refused: ProxyError | None = None,
    ) -> None:
        shared = self._shared
        self._clear()
        remote = self._remote() if shared.logs or refused is not None else ""
        close = close or shared.door.draining
        tail = f"X-Request-Id: {self.request_id}\r\nContent-Length: {len(body)}\r\n"
        if close:
            tail += "Connection: close\r\n"
        self._owner.answer(
            b"%b%b%b\r\n" % (head, shared.date(), tail.encode()), body, close=close, unread=unread
        )
        self._ended(status, remote, refused)

    def _ended(self, status: int, remote: str, refused: ProxyError | None) -> None:
        head = self.head
        self._shared.ended(
            self.request_id,
            head.method,
            head.path,
            head.route,
            status,
            time.monotonic() - self._begun,
            head.length,
            remote,
            refused,
        )

    def _remote(self) -> str:
        peer = self._owner.peername
        return str(peer[0]) if isinstance(peer, tuple) and peer else str(peer or "")

    # -- its end ---------------------------------------------------------------------------------

    def _clear(self) -> None:
        if self.receiving:
            self._shared.unwatch(self)
            self.receiving = False
        if self._body is not None:
            self._body.release()

    def left(self) -> None:
        """The client is gone."""
        remote = self._remote() if self._shared.logs else ""
        if self._task is not None:
            self._task.cancel()
        if self._entry is not None:
            self._shared.dispatcher.left(self._entry)
            self._entry = None
        self._clear()
        self._ended(499, remote, None)

    def _do(self, step: Coroutine[Any, Any, None]) -> None:
        """In a task that ends with the client."""
        self._task = asyncio.get_running_loop().create_task(self._shielded(step))

    async def _shielded(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except ProxyError as error:
            self._task = None
            self._refuse(error)
        except Exception as error:
            self._task = None
            self._broken(error)

"""Request bodies: limits from the head, before 100-continue; then bytes, counted and timed.

Small ones stay bytes. Bulk goes chunk by chunk into a leased block of the arena, whence workers
read it. A client that stalls before its first 64 KiB holds no block, and one that stalls at all is
cut off; until the body is whole it holds no queue place and no device memory either.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import StreamReader, hdrs, web
from aiohttp.http_exceptions import BadHttpMessage

from gpusup.conf.schema import ServerConfig
from gpusup.worker import wire

from .arena import INLINE_BYTES, Arena, Lease
from .compression import inflate
from .errors import (
    BodyTimeout,
    BodyTooLarge,
    BrokenBody,
    ExpectationFailed,
    NotImplementedHere,
    ProxyError,
    UnsupportedMedia,
)

#: Fields of a body that lies in the arena go as blocks from this size on: frames stay small.
_FIELD_BYTES: Final = 1024
_GROW_FROM: Final = 256 * 1024


class Body:
    """A whole body: `data` is bytes, or a view of the block that `leases` holds."""

    __slots__ = ("_arena", "_lease", "_released", "data")

    def __init__(self, data: bytes | memoryview, arena: Arena, lease: Lease | None = None) -> None:
        self.data = data
        self._arena = arena
        self._lease = lease
        self._released = False

    def __len__(self) -> int:
        return len(self.data)

    @property
    def leases(self) -> tuple[Lease, ...]:
        return () if self._lease is None else (self._lease,)

    def release(self) -> None:
        """What was sent to a worker stays until that is through. Calling twice does nothing."""
        if not self._released:
            self._released = True
            if self._lease is not None:
                self._lease.release()

    def copy(self, start: int = 0, length: int | None = None) -> bytes:
        end = len(self.data) if length is None else start + length
        piece = self.data[start:end]
        return piece if isinstance(piece, bytes) else bytes(piece)

    def find(self, what: bytes, start: int, end: int | None = None) -> int:
        """As bytes.find, without a copy."""
        if end is None:
            end = len(self.data)
        if isinstance(self.data, bytes):
            return self.data.find(what, start, end)
        assert self._lease is not None
        assert self._arena.map is not None
        base = self._lease.offset
        at = self._arena.map.find(what, base + start, base + end)
        return at if at < 0 else at - base

    def part(
        self,
        name: str,
        start: int = 0,
        length: int | None = None,
        *,
        datatype: str = "",
        shape: tuple[int, ...] = (),
        content_type: str = "",
        filename: str = "",
    ) -> wire.Part:
        """A range of it as an input; without a copy if it is large."""
        end = len(self.data) if length is None else start + length
        return wire.Part(name, self.cut(start, end), datatype, shape, content_type, filename)

    def cut(self, start: int, end: int) -> bytes | wire.Block:
        """The bytes [start, end) in the form in which they travel to a worker."""
        if self._lease is not None and end - start > _FIELD_BYTES:
            return wire.Block(self._lease.offset + start, end - start)
        return self.copy(start, end - start)


class BodyReader:
    def __init__(self, config: ServerConfig, arena: Arena) -> None:
        self._config = config
        self._arena = arena
        self.limit = min(config.body_limit, max(arena.total, INLINE_BYTES))

    def check_head(self, request: web.Request) -> str:
        """What the head alone forbids. Returns the content coding, "" for none."""
        declared = request.content_length
        if declared is not None and declared > self.limit:
            raise BodyTooLarge(
                f"request body of {declared} bytes is over the limit of {self.limit}"
            )
        headers = request.headers
        transfer = headers.get(hdrs.TRANSFER_ENCODING)
        if transfer is not None and transfer.strip().lower() != "chunked":
            raise NotImplementedHere(
                f"transfer coding {transfer!r} is not supported, only chunked is"
            )
        coding = headers.get(hdrs.CONTENT_ENCODING)
        if coding is None:
            return ""
        coding = coding.strip().lower()
        if coding in ("", "identity"):
            return ""
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise UnsupportedMedia(
                f"content coding {coding!r} is not supported",
                headers={"Accept-Encoding": "gzip, deflate"},
            )
        return coding

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Says 100 only to a body that would be read. Raises what `read` would."""
        wanted = request.headers.get(hdrs.EXPECT, "")
        if wanted.lower() != "100-continue":
            raise ExpectationFailed(f"unknown expectation {wanted!r}")
        self.check_head(request)
        if request.version >= (1, 1):
            writer = request.writer
            await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            writer.output_size = 0  # or it would count as a part of the answer
        return None

    async def read(self, request: web.Request) -> Body:
        coding = self.check_head(request)
        content = request.content
        if not coding and content.is_eof():
            # The usual small request: it came with its head and nothing has to be waited for.
            try:
                data = content.read_nowait()
            except (BadHttpMessage, web.RequestPayloadError) as error:
                raise BrokenBody("broken request body") from error
            if len(data) <= INLINE_BYTES:
                return Body(data, self._arena)
            if len(data) > self.limit:
                raise self._too_large()
            return await self._keep(data)
        body = await self._receive(request, content)
        if not coding:
            return body
        try:
            data = await self._inflate(body.data, coding)
        finally:
            body.release()
        return await self._keep(data)

    async def _keep(self, data: bytes) -> Body:
        if len(data) <= INLINE_BYTES:
            return Body(data, self._arena)
        lease = await self._arena.lease(len(data), self._config.request_timeout)
        view = lease.view
        view[:] = data
        return Body(view, self._arena, lease)

    async def _inflate(self, data: bytes | memoryview, coding: str) -> bytes:
        if len(data) <= INLINE_BYTES:
            return inflate(data, coding, self.limit)
        return await asyncio.to_thread(inflate, data, coding, self.limit)

    async def _receive(self, request: web.Request, content: StreamReader) -> Body:
        config = self._config
        loop = asyncio.get_running_loop()
        declared = request.content_length
        early: list[bytes] = []
        lease: Lease | None = None
        count = 0
        waited = 0.0  # for the arena, which is not the client's fault
        begun = loop.time()
        try:
            async with asyncio.timeout(config.body_timeout) as stall:
                while chunk := await content.readany():
                    now = loop.time()
                    elapsed = now - begun - waited
                    count += len(chunk)
                    if count > self.limit:
                        raise self._too_large()
                    if elapsed > config.body_timeout and count < config.body_min_rate * elapsed:
                        raise too_slow(config, count, elapsed)
                    if lease is None and count <= INLINE_BYTES:
                        early.append(chunk)
                    else:
                        if lease is None or count > lease.size:
                            stall.reschedule(None)
                            lease = await self._room(lease, declared, count)
                            waited += loop.time() - now
                        if early:
                            early.append(chunk)
                            chunk = b"".join(early)
                            early.clear()
                        view = self._arena.memory
                        end = lease.offset + count
                        view[end - len(chunk) : end] = chunk
                        lease.length = count
                    stall.reschedule(loop.time() + config.body_timeout)
        except TimeoutError:
            self._give(lease)
            raise too_slow(config, count, loop.time() - begun - waited) from None
        except (BadHttpMessage, web.RequestPayloadError) as error:
            self._give(lease)
            raise BrokenBody("broken request body") from error
        except ConnectionError:
            self._give(lease)
            raise asyncio.CancelledError from None  # nobody is there to be told
        except BaseException:
            self._give(lease)
            raise
        if lease is None:
            return Body(early[0] if len(early) == 1 else b"".join(early), self._arena)
        return Body(lease.view, self._arena, lease)

    async def _room(self, lease: Lease | None, declared: int | None, count: int) -> Lease:
        """The block for all of it, or twice as much as before when the length was not declared.

        While it waits for the larger block it holds the smaller one; that ends by the time limit.
        """
        size = declared or min(self.limit, max(_GROW_FROM, 2 * count))
        wider = await self._arena.lease(max(size, count), self._config.request_timeout)
        if lease is not None:
            self._arena.memory[wider.offset : wider.offset + lease.length] = lease.view
            lease.release()
        return wider

    @staticmethod
    def _give(lease: Lease | None) -> None:
        if lease is not None:
            lease.release()

    def _too_large(self) -> ProxyError:
        return BodyTooLarge(f"request body is over the limit of {self.limit} bytes")


def too_slow(config: ServerConfig, count: int, elapsed: float) -> ProxyError:
    return BodyTimeout(
        f"request body stalled: {count} bytes in {elapsed:.1f} s, at least "
        f"{config.body_min_rate} bytes/s are wanted after {config.body_timeout:g} s"
    )

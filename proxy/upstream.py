"""Data connections to workers: the handshake with its descriptors, then frames."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from gpusup.supervisor.wire import Route
from gpusup.worker import wire
from gpusup.worker.frame import HEADER, MAX_FRAME_BYTES
from gpusup.worker.progress import Reader

#: Work frames end at about this many bytes of inputs, so that no frame nears the limit.
_FRAME_BYTES: Final = 4 * 2**20
_BUFFER: Final = 4 * 2**20


class BrokenWorker(Exception):
    """It speaks something else than it should, or is not the worker that was meant."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """A socket on which both sides have said who they are; `rest` is what came after."""

    sock: socket.socket
    welcome: wire.DataWelcome
    progress: Reader
    rest: bytes


async def greet(route: Route, proxy: str, arena_fd: int, arena_bytes: int) -> Greeted:
    """Connect to the worker of `route` and exchange descriptors, within 5 s.

    Raises OSError (not there), TimeoutError, BrokenWorker.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        async with asyncio.timeout(5.0):
            await loop.sock_connect(sock, route.path)
            hello = wire.encode(wire.DataHello(proxy, route.generation, arena_bytes))
            # A few bytes on a fresh socket: they fit.
            socket.send_fds(
                sock, [HEADER.pack(len(hello)) + hello], [arena_fd] if arena_bytes else []
            )
            return await _welcome(sock, route)
    except BaseException:
        sock.close()
        raise


async def _welcome(sock: socket.socket, route: Route) -> Greeted:
    data = b""
    fds: list[int] = []
    try:
        while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
            await _readable(sock)
            try:
                more, got, _, _ = socket.recv_fds(sock, 65536, 4)
            except BlockingIOError:
                continue
            fds += got
            if not more:
                raise ConnectionResetError("the worker hung up on the greeting")
            data += more
            if HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))[0] > MAX_FRAME_BYTES:
                raise BrokenWorker("the greeting is no frame")
        end = HEADER.size + HEADER.unpack_from(data)[0]
        try:
            welcome = wire.decode_from_worker(data[HEADER.size : end])
        except ValueError as error:
            raise BrokenWorker(f"cannot read the greeting: {error}") from error
        if not isinstance(welcome, wire.DataWelcome) or len(fds) != 1:
            raise BrokenWorker(f"no welcome with one descriptor but {len(fds)} of them")
        if (welcome.slot, welcome.generation) != (route.slot, route.generation):
            raise BrokenWorker(
                f"{route.slot} generation {route.generation} was meant, "
                f"{welcome.slot} generation {welcome.generation} answered"
            )
        try:
            progress = Reader(fds[0])
        except ValueError as error:
            raise BrokenWorker(f"its progress page is none: {error}") from error
        fds.clear()  # the reader has closed it
        return Greeted(sock, welcome, progress, data[end:])
    finally:
        for fd in fds:
            os.close(fd)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


class Connection(asyncio.Protocol):
    """Frames to and from one worker. `answered(answers)` for each frame of it; `lost()` once.

    `refused(id, why)`, in a later turn of the loop: an item that no frame has room for."""

    def __init__(
        self,
        greeted: Greeted,
        *,
        answered: Callable[[wire.Answers], None],
        lost: Callable[[], None],
        paused: Callable[[bool], None],
        refused: Callable[[int, str], None],
    ) -> None:
        self.welcome = greeted.welcome
        self.progress = greeted.progress
        self._rest = greeted.rest
        self._answered = answered
        self._lost = lost
        self._paused = paused
        self._refused = refused
        self._buffer = bytearray()
        self._wanted = HEADER.size  # bytes until it is worth looking again
        self._transport: asyncio.WriteTransport | None = None
        self._items: list[wire.Item] = []
        self._size = 0
        self._last_id = 0
        self.problem = ""  # why we hung up, if we did

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(high=_FRAME_BYTES)
        if self._rest:
            self.data_received(self._rest)
            self._rest = b""
        self.flush()  # what was added before there was a transport

    def data_received(self, data: bytes) -> None:
        buffer: bytes | bytearray
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted:
                return
            buffer = self._buffer
        else:
            buffer = data
        at, end = 0, len(buffer)
        frames: list[wire.FromWorker] = []
        try:
            with memoryview(buffer) as view:
                while end - at >= HEADER.size:
                    (length,) = HEADER.unpack_from(view, at)
                    if length > MAX_FRAME_BYTES:
                        raise ValueError(f"a frame of {length} bytes was announced")
                    after = at + HEADER.size + length
                    if after > end:
                        self._wanted = after - at
                        break
                    frames.append(wire.decode_from_worker(view[at + HEADER.size : after]))
                    at = after
                else:
                    self._wanted = HEADER.size
        except (ValueError, RecursionError) as error:
            self.problem = f"cannot read a frame: {error}"
            self.abort()
            return
        if buffer is self._buffer:
            del self._buffer[:at]
        elif at < end:
            self._buffer += buffer[at:]
        for frame in frames:
            if isinstance(frame, wire.Answers):
                self._answered(frame)

    def pause_writing(self) -> None:
        self._paused(True)

    def resume_writing(self) -> None:
        self._paused(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()
        self.progress.close()

    def add(self, item: wire.Item) -> None:
        """Goes out with the next `flush`."""
        self._items.append(item)
        for part in item.parts:
            if isinstance(part.data, bytes):
                self._size += len(part.data)
        if self._size > _FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._items and self._transport is not None:
            items, self._items, self._size = self._items, [], 0
            self._work(items)

    def _work(self, items: list[wire.Item]) -> None:
        """One frame, or several where one would be over the limit, at which a worker hangs up."""
        assert self._transport is not None
        body = wire.encode(wire.Work(items))
        if len(body) <= MAX_FRAME_BYTES:
            self._transport.write(HEADER.pack(len(body)) + body)
        elif len(items) > 1:
            half = len(items) // 2
            self._work(items[:half])
            self._work(items[half:])
        else:
            text = (
                f"the request takes {len(body)} bytes beside its bulk, "
                f"{MAX_FRAME_BYTES} are allowed"
            )
            # Not at once: whoever sends is in the midst of its books.
            asyncio.get_running_loop().call_soon(self._refused, items[0].id, text)

    def cancel(self, ids: list[int], *, recall: bool = False) -> None:
        self.flush()  # or it would overtake what it is about
        self._send(wire.Cancel(ids, recall))

    def credit(self, item: int, count: int) -> None:
        self._send(wire.Credit(item, count))

    def _send(self, message: wire.ToWorker) -> None:
        if self._transport is not None:
            body = wire.encode(message)
            self._transport.write(HEADER.pack(len(body)) + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

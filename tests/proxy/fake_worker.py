"""A worker without a model: speaks the data protocol in this very process, and does as it is told.

worker = FakeWorker(folder, slot="gpu0", answer=echo)      # or answer=None: `items` pile up
await worker.start(); worker.route() -> Route
worker.reply(item, ...); worker.busy(item); worker.executing([item]); worker.die()
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gpusup.supervisor.wire import Route, RouteState
from gpusup.worker import progress, wire
from gpusup.worker.frame import HEADER, FrameDecoder, pack

Reply = Callable[[wire.Item], wire.Answer | None]


def echo(item: wire.Item) -> wire.Answer:
    return wire.Answer(item.id, "ok", item.parts, batch_rows=item.rows)


class _Connection(asyncio.Protocol):
    def __init__(self, worker: FakeWorker, number: int, arena: mmap.mmap | None) -> None:
        self.worker = worker
        self.number = number
        self.arena = arena
        self.transport: asyncio.Transport | None = None
        self._frames = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self.worker.heard(self, wire.decode_to_worker(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.connections.discard(self)

    def send(self, message: wire.FromWorker) -> None:
        assert self.transport is not None
        self.transport.write(pack(wire.encode(message)))


class FakeWorker:
    def __init__(
        self,
        folder: Path,
        *,
        slot: str = "gpu0",
        generation: int = 1,
        model: str = "m",
        version: str = "1",
        device: str = "GPU-0",
        rows: int = 64,
        answer: Reply | None = echo,
        degrade: tuple[str, ...] = (),
        fallback: bool = False,
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.model = model
        self.version = version
        self.device = device
        self.rows = rows
        self.answer = answer
        self.degrade = degrade
        self.fallback = fallback
        self.path = str(folder / f"{slot}.{generation}.sock")
        self.fd = progress.create(slot)
        self.writer = progress.Writer(self.fd)
        self.items: list[wire.Item] = []  # not answered, in order
        self.cancelled: list[int] = []
        self.recalled: list[int] = []
        self.credits: list[tuple[int, int]] = []
        self.frames = 0
        self.connections: set[_Connection] = set()
        self._owner: dict[int, _Connection] = {}
        self._task: asyncio.Task[None] | None = None
        self._sock: socket.socket | None = None

    def route(self, state: RouteState = "open") -> Route:
        return Route(
            slot=self.slot, generation=self.generation, model=self.model, version=self.version,
            device=self.device, path=self.path, state=state, max_rows=self.rows, budget_s=1.0,
            degrade=self.degrade, fallback=self.fallback,
        )  # fmt: skip

    async def start(self) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.setblocking(False)
        self._sock.bind(self.path)
        self._sock.listen()
        self._task = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        number = 0
        while True:
            sock, _ = await loop.sock_accept(self._sock)
            number += 1
            sock.setblocking(True)
            hello, fds = await asyncio.to_thread(_greeting, sock)
            arena = None
            if fds:
                arena = mmap.mmap(fds[0], hello.arena_bytes)
                os.close(fds[0])
            if hello.generation != self.generation:
                sock.close()
                continue
            load = self.load()
            welcome = wire.DataWelcome(
                number, self.slot, self.generation, self.model, self.version, load
            )
            socket.send_fds(sock, [pack(wire.encode(welcome))], [self.fd])
            sock.setblocking(False)
            connection = _Connection(self, number, arena)
            self.connections.add(connection)
            await loop.create_unix_connection(lambda c=connection: c, sock=sock)  # type: ignore[misc]

    def load(self) -> wire.Load:
        queued = sum(item.rows for item in self.items)
        return wire.Load(queued, 0, max(0, self.rows - queued), 0.0)

    def heard(self, connection: _Connection, message: wire.ToWorker) -> None:
        match message:
            case wire.Work(items=items):
                self.frames += 1
                answers = []
                for item in items:
                    answer = self.answer(item) if self.answer is not None else None
                    if answer is None:
                        self.items.append(item)
                        self._owner[item.id] = connection
                    else:
                        answers.append(self._signed(answer))
                if answers:
                    connection.send(wire.Answers(answers, self.load()))
            case wire.Cancel(ids=ids, recall=True):
                self.recalled += ids
            case wire.Cancel(ids=ids):
                self.cancelled += ids
            case wire.Credit(id=item, count=count):
                self.credits.append((item, count))
            case _:
                raise AssertionError(message)

    def data(self, part: wire.Part) -> bytes:
        """What a part holds, also where it is a block of the (only) proxy's arena."""
        if isinstance(part.data, bytes):
            return part.data
        (connection,) = self.connections
        assert connection.arena is not None
        return bytes(connection.arena[part.data.offset : part.data.offset + part.data.length])

    def reply(self, item: wire.Item, **fields: object) -> None:
        """Answer one that piled up; `more=True` keeps it."""
        if not fields.get("more"):
            self.items.remove(item)
        answer = wire.Answer(item.id, **{"status": "ok", **fields})  # type: ignore[arg-type]
        answer = self._signed(answer)
        connection = self._owner[item.id]
        if not connection.transport or connection.transport.is_closing():
            return
        connection.send(wire.Answers([answer], self.load()))

    def _signed(self, answer: wire.Answer) -> wire.Answer:
        """A good answer whose text says nothing else says who gave it."""
        if answer.status != "ok" or answer.text:
            return answer
        return msgspec.structs.replace(answer, text=self.slot)

    def busy(self, item: wire.Item) -> None:
        self.reply(item, status="busy", started=False)

    def executing(self, items: list[wire.Item]) -> None:
        self.writer.start(1.0, [(self._owner[i.id].number, i.id) for i in items])

    def die(self) -> None:
        """As by SIGKILL: nothing is said, the sockets just end."""
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self.items.clear()
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._sock is not None:
            self._sock.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    async def close(self) -> None:
        self.die()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(OSError):
            os.close(self.fd)


def _greeting(sock: socket.socket) -> tuple[wire.DataHello, list[int]]:
    data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
    (length,) = HEADER.unpack_from(data)
    hello = wire.decode_to_worker(data[HEADER.size : HEADER.size + length])
    assert isinstance(hello, wire.DataHello)
    assert len(data) == HEADER.size + length
    return hello, fds

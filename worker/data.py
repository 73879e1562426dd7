"""The worker's own socket, where proxies bring work and take answers away.

Answers go out with the load of the moment, as many as there are in one frame. Each proxy's items
may lie in its arena, memory that this process maps; the mapping ends with the last view of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import time
import traceback
from collections.abc import Sequence
from itertools import count
from typing import Final, assert_never

from . import wire
from .entry import EngineLike, Entry
from .frame import MAX_FRAME_BYTES, pack
from .progress import Writer
from .streams import READ_BYTES, Loop, Stream, complain

HELLO_LIMIT_S: Final = 5.0
BACKLOG: Final = 64


class Connection(Stream):
    """One proxy, from its hello to its end."""

    def __init__(self, server: DataServer, sock: socket.socket, number: int) -> None:
        super().__init__(server.loop, sock)
        self.server = server
        self.number = number
        self.since = time.monotonic()
        self.greeted = False
        self._arena: memoryview | None = None
        self._descriptors: list[int] = []
        self._outbox: list[wire.Answer] = []
        self._flushing = False  # a flush is queued in the loop

    # -- in -----------------------------------------------------------------------------------

    def receive(self) -> memoryview | None:
        if self.greeted:
            return super().receive()  # the kernel drops descriptors that nobody asks for
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self.sock, READ_BYTES, 4, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            data, descriptors = b"", []
        self._descriptors += descriptors
        return memoryview(data)

    def on_frame(self, frame: bytes) -> None:
        message = wire.decode_to_worker(frame)
        engine = self.server.engine
        match message:
            case wire.DataHello():
                self._greet(message)
            case _ if not self.greeted:
                raise ValueError(f"{type(message).__name__} before DataHello")
            case wire.Work(items=items):
                self._work(items)
            case wire.Cancel(ids=ids, recall=True):
                engine.recall(self.number, ids)
            case wire.Cancel(ids=ids):
                engine.cancel(self.number, ids)
            case wire.Credit(id=item, count=more):
                engine.credit(self.number, item, more)
            case _:
                assert_never(message)

    def _greet(self, hello: wire.DataHello) -> None:
        """Raises ValueError."""
        spec = self.server.spec
        if self.greeted:
            raise ValueError("a second DataHello")
        if hello.generation != spec.generation:
            raise ValueError(
                f"{hello.proxy} means generation {hello.generation}, this is {spec.generation}"
            )
        if hello.arena_bytes:
            self._arena = self._map(hello.arena_bytes)
        self._close_descriptors()
        self.greeted = True
        welcome = wire.DataWelcome(
            self.number,
            spec.slot,
            spec.generation,
            spec.model,
            spec.version,
            self.server.engine.load_now(),
        )
        body = pack(wire.encode(welcome))
        with self.lock:
            sent = socket.send_fds(self.sock, [body], [self.server.progress.fd])
            if sent < len(body):
                self.send_locked(body[sent:])
        if self._arena is not None:
            try:
                self.server.engine.map_arena(self.number, self._arena)
            except Exception:
                traceback.print_exc()  # unregistered it is slower, not wrong

    def _map(self, size: int) -> memoryview:
        """Raises ValueError: a mapping beyond the file's end would kill us at the first touch."""
        if not self._descriptors:
            raise ValueError(f"an arena of {size} bytes was announced, its descriptor is missing")
        fd = self._descriptors[0]
        there = os.fstat(fd).st_size
        if not 0 < size <= there:
            raise ValueError(f"an arena of {size} bytes was announced, {there} are there")
        try:
            return memoryview(mmap.mmap(fd, size))
        except OSError as error:
            raise ValueError(f"cannot map an arena of {size} bytes: {error.strerror}") from error

    def _work(self, items: Sequence[wire.Item]) -> None:
        now = time.monotonic()
        entries = []
        for item in items:
            if item.rows < 1:
                self.reply(wire.Answer(item.id, "invalid", text=f"{item.rows} rows", started=False))
                continue
            entries.append(Entry(item, self.number, self.reply, self._arena, now))
        if not entries:
            return
        try:
            self.server.engine.offer(entries)
        except Exception as error:
            traceback.print_exc()
            text = f"the worker could not take it: {type(error).__name__}"
            for entry in entries:
                self.reply(wire.Answer(entry.item.id, "failed", text=text))

    # -- out ----------------------------------------------------------------------------------

    def reply(self, answer: wire.Answer) -> None:
        """From any thread. Goes out with the loop's next turn, along with what comes until then."""
        with self.lock:
            self._outbox.append(answer)
            if self._flushing:
                return
            self._flushing = True
        self.loop.call_soon(self._flush_soon)

    def _flush_soon(self) -> None:
        self._flushing = False  # before the outbox is emptied: what comes after, wakes again
        if self._outbox:
            self.flush()

    def flush(self, more: Sequence[wire.Answer] = (), *, empty: bool = False) -> None:
        """Send what waits, then `more`; with `empty`, the load even without an answer."""
        # Asked before our lock is taken: the engine may hold its own while it replies.
        load = self.server.engine.load_now()
        with self.lock:
            outbox, self._outbox = self._outbox, []
            outbox.extend(more)
            if (outbox or empty) and self.greeted:
                for data in frames(outbox, load):
                    self.send_locked(data)

    def on_close(self) -> None:
        self._close_descriptors()
        self.server.gone(self)
        # Not unmapped here: entries and tensors may still look into it. With the last view the
        # mapping goes by itself.
        self._arena = None

    def _close_descriptors(self) -> None:
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = []


def frames(answers: list[wire.Answer], load: wire.Load) -> list[bytes]:
    """As few frames as hold them. An answer that can't be sent is replaced by one that says so."""
    try:
        body = wire.encode(wire.Answers(answers, load))
        if len(body) <= MAX_FRAME_BYTES:
            return [pack(body)]
        problem = f"the answer has {len(body)} bytes, {MAX_FRAME_BYTES} are allowed"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"the answer cannot be encoded: {error}"
    if len(answers) == 1:
        ascii_problem = problem.encode("ascii", "backslashreplace").decode()
        return frames([wire.Answer(answers[0].id, "failed", text=ascii_problem)], load)
    half = len(answers) // 2
    return frames(answers[:half], load) + frames(answers[half:], load)


class DataServer:
    """Listens from `listen` on. `push_load` and `reply_all` are for the engine."""

    def __init__(
        self, loop: Loop, spec: wire.WorkerSpec, engine: EngineLike, progress: Writer
    ) -> None:
        self.loop = loop
        self.spec = spec
        self.engine = engine
        self.progress = progress
        self._connections: dict[int, Connection] = {}
        self._numbers = count(1)
        self._listener: socket.socket | None = None
        self._pushing = False

    def listen(self) -> None:
        """Raises OSError."""
        path = self.spec.data_path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # the name carries slot and generation: it can only be our own
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # Before bind, so that there is no moment at which others may connect.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        self._listener = sock
        self.loop.each_second(self._tick)
        self.loop.call_soon(lambda: self.loop.add(sock.fileno(), select.EPOLLIN, self._accept))

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: the others must be served on
                complain(f"cannot accept a proxy: {error}")
                return
            number = next(self._numbers)
            self._connections[number] = Connection(self, sock, number)

    def gone(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)
        if connection.greeted:
            self.engine.drop(connection.number)

    def _tick(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if not connection.greeted and now - connection.since > HELLO_LIMIT_S:
                connection.close()
            elif connection.stalled(now):
                complain(f"hanging up on proxy {connection.number}: it reads no answers")
                connection.close()

    def push_load(self) -> None:
        """Tell all proxies that there is room again."""
        if not self._pushing:
            self._pushing = True
            self.loop.call_soon(self._push)

    def _push(self) -> None:
        self._pushing = False
        for connection in list(self._connections.values()):
            connection.flush(empty=True)

    def reply_all(self, pairs: Sequence[tuple[Entry, wire.Answer]]) -> None:
        by_connection: dict[int, list[wire.Answer]] = {}
        for entry, answer in pairs:
            by_connection.setdefault(entry.connection, []).append(answer)
        for number, answers in by_connection.items():
            connection = self._connections.get(number)
            if connection is not None:  # else its proxy is gone, and nobody waits
                connection.flush(answers)

    def finish(self, limit_s: float) -> None:
        """Send what is left; for the end of the process, from the main thread."""
        end = time.monotonic() + limit_s
        for connection in list(self._connections.values()):
            connection.flush()
            connection.flush_for(max(0.0, end - time.monotonic()))
        with contextlib.suppress(OSError):
            os.unlink(self.spec.data_path)

"""The worker's link to the supervisor. When it ends, so does the worker.

Answered from the sockets' thread, so a ping comes back while the main thread computes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from typing import Final, NoReturn, assert_never

from . import wire
from .entry import EngineLike
from .frame import FrameTooLarge, pack
from .streams import Loop, Stream, complain

CONNECT_LIMIT_S: Final = 10.0


def connect(path: str) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(CONNECT_LIMIT_S)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


class ControlLink(Stream):
    """`tell` and `wait_go` from any thread."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        self._engine: EngineLike | None = None
        self._go = threading.Event()
        self._drain_asked = False
        self._attaching = threading.Lock()
        self._ending = threading.Lock()
        self._file = ""

    def tell(self, message: wire.FromWorkerControl) -> None:
        try:
            self.send(pack(wire.encode(message)))
        except FrameTooLarge as error:
            complain(f"cannot send {type(message).__name__}: {error}")

    def wait_go(self) -> None:
        self._go.wait()

    def attach(self, engine: EngineLike, ready: wire.WorkerReady) -> None:
        """From here on the engine answers; before, there was only the fact of being alive.

        `ready` is said in the same moment: who hears it may ask at once, and a drain that was
        asked for meanwhile is answered after it.
        """
        with self._attaching:
            self._engine = engine
            self.tell(ready)
            drain = self._drain_asked
        if drain:
            engine.drain(self._drained)

    @contextlib.contextmanager
    def owning(self, path: str) -> Iterator[None]:
        """The file that is made inside is taken away when the supervisor hangs up."""
        with self._ending:
            self._file = path
            yield

    def on_close(self) -> NoReturn:
        # Nobody to report to, and nobody who would end this process later, or tidy up after one
        # that was given up before it said hello.
        self._ending.acquire()  # for good: no file is made from here on
        if self._file:
            with contextlib.suppress(OSError):
                os.unlink(self._file)
        os._exit(1)

    def on_frame(self, frame: bytes) -> None:
        message = wire.decode_to_worker_control(frame)
        try:
            self._handle(message)
        except Exception:
            # An engine's fault in answering a question must not cost the requests it computes.
            traceback.print_exc()

    def _handle(self, message: wire.ToWorkerControl) -> None:
        engine = self._engine
        match message:
            case wire.Ping(serial=serial):
                self.tell(nothing_yet(serial) if engine is None else engine.pong(serial))
            case wire.Go():
                self._go.set()
            case wire.Drain():
                self._drain()
            case wire.Trim():
                if engine is not None:
                    engine.trim()
            case wire.AskReport(kind=kind):
                self.tell(wire.Report(kind, report_of(engine, kind)))
            case _:
                assert_never(message)

    def _drain(self) -> None:
        with self._attaching:
            self._drain_asked = True
            engine = self._engine
        if engine is not None:
            engine.drain(self._drained)
        # else `attach` will: it has no work yet that could be lost.

    def _drained(self) -> None:
        self.tell(wire.Drained())


def nothing_yet(serial: int) -> wire.Pong:
    return wire.Pong(serial, wire.Memory(), wire.Counters(), wire.Load(0, 0, 0, 0.0))


def report_of(engine: EngineLike | None, kind: str) -> str:
    if engine is None:
        return "still starting: nothing to report"
    try:
        return engine.report(kind)
    except Exception as error:
        return f"cannot report {kind}: {type(error).__name__}: {error}"

"""The sockets' thread: one epoll loop, and framed streams that any thread may send on.

No asyncio here: an answer is sent from the thread that computed it, without a wake-up in between,
and the loop takes over only what the socket would not take at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

from .frame import FrameDecoder

TICK_S: Final = 1.0
READ_BYTES: Final = 256 * 1024

#: A peer that leaves this much unread is not listened to until it reads on ...
PAUSE_BYTES: Final = 16 * 2**20
#: ... and with this much unread, and not a byte taken for STALL_S, it is hung up on.
UNSENT_LIMIT_BYTES: Final = 64 * 2**20
STALL_S: Final = 5.0


def complain(text: str) -> None:
    """One line to the worker's output, which the supervisor keeps with the slot."""
    sys.stderr.write(f"gpusup: {text}\n")
    sys.stderr.flush()


class Loop:
    """Runs handlers in the one thread that calls `run`. `call_soon` is for all threads."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._waking = False
        self._thread = 0
        self._ticks: list[Callable[[float], None]] = []
        self.buffer = bytearray(READ_BYTES)  # shared by all streams: only this thread reads
        self.add(self._wake, select.EPOLLIN, self._woken)

    def add(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def each_second(self, tick: Callable[[float], None]) -> None:
        self._ticks.append(tick)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)
        # The loop clears `_waking` before it empties the queue, so what is appended here is
        # either seen by that or wakes it again. Inside the loop's thread nobody need be woken.
        if not self._waking and threading.get_ident() != self._thread:
            self._waking = True
            os.eventfd_write(self._wake, 1)

    def disown(self) -> None:
        """In a forked child: let go of all sockets, so that the peers see the worker's end and
        not the child's. Their numbers stay taken, since objects copied with us still name them.
        """
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in [*self._handlers, self._epoll.fileno()]:
            with contextlib.suppress(OSError):
                os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)

    def run(self) -> NoReturn:
        """Never returns. An exception that gets here ends the process: nobody could reach it."""
        self._thread = threading.get_ident()
        try:
            self._run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _run(self) -> NoReturn:
        next_tick = time.monotonic() + TICK_S
        handlers, soon = self._handlers, self._soon
        while True:
            for fd, events in self._epoll.poll(0 if soon else TICK_S):
                handler = handlers.get(fd)
                if handler is not None:  # else a handler before it has removed it
                    handler(events)
            self._waking = False
            for _ in range(len(soon)):
                soon.popleft()()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                for tick in self._ticks:
                    tick(now)

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake)


class Stream:
    """One non-blocking socket of frames. `send` and `flush_for` from any thread, the rest from
    the loop's."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.loop = loop
        self.sock = sock
        self.fd = sock.fileno()
        self.decoder = FrameDecoder()
        self.closed = False
        self.lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._moved_at = 0.0  # when the peer last took something
        self._events = select.EPOLLIN
        loop.add(self.fd, self._events, self._ready)

    # -- for the owner to override ------------------------------------------------------------

    def on_frame(self, frame: bytes) -> None:
        raise NotImplementedError

    def on_close(self) -> None:
        """Called once, in the loop's thread, after the socket is closed."""

    def receive(self) -> memoryview | None:
        """Bytes that have come, empty at the end, None if there are none for now."""
        try:
            count = self.sock.recv_into(self.loop.buffer)
        except BlockingIOError:
            return None
        except OSError:
            count = 0
        return memoryview(self.loop.buffer)[:count]

    # -- out ----------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Sends what the socket takes and keeps the rest; never blocks. Nothing after `close`."""
        with self.lock:
            self.send_locked(data)

    def send_locked(self, data: bytes) -> None:
        if self.closed:
            return
        if not self._unsent:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.loop.call_soon(self.close)
                return
            if sent == len(data):
                return
            self._moved_at = time.monotonic()
            self._keep(memoryview(data)[sent:])
        else:
            self._keep(memoryview(data))

    def _keep(self, rest: memoryview) -> None:
        self._unsent.append(rest)
        self._unsent_bytes += len(rest)
        self._watch()

    def _watch(self) -> None:
        wanted = 0 if self._unsent_bytes > PAUSE_BYTES else select.EPOLLIN
        wanted |= select.EPOLLOUT if self._unsent else 0
        if wanted != self._events:
            self._events = wanted
            self.loop.modify(self.fd, wanted)

    def _write_locked(self) -> bool:
        """Send kept bytes; False if the peer is gone."""
        while self._unsent and not self.closed:
            head = self._unsent[0]
            try:
                sent = self.sock.send(head)
            except BlockingIOError:
                break
            except OSError:
                return False
            self._moved_at = time.monotonic()
            self._unsent_bytes -= sent
            if sent < len(head):
                self._unsent[0] = head[sent:]
                break
            self._unsent.popleft()
        if not self.closed:
            self._watch()
        return True

    def stalled(self, now: float) -> bool:
        return self._unsent_bytes > UNSENT_LIMIT_BYTES and now - self._moved_at > STALL_S

    def flush_for(self, limit_s: float) -> None:
        """Wait until all is sent, at most `limit_s`; for the last words of a process."""
        end = time.monotonic() + limit_s
        poll = select.poll()
        with self.lock:
            while self._unsent and not self.closed and (left := end - time.monotonic()) > 0:
                poll.register(self.fd, select.POLLOUT)
                poll.poll(left * 1000)
                if not self._write_locked():
                    return

    # -- in -----------------------------------------------------------------------------------

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            with self.lock:
                alive = self._write_locked()
            if not alive:
                self.close()
                return
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            data = self.receive()
            if data is None:
                return
            if not data:
                self.close()
                return
            self.feed(data)

    def feed(self, data: memoryview | bytes) -> None:
        try:
            for frame in self.decoder.feed(data):
                self.on_frame(frame)
                if self.closed:
                    return
        except (ValueError, RecursionError, OSError) as error:
            # FrameTooLarge and msgspec's errors are ValueErrors; a bomb of nested arrays is a
            # RecursionError. The peer is broken, the others are not.
            complain(f"hanging up on a peer: {type(error).__name__}: {error}")
            self.close()
        except Exception:
            traceback.print_exc()  # a fault of ours; the other peers are served on
            self.close()

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self._unsent.clear()
            self._unsent_bytes = 0
            self.loop.remove(self.fd)
            self.sock.close()
        self.on_close()

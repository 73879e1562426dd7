"""One frame conversation on a stream socket, driven by the event loop, that can be handed on.

Not asyncio's streams: an upgrade of the supervisor in place (reexec.py) takes the socket along
with what was read and not yet understood, and with what could not be sent yet.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import MsgspecError

from gpusup.worker.frame import HEADER, pack

#: No message of a control conversation comes near it; a peer that announces more is broken.
MAX_FRAME: Final = 32 * 1024 * 1024
_READ: Final = 256 * 1024
#: The reason given for a peer that is simply gone.
ENDED: Final = "connection ended"


def _why(error: OSError) -> str:
    # A peer that is killed with words unread resets the connection: an end like any other.
    return ENDED if isinstance(error, ConnectionError) else error.strerror or str(error)


class Channel:
    """`on_frame(body)` for each frame, `on_closed(why)` once when the peer is gone or broken.

    `on_frame` may raise ValueError or msgspec's errors: the conversation ends, with their text as
    the reason. After `close()` nothing is called any more.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[str], None],
        *,
        on_drained: Callable[[], None] | None = None,
        unread: bytes = b"",
        unsent: bytes = b"",
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_drained = on_drained
        self._in = bytearray(unread)
        self._out = bytearray(unsent)
        self._fds: list[tuple[int, list[int]]] = []  # (offset in _out, descriptors)
        self._closed = False
        self._paused = False
        self._loop.add_reader(sock, self._readable)
        if self._out:
            self._loop.add_writer(sock, self._writable)
        if self._in:
            self._loop.call_soon(self._understand)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def backlog(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._out)

    def send(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Queue one frame. `fds` travel with its first byte; they are duplicated here."""
        if self._closed:
            return
        if fds:
            self._fds.append((len(self._out), [os.dup(fd) for fd in fds]))
        self._out += pack(body)
        self._flush()

    def pause(self) -> None:
        """Read no more until `resume`: the kernel holds the peer back."""
        if not self._paused and not self._closed:
            self._paused = True
            self._loop.remove_reader(self.sock)

    def resume(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self.sock, self._readable)
            self._loop.call_soon(self._understand)

    def read_rest(self) -> None:
        """Understand what a peer that is dead now had still sent."""
        while not self._closed and not self._paused:
            try:
                data = self.sock.recv(_READ)
            except OSError:
                return
            if not data:
                return
            self._in += data
            self._understand()

    def close(self) -> None:
        if not self._closed:
            self._detach()
            self.sock.close()

    def export(self) -> dict[str, Any]:
        """Let go of the socket and say how to go on with it. Nothing is called afterwards."""
        self._detach()
        return {
            "link_fd": self.sock.detach(),
            "unread": bytes(self._in),
            "unsent": bytes(self._out),
        }

    def _detach(self) -> None:
        self._closed = True
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        for _, fds in self._fds:
            for fd in fds:
                os.close(fd)
        self._fds.clear()

    def _fail(self, why: str) -> None:
        if not self._closed:
            self.close()
            self._on_closed(why)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(_why(error))
            return
        if not data:
            self._fail(ENDED)
            return
        self._in += data
        self._understand()

    def _understand(self) -> None:
        while not self._closed and not self._paused and len(self._in) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._in)
            if length > MAX_FRAME:
                self._fail(f"a frame of {length} bytes announced, {MAX_FRAME} allowed")
                return
            end = HEADER.size + length
            if len(self._in) < end:
                return
            body = bytes(self._in[HEADER.size : end])
            del self._in[:end]
            try:
                self._on_frame(body)
            except (ValueError, RecursionError, MsgspecError) as error:
                self._fail(f"bad frame: {error}")

    def _writable(self) -> None:
        self._flush()
        if not self._closed and not self._out and self._on_drained:
            self._on_drained()

    def _flush(self) -> None:
        try:
            while self._out:
                if self._fds and self._fds[0][0] == 0:
                    end = self._fds[1][0] if len(self._fds) > 1 else len(self._out)
                    fds = self._fds[0][1]
                    rights = struct.pack(f"{len(fds)}i", *fds)
                    sent = self.sock.sendmsg(
                        [bytes(self._out[:end])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                    )
                    self._fds.pop(0)
                    for fd in fds:
                        os.close(fd)
                else:
                    end = self._fds[0][0] if self._fds else len(self._out)
                    sent = self.sock.send(self._out[:end])
                del self._out[:sent]
                self._fds = [(at - sent, fds) for at, fds in self._fds]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self.sock, self._writable)
        except OSError as error:
            # Not called back from inside send(): the caller may be half-way through its own change.
            self._loop.remove_writer(self.sock)
            self._out.clear()
            self._loop.call_soon(self._fail, _why(error))
        else:
            self._loop.remove_writer(self.sock)

"""The supervisor's end of the workers' control connections.

A worker connects back and says who it is. It is believed only if the process at the other end is
the one that was started for that slot and generation; what comes from anybody else is dropped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from gpusup.worker import wire
from gpusup.worker.wire import FromWorkerControl, ToWorkerControl, WorkerHello

from .channel import ENDED, Channel

Key = tuple[str, int]
OnMessage = Callable[[str, int, FromWorkerControl], None]
OnGone = Callable[[str, int], None]

_HELLO_LIMIT_S: Final = 10.0
_MAX_STRANGERS: Final = 64
_UCRED: Final = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected a Unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(data)
    return pid, uid, gid


class WorkerLinks:
    """Accepts workers on `listener`, which stays the caller's.

    Per worker: `expect` when it is launched, `started` when its pid is known, `forget` when it is
    gone. `on_message` gets WorkerHello first; `on_gone` once, when a believed connection ends.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_message: OnMessage,
        on_gone: OnGone,
        on_stranger: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self._on_message = on_message
        self._on_gone = on_gone
        self._on_stranger = on_stranger
        self._loop = asyncio.get_running_loop()
        self._pids: dict[Key, int | None] = {}
        self._links: dict[Key, Channel] = {}
        self._waiting: dict[Key, tuple[_Stranger, WorkerHello]] = {}
        self._strangers: set[_Stranger] = set()
        self._loop.add_reader(listener, self._acceptable)

    def expect(self, slot: str, generation: int) -> None:
        self._pids[slot, generation] = None

    def started(self, slot: str, generation: int, pid: int) -> None:
        self._pids[slot, generation] = pid
        waiting = self._waiting.pop((slot, generation), None)
        if waiting:
            self._judge(*waiting)

    def forget(self, slot: str, generation: int) -> None:
        key = (slot, generation)
        self._pids.pop(key, None)
        link = self._links.pop(key, None)
        if link:
            link.close()
        waiting = self._waiting.pop(key, None)
        if waiting:
            self._refuse(waiting[0], f"{slot} (generation {generation}) is gone")

    def send(self, slot: str, generation: int, message: ToWorkerControl) -> bool:
        """False if that worker has no connection (yet, or any more)."""
        link = self._links.get((slot, generation))
        if link is None or link.closed:
            return False
        link.send(wire.encode(message))
        return True

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        for channel in [*self._links.values(), *(s.channel for s in self._strangers)]:
            channel.close()
        self._links.clear()
        self._strangers.clear()
        self._waiting.clear()

    def export(self) -> dict[str, Any]:
        """Let go of all connections; the workers notice nothing."""
        self._loop.remove_reader(self._listener)
        links = [
            {"slot": slot, "generation": generation, **link.export()}
            for (slot, generation), link in self._links.items()
        ]
        for stranger in self._strangers:
            stranger.channel.close()
        self._links.clear()
        return {
            "links": links,
            "pids": [[slot, generation, pid] for (slot, generation), pid in self._pids.items()],
        }

    def restore(self, exported: Mapping[str, Any]) -> None:
        self._pids.update({(slot, gen): pid for slot, gen, pid in exported["pids"]})
        for link in exported["links"]:
            key = (link["slot"], link["generation"])
            self._links[key] = Channel(
                socket.socket(fileno=link["link_fd"]),
                self._listen_to(key),
                self._ended(key),
                unread=link["unread"],
                unsent=link["unsent"],
            )

    # -- who is it? ------------------------------------------------------------------------------

    def _acceptable(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors
            self._on_stranger(f"cannot accept a worker's connection: {error.strerror}")
            return
        pid, uid, _ = peer_of(sock)
        if uid not in (0, os.geteuid()) or len(self._strangers) >= _MAX_STRANGERS:
            sock.close()
            self._on_stranger(f"process {pid} of user {uid} refused on the workers' socket")
            return
        stranger = _Stranger(pid)
        stranger.channel = Channel(
            sock,
            lambda body: self._introduced(stranger, body),
            lambda why: self._left(stranger, why),
        )
        self._strangers.add(stranger)
        self._loop.call_later(_HELLO_LIMIT_S, self._too_late, stranger)

    def _too_late(self, stranger: _Stranger) -> None:
        # One that has said hello waits for its launcher, however long that takes.
        if stranger in self._strangers and stranger not in [w for w, _ in self._waiting.values()]:
            self._refuse(stranger, f"said nothing for {_HELLO_LIMIT_S:g} s")

    def _left(self, stranger: _Stranger, why: str) -> None:
        self._strangers.discard(stranger)
        for key in [key for key, (other, _) in self._waiting.items() if other is stranger]:
            del self._waiting[key]
        if why != ENDED:
            self._on_stranger(f"process {stranger.pid} on the workers' socket: {why}")

    def _introduced(self, stranger: _Stranger, body: bytes) -> None:
        hello = wire.decode_from_worker_control(body)
        if not isinstance(hello, WorkerHello):
            raise ValueError(f"{type(hello).__name__} before WorkerHello")
        key = (hello.slot, hello.generation)
        if key not in self._pids:
            raise ValueError(f"nobody expects {hello.slot} (generation {hello.generation})")
        if key in self._links or key in self._waiting:
            raise ValueError(f"{hello.slot} (generation {hello.generation}) is connected already")
        # What follows hello is read only when the worker is believed.
        stranger.channel.pause()
        if self._pids[key] is None:
            self._waiting[key] = (stranger, hello)
        else:
            self._loop.call_soon(self._judge, stranger, hello)

    def _judge(self, stranger: _Stranger, hello: WorkerHello) -> None:
        key = (hello.slot, hello.generation)
        if stranger not in self._strangers:
            return
        wanted = self._pids.get(key)
        if wanted != stranger.pid or key in self._links:
            self._refuse(
                stranger,
                f"says it is {hello.slot} (generation {hello.generation}), "
                f"which is process {wanted}",
            )
            return
        self._strangers.discard(stranger)
        # The same conversation under a name: socket and unread bytes move over.
        moved = stranger.channel.export()
        self._links[key] = Channel(
            socket.socket(fileno=moved["link_fd"]),
            self._listen_to(key),
            self._ended(key),
            unread=moved["unread"],
        )
        self._on_message(hello.slot, hello.generation, hello)

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._strangers.discard(stranger)
        stranger.channel.close()
        self._on_stranger(f"process {stranger.pid} on the workers' socket: {why}")

    # -- a worker we know ------------------------------------------------------------------------

    def _listen_to(self, key: Key) -> Callable[[bytes], None]:
        def on_frame(body: bytes) -> None:
            message = wire.decode_from_worker_control(body)
            if isinstance(message, WorkerHello):
                raise ValueError("a second WorkerHello")
            self._on_message(*key, message)

        return on_frame

    def _ended(self, key: Key) -> Callable[[str], None]:
        def on_closed(why: str) -> None:
            self._links.pop(key, None)
            if why != ENDED:
                self._on_stranger(f"worker {key[0]} (generation {key[1]}): {why}")
            self._on_gone(*key)

        return on_closed


class _Stranger:
    channel: Channel

    def __init__(self, pid: int) -> None:
        self.pid = pid

"""A connection to a worker: nothing that was given to it is lost."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from gpusup.proxy.upstream import Connection, Greeted
from gpusup.worker import wire
from gpusup.worker.frame import FrameDecoder


class FakeTransport(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += bytes(data)


def item(number: int) -> wire.Item:
    return wire.Item(number, (wire.Part("", b"x"),))


def test_work_that_comes_before_the_transport_goes_out_with_it() -> None:
    sock = socket.socket()
    welcome = wire.DataWelcome(1, "cpu0", 1, "m", "1", wire.Load(0, 0, 4, 0.0))
    greeted = Greeted(sock, welcome, None, b"")  # type: ignore[arg-type]
    connection = Connection(
        greeted,
        answered=lambda frame: None,
        lost=lambda: None,
        paused=lambda paused: None,
        refused=lambda id, text: None,
    )
    connection.add(item(1))
    connection.flush()
    connection.add(item(2))
    transport = FakeTransport()
    connection.connection_made(transport)
    sent = [
        each.id
        for frame in FrameDecoder().feed(transport.written)
        for each in wire.decode_to_worker(frame).items  # type: ignore[union-attr]
    ]
    assert sent == [1, 2]
    sock.close()

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from gpusup.supervisor.channel import MAX_FRAME, Channel
from gpusup.worker.frame import HEADER, pack

from .processes import Told


def make(sock: socket.socket, **more: Any) -> tuple[Channel, Told, Told]:
    frames, closed = Told(), Told()
    return Channel(sock, frames, closed, **more), frames, closed


async def test_frames_arrive_whole_however_they_were_cut() -> None:
    ours, peer = socket.socketpair()
    channel, frames, closed = make(ours)
    for byte in pack(b"one") + pack(b""):
        peer.send(bytes([byte]))
    peer.send(pack(b"x" * 100_000))
    assert await frames.next() == (b"one",)
    assert await frames.next() == (b"",)
    assert await frames.next() == (b"x" * 100_000,)
    peer.close()
    assert await closed.next() == ("connection ended",)
    assert channel.closed


async def test_a_peer_that_does_not_read_blocks_nobody() -> None:
    ours, peer = socket.socketpair()
    drained = Told()
    channel, _, _ = make(ours, on_drained=drained)
    for _ in range(100):
        channel.send(b"y" * 100_000)
    assert channel.backlog > 1_000_000
    peer.setblocking(False)
    got = 0
    loop = asyncio.get_running_loop()
    while got < 100 * 100_004:
        got += len(await loop.sock_recv(peer, 1 << 20))
    await drained.next()
    assert channel.backlog == 0
    channel.close()
    peer.close()


async def test_descriptors_come_with_the_first_byte_of_their_own_frame() -> None:
    ours, peer = socket.socketpair()
    channel, _, _ = make(ours)
    pipes = [os.pipe() for _ in range(3)]
    channel.send(b"plain")
    for read_fd, write_fd in pipes:
        channel.send(b"with", [write_fd])
        os.close(write_fd)  # the channel has its own
        os.set_blocking(read_fd, False)
    channel.send(b"after")
    seen: list[int] = []
    data = b""
    while len(data) < 5 * HEADER.size + 22:
        piece, fds, _, _ = socket.recv_fds(peer, 1 << 16, 8)
        data += piece
        seen += fds
    assert data == pack(b"plain") + pack(b"with") * 3 + pack(b"after")
    for (read_fd, _), fd in zip(pipes, seen, strict=True):
        os.write(fd, b"!")
        assert os.read(read_fd, 1) == b"!"
        os.close(read_fd)
        os.close(fd)
    channel.close()
    peer.close()


async def test_a_frame_that_is_too_large_ends_the_conversation() -> None:
    ours, peer = socket.socketpair()
    _, frames, closed = make(ours)
    peer.send(HEADER.pack(MAX_FRAME + 1))
    (why,) = await closed.next()
    assert why == f"bad frame: {MAX_FRAME + 1}" or str(MAX_FRAME + 1) in str(why)
    assert frames.empty
    peer.close()


async def test_a_frame_that_is_refused_ends_the_conversation() -> None:
    ours, peer = socket.socketpair()
    closed = Told()

    def refuse(body: bytes) -> None:
        raise ValueError("no such word")

    Channel(ours, refuse, closed)
    peer.send(pack(b"?") + pack(b"not looked at"))
    assert await closed.next() == ("bad frame: no such word",)
    peer.close()


async def test_a_paused_channel_keeps_what_comes() -> None:
    ours, peer = socket.socketpair()
    frames, closed = Told(), Told()

    def once(body: bytes) -> None:
        frames(body)
        if body == b"1":
            channel.pause()

    channel = Channel(ours, once, closed)
    peer.send(pack(b"1") + pack(b"2"))
    await frames.next()
    assert frames.empty
    channel.resume()
    assert await frames.next() == (b"2",)
    channel.close()
    peer.close()


async def test_a_conversation_goes_on_after_it_was_handed_over() -> None:
    ours, peer = socket.socketpair()
    channel, frames, _ = make(ours)
    peer.send(pack(b"whole") + pack(b"in two pieces")[:7])
    await frames.next()
    for _ in range(40):
        channel.send(b"z" * 50_000)
    exported = channel.export()
    assert exported["unsent"]
    again, frames, _ = make(
        socket.socket(fileno=exported["link_fd"]),
        unread=exported["unread"],
        unsent=exported["unsent"],
    )
    peer.send(pack(b"in two pieces")[7:])
    assert await frames.next() == (b"in two pieces",)
    peer.setblocking(False)
    got = b""
    while len(got) < 40 * 50_004:
        got += await asyncio.get_running_loop().sock_recv(peer, 1 << 20)
    assert got == pack(b"z" * 50_000) * 40
    again.close()
    peer.close()

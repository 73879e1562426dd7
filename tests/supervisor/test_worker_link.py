from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpusup.supervisor.worker_link import WorkerLinks
from gpusup.worker import wire
from gpusup.worker.frame import FrameDecoder, pack
from gpusup.worker.wire import Drained, Fenced, Ping, WorkerHello

from .processes import Told


class Meeting:
    def __init__(self) -> None:
        self.path = f"/tmp/gpusup-test-{os.getpid()}.sock"
        Path(self.path).unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.setblocking(False)
        self.heard, self.gone, self.strangers = Told(), Told(), Told()
        self.links = self.make()

    def make(self) -> WorkerLinks:
        return WorkerLinks(self.listener, self.heard, self.gone, self.strangers)

    def worker(self, *words: wire.FromWorkerControl) -> socket.socket:
        """A connection from this very process."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.path)
        for word in words:
            sock.send(pack(wire.encode(word)))
        return sock


@pytest.fixture
async def meeting() -> AsyncIterator[Meeting]:
    made = Meeting()
    yield made
    made.links.close()
    made.listener.close()
    os.unlink(made.path)


def hello(slot: str = "gpu0", generation: int = 3) -> WorkerHello:
    return WorkerHello(slot, generation, os.getpid())


async def read(sock: socket.socket) -> bytes:
    sock.setblocking(False)
    decoder = FrameDecoder()
    while True:
        data = await asyncio.get_running_loop().sock_recv(sock, 65536)
        assert data, "hung up"
        for frame in decoder.feed(data):
            return frame


async def refused(sock: socket.socket) -> None:
    sock.setblocking(False)
    async with asyncio.timeout(10):
        assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
    sock.close()


async def test_words_go_both_ways_and_the_end_is_told(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    meeting.links.started("gpu0", 3, os.getpid())
    sock = meeting.worker(hello(), Fenced("illegal access"))
    assert await meeting.heard.next() == ("gpu0", 3, hello())
    assert await meeting.heard.next() == ("gpu0", 3, Fenced("illegal access"))
    assert meeting.links.send("gpu0", 3, Ping(1))
    assert wire.decode_to_worker_control(await read(sock)) == Ping(1)
    sock.close()
    assert await meeting.gone.next() == ("gpu0", 3)
    assert not meeting.links.send("gpu0", 3, Ping(2))
    assert meeting.strangers.empty


async def test_hello_may_come_before_the_launcher_knows_the_pid(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    sock = meeting.worker(hello(), Drained())
    other = meeting.worker(hello("gpu9", 1))  # something to wait for, after the first
    await meeting.strangers.next()
    assert meeting.heard.empty
    meeting.links.started("gpu0", 3, os.getpid())
    assert await meeting.heard.next() == ("gpu0", 3, hello())
    assert await meeting.heard.next() == ("gpu0", 3, Drained())
    sock.close()
    other.close()


async def test_another_process_that_takes_a_worker_s_name_is_refused(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    meeting.links.started("gpu0", 3, 1)
    sock = meeting.worker(hello())
    (text,) = await meeting.strangers.next()
    assert "says it is gpu0 (generation 3), which is process 1" in str(text)
    await refused(sock)
    assert meeting.heard.empty


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (hello("gpu0", 2), "nobody expects gpu0 (generation 2)"),
        (Drained(), "Drained before WorkerHello"),
    ],
)
async def test_who_is_not_expected_is_hung_up_on(
    meeting: Meeting, word: wire.FromWorkerControl, why: str
) -> None:
    meeting.links.expect("gpu0", 3)
    sock = meeting.worker(word)
    assert why in str(await meeting.strangers.next())
    await refused(sock)


async def test_junk_ends_one_connection_and_no_other(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    meeting.links.started("gpu0", 3, os.getpid())
    good = meeting.worker(hello())
    await meeting.heard.next()
    for junk in (pack(b"\xc1\xc1"), b"\xff\xff\xff\xff", pack(b"\x91" * 100_000)):
        bad = meeting.worker()
        bad.send(junk)
        assert "bad frame" in str(text := await meeting.strangers.next()) or "announced" in str(
            text
        )
        bad.close()
    good.send(pack(wire.encode(Drained())))
    assert (await meeting.heard.next())[2] == Drained()
    good.send(pack(wire.encode(hello())))  # twice is once too often
    assert await meeting.gone.next() == ("gpu0", 3)
    good.close()


async def test_a_second_connection_of_a_worker_is_refused(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    meeting.links.started("gpu0", 3, os.getpid())
    first = meeting.worker(hello())
    await meeting.heard.next()
    second = meeting.worker(hello())
    assert "is connected already" in str(await meeting.strangers.next())
    await refused(second)
    assert meeting.gone.empty
    first.close()


async def test_a_forgotten_worker_says_nothing_any_more(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    meeting.links.started("gpu0", 3, os.getpid())
    sock = meeting.worker(hello())
    await meeting.heard.next()
    meeting.links.forget("gpu0", 3)
    await refused(sock)
    assert meeting.gone.empty


async def test_a_real_other_process_is_known_by_its_pid(meeting: Meeting) -> None:
    code = f"""
import os, socket, sys
from gpusup.worker import wire
from gpusup.worker.frame import pack
s = socket.socket(socket.AF_UNIX); s.connect({meeting.path!r})
s.send(pack(wire.encode(wire.WorkerHello("gpu0", 3, 1))))
sys.stdin.read()
"""
    meeting.links.expect("gpu0", 3)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=subprocess.PIPE
    )
    meeting.links.started("gpu0", 3, process.pid)
    assert (await meeting.heard.next())[:2] == ("gpu0", 3)
    process.kill()
    assert await meeting.gone.next() == ("gpu0", 3)
    await process.wait()


async def test_connections_go_on_after_they_were_handed_over(meeting: Meeting) -> None:
    meeting.links.expect("gpu0", 3)
    meeting.links.expect("gpu1", 1)
    meeting.links.started("gpu0", 3, os.getpid())
    sock = meeting.worker(hello())
    await meeting.heard.next()
    exported = meeting.links.export()
    meeting.links = meeting.make()
    meeting.links.restore(exported)
    sock.send(pack(wire.encode(Drained())))
    assert await meeting.heard.next() == ("gpu0", 3, Drained())
    meeting.links.started("gpu1", 1, os.getpid())
    late = meeting.worker(hello("gpu1", 1))
    assert await meeting.heard.next() == ("gpu1", 1, hello("gpu1", 1))
    assert meeting.gone.empty
    sock.close()
    late.close()

"""The proxy as a process of its own, with this test as its supervisor."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gpusup.conf.schema import Config, ServerConfig
from gpusup.supervisor import wire as swire
from gpusup.worker import wire
from gpusup.worker.frame import FrameDecoder, pack

from .conftest import until
from .fake_worker import FakeWorker


class Supervisor:
    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.told: list[swire.FromProxy] = []
        self.ended = False

    def spawn(self, config: Config) -> socket.socket:
        ours, theirs = socket.socketpair()
        fd = os.memfd_create("config")
        os.write(fd, msgspec.msgpack.encode(msgspec.to_builtins(config)))
        fds = self.listener.fileno(), theirs.fileno(), fd
        command = [sys.executable, "-m", "gpusup.proxy"]
        for name, number in zip(("--listen-fd", "--link-fd", "--config-fd"), fds, strict=True):
            command += [name, str(number)]
        self.process = subprocess.Popen([*command, "--name", "proxy0"], pass_fds=fds, cwd="/")
        theirs.close()
        os.close(fd)
        return ours

    async def start(self, config: Config) -> None:
        ours = self.spawn(config)
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        frames = FrameDecoder()
        while data := await self.reader.read(65536):
            self.told += map(swire.decode_from_proxy, frames.feed(data))
        self.ended = True

    def say(self, message: swire.ToProxy) -> None:
        self.writer.write(pack(swire.encode(message)))

    def heard(self, kind: type[swire.FromProxy]) -> list[swire.FromProxy]:
        return [message for message in self.told if isinstance(message, kind)]

    async def close(self) -> None:
        self.writer.close()
        self.process.kill()
        self.process.wait()
        self.listener.close()
        await self.task


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    # The notice is long enough for whoever asks whether it leaves to be told so.
    await supervisor.start(Config(server=ServerConfig(arena=2**20, drain_notice=5.0)))
    yield supervisor
    await supervisor.close()


def snapshot(worker: FakeWorker) -> swire.Snapshot:
    info = swire.ModelInfo(name="m", state="ready", reason="", version="1", versions=("1",))
    return swire.Snapshot(
        serial=1, routes=(worker.route(),), models=(info,), devices=(), ready=True, draining=False
    )


def title_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")


async def readiness(session: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    async with session.get("/readyz") as response:
        return response.status, await response.json()


async def test_it_serves_reports_and_ends_when_told(supervisor: Supervisor, tmp_path: Path) -> None:
    def answer(item: wire.Item) -> wire.Answer:
        return wire.Answer(item.id, "ok", (wire.Part("o", b"1", content_type="application/json"),))

    worker = FakeWorker(tmp_path, answer=answer)
    await worker.start()
    supervisor.say(snapshot(worker))
    await until(lambda: supervisor.heard(swire.Listening), 20)
    assert supervisor.told[:2] == [
        swire.ProxyHello("proxy0", supervisor.process.pid),
        swire.Listening(supervisor.url),
    ]
    assert title_of(supervisor.process.pid) == b"gpusup: proxy 0"
    async with aiohttp.ClientSession(supervisor.url) as session:
        for _ in range(3):
            async with session.post("/predictions/m", data=b"x") as response:
                assert (response.status, await response.read()) == (200, b"1")
        asking = asyncio.create_task(session.get("/metrics").__aenter__())
        await until(lambda: supervisor.heard(swire.Ask))
        (ask,) = supervisor.heard(swire.Ask)
        assert isinstance(ask, swire.Ask)
        supervisor.say(swire.Reply(ask.id, 200, b"up 1\n", "text/plain"))
        async with await asking as response:
            assert await response.read() == b"up 1\n"

        worker.answer = None
        late = asyncio.create_task(session.post("/predictions/m", data=b"x").__aenter__())
        await until(lambda: worker.items)
        # A connection of its own, made before: a proxy that leaves accepts none.
        async with aiohttp.ClientSession(supervisor.url) as other:
            assert (await readiness(other))[0] == 200
            supervisor.say(swire.StopProxy(5.0))
            async with asyncio.timeout(5):
                while (told := await readiness(other))[0] == 200:  # noqa: ASYNC110 (it tells nobody)
                    await asyncio.sleep(0.001)
            assert (told[0], told[1]["reason"]) == (503, "draining")
        worker.reply(
            worker.items[0], parts=(wire.Part("o", b"2", content_type="application/json"),)
        )
        async with await late as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
    await until(lambda: supervisor.ended)
    assert supervisor.process.wait(5) == 0
    answered = sum(
        sample.value
        for report in supervisor.heard(swire.ProxyReport)
        if isinstance(report, swire.ProxyReport)
        for sample in report.counters
        if sample.name == "gpusup_requests_total"
    )
    assert answered == 4
    await worker.close()


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def leaves_at_once(tmp_path: Path) -> AsyncIterator[Supervisor]:
    """Of a proxy that gives no notice, before a worker that says the same back."""

    def echo(item: wire.Item) -> wire.Answer:
        return wire.Answer(item.id, "ok", (wire.Part("o", worker.data(item.parts[0])),))

    worker = FakeWorker(tmp_path, answer=echo)
    await worker.start()
    supervisor = Supervisor()
    await supervisor.start(Config(server=ServerConfig(arena=2**20, drain_notice=0.0)))
    supervisor.say(snapshot(worker))
    await until(lambda: supervisor.heard(swire.Listening), 20)
    yield supervisor
    await supervisor.close()
    await worker.close()


@asynccontextmanager
async def connection(supervisor: Supervisor) -> AsyncIterator[Line]:
    port = supervisor.listener.getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):  # its proxy may take longer: that is what we look for
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def come_to_rest(line: Line) -> None:
    line[1].write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await line[0].readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"Content-Length: (\d+)", head)
    await line[0].readexactly(int(length))


async def test_a_proxy_that_leaves_closes_idle_connections_and_waits_for_none(
    leaves_at_once: Supervisor,
) -> None:
    """Left open, they keep it for all its time, and what is asked on them is never answered."""
    async with connection(leaves_at_once) as used, connection(leaves_at_once) as new:
        await come_to_rest(used)
        leaves_at_once.say(swire.StopProxy(30.0))
        assert await used[0].read() == await new[0].read() == b""
        assert await asyncio.to_thread(leaves_at_once.process.wait, 5) == 0


async def test_a_proxy_that_leaves_reads_and_answers_a_request_that_has_begun(
    leaves_at_once: Supervisor,
) -> None:
    async with connection(leaves_at_once) as idle, connection(leaves_at_once) as (reader, writer):
        await come_to_rest(idle)
        writer.write(
            b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        leaves_at_once.say(swire.StopProxy(30.0))
        await idle[0].read()  # closed, so all connections have been gone through
        writer.write(b"0123456789")
        told = await reader.read()
        assert told.startswith(b"HTTP/1.1 200 ")
        assert told.endswith(b"\r\n\r\n0123456789")
        assert await asyncio.to_thread(leaves_at_once.process.wait, 5) == 0


async def test_it_ends_with_its_supervisor(supervisor: Supervisor) -> None:
    await until(lambda: supervisor.heard(swire.Listening), 20)
    supervisor.writer.close()
    assert await asyncio.to_thread(supervisor.process.wait, 5) == 0

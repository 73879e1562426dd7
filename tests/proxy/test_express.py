"""The short way of plain predictions: the same answers, from the same connections, as the long."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from gpusup.conf.schema import Config, LogConfig, ServerConfig
from gpusup.proxy.app import Runner, Site, make_app
from gpusup.proxy.express import Express
from gpusup.proxy.serve import make_surfaces
from gpusup.proxy.tls import Tls
from gpusup.worker import wire

from .conftest import World, until
from .fake_worker import FakeWorker, Reply
from .test_tls import make as make_certificate

LIMIT = 600_000


class Box:
    def __init__(self, world: World, runner: Runner, port: int) -> None:
        self.world = world
        self.runner = runner
        self.port = port
        self.context: ssl.SSLContext | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context)

    def live(self) -> Express:
        assert self.runner.server is not None
        (found,) = self.runner.server.connections
        assert isinstance(found, Express)
        return found


@asynccontextmanager
async def box(world: World, tls: Tls | None = None, **more: Any) -> AsyncIterator[Box]:
    usual: dict[str, Any] = {"arena": 2**20, "body_limit": LIMIT, "body_timeout": 0.2}
    server = ServerConfig(**usual | more)
    world.door.arena.close()
    world.open(Config(server=server, log=LogConfig(requests=0.0)))
    app = make_app(world.door)
    make_surfaces(app, world.door)
    runner = Runner(app, world.door)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    site = Site(runner, listener, most=50, ssl_context=tls.context if tls else None)
    await site.start()
    world.model()
    found = Box(world, runner, listener.getsockname()[1])
    if tls is not None:
        found.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        found.context.check_hostname = False
        found.context.verify_mode = ssl.CERT_NONE
    try:
        yield found
    finally:
        await runner.cleanup()
        listener.close()


def post(body: bytes, *, path: str = "/predictions/m", head: bytes = b"") -> bytes:
    start = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    return start + head + b"\r\n" + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(5.0):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers["Content-Length"]))
        return int(head[0].split(" ")[1]), headers, body


def echo(worker_of: list[FakeWorker]) -> Reply:
    def reply(item: wire.Item) -> wire.Answer:
        data = worker_of[0].data(item.parts[0])
        return wire.Answer(item.id, "ok", (wire.Part("o", data),), batch_rows=1)

    return reply


async def echoing(world: World) -> FakeWorker:
    found: list[FakeWorker] = []
    worker = await world.worker(answer=echo(found))
    found.append(worker)
    await world.tell()
    return worker


async def test_both_ways_say_the_same(world: World) -> None:
    async with box(world) as it:
        await echoing(world)
        told = []
        for way in (b"", b"Connection: close\r\n"):
            for kind in (b"application/json", b"image/png"):
                reader, writer = await it.connect()
                head = b"X-Request-Id: a\r\nContent-Type: " + kind + b"\r\n" + way
                writer.write(post(b"{}", head=head))
                status, headers, body = await answer(reader)
                headers.pop("Date")
                headers.pop("Connection", None)
                told.append((status, headers, body))
                writer.close()
                await writer.wait_closed()
        assert told[:2] == told[2:]
        world.clean()


async def test_a_request_may_come_in_any_pieces(world: World) -> None:
    async with box(world) as it:
        await echoing(world)
        reader, writer = await it.connect()
        request = post(b"0123456789")
        for cut in (*range(0, len(request), 7), len(request) - 3):
            writer.write(request[:cut])
            await asyncio.sleep(0)
            writer.write(request[cut:])
            assert (await answer(reader))[::2] == (200, b"0123456789")
        writer.close()
        world.clean()


async def test_a_connection_comes_back_to_the_short_way(world: World) -> None:
    async with box(world) as it:
        await echoing(world)
        reader, writer = await it.connect()
        for request in (
            post(b"a"),
            b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
            post(b"b", path="/predictions/nope"),
            post(b"c"),
        ):
            writer.write(request)
            await answer(reader)
            assert it.live()._clean
        writer.close()


async def test_pipelined_requests_are_answered_in_order(world: World) -> None:
    async with box(world) as it:
        worker = await world.worker(answer=None)
        await world.tell()
        reader, writer = await it.connect()
        writer.write(post(b"1"))
        await until(lambda: worker.items)
        writer.write(post(b"2") + post(b"3"))
        for expected in (b"1", b"2", b"3"):
            await until(lambda: worker.items)
            assert len(worker.items) == 1
            worker.reply(worker.items[0], parts=(wire.Part("o", expected),))
            assert (await answer(reader))[2] == expected
        writer.close()
        world.clean()


@pytest.mark.parametrize("tls", [False, True])
async def test_bulk_arrives_whole_and_the_next_request_too(
    world: World, tmp_path: Path, tls: bool
) -> None:
    if tls and shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    certificate = Tls(*make_certificate(tmp_path, "box")) if tls else None
    async with box(world, certificate) as it:
        worker = await world.worker(answer=None)
        await world.tell()
        reader, writer = await it.connect()
        for size in (65_537, 500_000, 10, LIMIT):
            body = bytes(range(251)) * (size // 251 + 1)
            body = body[:size]
            writer.write(post(body))
            await until(lambda: worker.items)
            (item,) = worker.items
            assert worker.data(item.parts[0]) == body
            assert isinstance(item.parts[0].data, wire.Block) == (size > 65_536)
            worker.reply(item, parts=(wire.Part("o", b"%d" % size),))
            assert (await answer(reader))[2] == b"%d" % size
            assert it.live()._clean
        writer.close()
        await writer.wait_closed()
        world.clean()


async def test_bulk_waits_for_room_in_the_arena(world: World) -> None:
    async with box(world, body_timeout=5.0) as it:
        worker = await world.worker(answer=None)
        await world.tell()
        lines = [await it.connect() for _ in range(4)]
        for _, writer in lines:
            writer.write(post(b"z" * 500_000))
        await until(lambda: len(worker.items) == 2)
        assert world.door.arena.waiting == 2
        for _ in lines:
            await until(lambda: worker.items)
            item = worker.items[0]
            assert worker.data(item.parts[0]) == b"z" * 500_000
            worker.reply(item, parts=(wire.Part("o", b"ok"),))
        for reader, writer in lines:
            assert (await answer(reader))[2] == b"ok"
            writer.close()
        world.clean()


@pytest.mark.parametrize("sent", [3, 70_000])
async def test_who_leaves_within_the_body_leaves_nothing(world: World, sent: int) -> None:
    async with box(world, body_timeout=5.0) as it:
        await echoing(world)
        _, writer = await it.connect()
        request = post(b"x" * 200_000)
        writer.write(request[: request.index(b"\r\n\r\n") + 4 + sent])
        await until(lambda: it.runner.server is not None and it.runner.server.connections)
        await until(lambda: it.live()._flight is not None)
        writer.transport.abort()
        await until(lambda: it.runner.server is not None and not it.runner.server.connections)
        world.clean()


async def test_a_small_body_that_stalls_is_408(world: World) -> None:
    async with box(world) as it:
        await echoing(world)
        reader, writer = await it.connect()
        writer.write(post(b"0123456789")[:-3])
        status, headers, _ = await answer(reader)
        assert (status, headers["Connection"]) == (408, "close")
        writer.close()
        world.clean()


async def test_what_is_in_flight_at_the_end_is_answered_with_close(world: World) -> None:
    async with box(world) as it:
        worker = await world.worker(answer=None)
        await world.tell()
        reader, writer = await it.connect()
        writer.write(post(b"1"))
        await until(lambda: worker.items)
        assert it.runner.server is not None
        world.door.stopping = True
        it.runner.server.pre_shutdown()
        worker.reply(worker.items[0], parts=(wire.Part("o", b"1"),))
        status, headers, _ = await answer(reader)
        assert (status, headers["Connection"]) == (200, "close")
        assert await reader.read() == b""
        writer.close()
        world.clean()


async def test_what_has_arrived_is_answered_before_its_connection_is_closed(world: World) -> None:
    """A loop that is late finds it only when it looks at its sockets again."""
    async with box(world) as it:
        await echoing(world)
        client = socket.create_connection(("127.0.0.1", it.port))
        await until(lambda: it.runner.server is not None and it.runner.server.connections)
        await until(lambda: it.live()._waiter is not None)
        client.sendall(post(b"1"))
        it.runner.close_idle()
        reader, writer = await asyncio.open_connection(sock=client)
        assert (await answer(reader))[::2] == (200, b"1")
        it.runner.close_idle()
        assert await reader.read() == b""
        writer.close()
        world.clean()


@pytest.mark.parametrize("body", [b"1", b"1" * 200_000])
async def test_what_is_not_answered_does_not_keep_the_process(world: World, body: bytes) -> None:
    async with box(world) as it:
        worker = await world.worker(answer=None)
        await world.tell()
        reader, writer = await it.connect()
        writer.write(post(body))
        await until(lambda: worker.items)
        assert it.runner.server is not None
        began = time.monotonic()
        await it.runner.server.shutdown(1.0)
        # Once for the flight: not again for the answer, nor for the task that is parked.
        assert 0.95 < time.monotonic() - began < 1.8
        assert await reader.read() == b""
        await until(lambda: worker.cancelled)
        worker.reply(worker.items[0], status="cancelled")
        await until(lambda: not world.door.dispatcher.flights())
        writer.close()
        world.clean()


async def test_a_client_that_reads_nothing_gets_no_more_than_one_answer_queued(
    world: World,
) -> None:
    async with box(world) as it:
        worker = await world.worker(answer=None)
        await world.tell()
        reader, writer = await it.connect()
        transport: Any = writer.transport
        transport.pause_reading()
        big = b"q" * 20_000_000
        writer.write(post(b"1"))
        await until(lambda: worker.items)
        worker.reply(worker.items[0], parts=(wire.Part("o", big),))
        await until(lambda: it.live()._unrested)
        writer.write(post(b"2"))
        await asyncio.sleep(0.02)
        assert not worker.items
        transport.resume_reading()
        assert (await answer(reader))[2] == big
        await until(lambda: worker.items)
        worker.reply(worker.items[0], parts=(wire.Part("o", b"2"),))
        assert (await answer(reader))[2] == b"2"
        writer.close()


async def test_a_line_break_in_a_models_content_type_is_our_error(world: World) -> None:
    async with box(world) as it:
        await world.worker(
            answer=lambda i: wire.Answer(
                i.id, "ok", (wire.Part("o", b"1", content_type="a/b\r\nSet-Cookie: x"),)
            )
        )
        await world.tell()
        reader, writer = await it.connect()
        writer.write(post(b"1"))
        assert (await answer(reader))[0] == 500
        writer.close()
        world.clean()


async def test_more_rows_than_a_batch_takes_are_refused(world: World) -> None:
    async with box(world) as it:
        world.model(max_rows=4)
        worker = await echoing(world)
        for rows, expected in ((4, 200), (5, 400)):
            made = io.BytesIO()
            np.save(made, np.zeros((rows, 2), np.float32))
            for way in (b"", b"Connection: close\r\n"):
                reader, writer = await it.connect()
                head = b"Content-Type: application/x-npy\r\nAccept: */*\r\n" + way
                writer.write(post(made.getvalue(), head=head))
                status, _, body = await answer(reader)
                assert status == expected, body
                writer.close()
                await writer.wait_closed()
        assert worker.frames == 2
        world.clean()


def test_the_loop_that_the_service_runs_on_does_the_same(tmp_path: Path) -> None:
    """Transports differ in when they read and in what they refuse."""

    async def check() -> None:
        world = World(tmp_path)
        world.open(Config(server=ServerConfig(arena=2**20)))
        async with box(world) as it:
            await echoing(world)
            reader, writer = await it.connect()
            for size in (10, 300_000, 0, 65_537):
                writer.write(post(b"x" * size))
                assert (await answer(reader))[::2] == (200, b"x" * size)
                assert it.live()._clean
            writer.write(post(b"x" * 200_000)[:100_000])
            assert (await answer(reader))[0] == 408
            assert await reader.read() == b""
            writer.close()
            world.clean()
        await world.close()

    uvloop.run(check())

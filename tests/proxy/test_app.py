"""HTTP at the front door over real sockets: settings, statuses, bodies, health, leaving."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser

from gpusup.conf.schema import Config, LogConfig, ServerConfig
from gpusup.proxy.app import Runner, Site, make_app
from gpusup.proxy.serve import make_surfaces
from gpusup.worker import wire

from .conftest import World, device, until
from .fake_worker import FakeWorker

BODY_LIMIT = 300_000


class Served:
    def __init__(self, world: World, runner: web.AppRunner, site: Site, port: int) -> None:
        self.world = world
        self.runner = runner
        self.site = site
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def raw(self, *pieces: bytes, end: bytes = b"") -> bytes:
        """Send bytes, read what comes until `end` is in it or the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            got = b""
            async with asyncio.timeout(5.0):
                while chunk := await reader.read(65536):
                    got += chunk
                    if end and end in got:
                        break
            return got
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.fixture
async def served(world: World) -> AsyncIterator[Served]:
    server = ServerConfig(
        arena=2**20, body_limit=BODY_LIMIT, body_timeout=0.2, idle_timeout=7.0, connections=8
    )
    world.door.arena.close()
    world.open(Config(server=server, log=LogConfig(requests=0.0)))
    app = make_app(world.door)
    make_surfaces(app, world.door)
    runner = Runner(app, world.door)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    site = Site(runner, listener, most=server.connections)
    await site.start()
    world.model()
    yield Served(world, runner, site, listener.getsockname()[1])
    await runner.cleanup()
    listener.close()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(served.url) as session:
        yield session


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.headers["Content-Type"] == "application/json"
    told: dict[str, Any] = msgspec.json.decode(await response.read())
    assert told["request_id"] == response.headers["X-Request-Id"]
    return told


async def test_the_settings_are_the_ones_the_connection_runs_with(served: Served) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    await until(lambda: served.runner.server and served.runner.server.connections)
    assert served.runner.server is not None
    (live,) = served.runner.server.connections
    assert live._keepalive_timeout == 7.0
    assert live._lingering_time == 2.0
    assert live.max_headers == 100
    assert live.access_logger is None
    assert live.logger.name == "gpusup.proxy.parser"
    assert served.runner.server.handler_cancellation is True
    assert HttpRequestParser.__module__ == "aiohttp._http_parser"  # the C one
    writer.close()
    await writer.wait_closed()


async def test_raw_bytes_are_answered_with_the_version_and_our_headers(
    served: Served, client: aiohttp.ClientSession
) -> None:
    worker = await served.world.worker(
        answer=lambda i: wire.Answer(
            i.id, "ok", (wire.Part("o", b'{"a":1}', content_type="application/json"),)
        )
    )
    await served.world.tell()
    for method, path in (
        ("POST", "/predictions/m"),
        ("PUT", "/predictions/m/1"),
        ("POST", "/infer"),
    ):
        async with client.request(
            method, path, data=b"\x00png", headers={"X-Request-Id": "mine-1"}
        ) as response:
            assert response.status == 200
            assert await response.read() == b'{"a":1}'
            assert response.headers["Content-Type"] == "application/json"
            assert response.headers["Gpusup-Model-Version"] == "1"
            assert response.headers["X-Request-Id"] == "mine-1"
            assert response.headers["Server"] == "gpusup"
            assert response.headers["Cache-Control"] == "no-store"
    assert worker.frames == 3
    served.world.clean()


async def test_unknown_things_and_wrong_methods_are_told_in_json(
    served: Served, client: aiohttp.ClientSession
) -> None:
    await served.world.tell()
    async with client.post("/predictions/nope", data=b"x") as response:
        assert (response.status, (await error_of(response))["code"]) == (404, "MODEL_NOT_FOUND")
    async with client.get("/nowhere") as response:
        assert (response.status, (await error_of(response))["code"]) == (404, "NOT_FOUND")
    async with client.delete("/predictions/m") as response:
        assert response.status == 405
        assert {"POST", "PUT"} <= set(response.headers["Allow"].split(", "))
        assert (await error_of(response))["code"] == "METHOD_NOT_ALLOWED"


async def test_an_insane_request_id_is_replaced(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get("/livez", headers={"X-Request-Id": "a b\tc"}) as response:
        assert response.status == 200
        assert "a b" not in response.headers["X-Request-Id"]


async def test_a_declared_body_over_the_limit_is_refused_before_100_continue(
    served: Served,
) -> None:
    await served.world.tell()
    head = b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    got = await served.raw(head + b"Content-Length: 9999999\r\n\r\n")
    assert b"100 Continue" not in got
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"9999999 bytes is over the limit of 300000" in got
    assert b"Connection: close" in got


async def test_an_undeclared_body_is_counted_while_it_is_read(served: Served) -> None:
    await served.world.tell()
    head = b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    got = await served.raw(head + chunk * 5, end=b"}")
    assert got.startswith(b"HTTP/1.1 413 ")
    served.world.clean()


@pytest.mark.parametrize("sent", [0, 70_000])
async def test_a_stalled_body_is_408_and_holds_nothing(served: Served, sent: int) -> None:
    await served.world.worker()
    await served.world.tell()
    head = b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"
    got = await served.raw(head + b"x" * sent)
    assert got.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in got
    served.world.clean()


async def test_bodies_of_every_size_and_framing_arrive_whole(
    served: Served, client: aiohttp.ClientSession
) -> None:
    seen: list[bytes] = []
    worker: FakeWorker

    def answer(item: wire.Item) -> wire.Answer:
        seen.append(worker.data(item.parts[0]))
        return wire.Answer(item.id, "ok", (wire.Part("o", b"{}", content_type="application/json"),))

    worker = await served.world.worker(answer=answer)
    await served.world.tell()

    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 50_000):
            yield data[at : at + 50_000]

    kind = {"Content-Type": "application/octet-stream"}
    for size in (0, 1, 65536, 65537, BODY_LIMIT):
        data = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
        async with client.post("/predictions/m", data=data, headers=kind) as response:
            assert response.status == 200, await response.text()
        async with client.put("/predictions/m", data=pieces(data), headers=kind) as response:
            assert response.status == 200, await response.text()
        assert seen[-2:] == [data, data]
    served.world.clean()


async def test_fields_of_a_form_become_parts_without_a_copy_of_the_large_ones(
    served: Served, client: aiohttp.ClientSession
) -> None:
    worker = await served.world.worker(answer=None)
    await served.world.tell()
    form = (
        (
            '--zzz\r\nContent-Disposition: form-data; name="größe"\r\n\r\n5\r\n'
            '--zzz\r\nContent-Disposition: form-data; name="file"; filename="a %22b.png"\r\n'
            "Content-Type: image/gif\r\n\r\n"
        ).encode()
        + b"i" * 100_000
        + b"\r\n--zzz--\r\n"
    )
    kind = {"Content-Type": "multipart/form-data; boundary=zzz"}

    async def post() -> int:
        async with client.post("/predictions/m", data=form, headers=kind) as response:
            return response.status

    posting = asyncio.create_task(post())
    await until(lambda: worker.items)
    size, file = worker.items[0].parts
    assert (size.name, worker.data(size)) == ("größe", b"5")
    assert (file.name, file.filename, file.content_type) == ("file", 'a "b.png', "image/gif")
    assert isinstance(file.data, wire.Block)
    assert worker.data(file) == b"i" * 100_000
    worker.reply(worker.items[0], parts=(wire.Part("o", b"1", content_type="application/json"),))
    assert await posting == 200
    served.world.clean()


async def test_a_client_that_hangs_up_is_cancelled_at_the_worker(served: Served) -> None:
    worker = await served.world.worker(answer=None)
    await served.world.tell()
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
    await until(lambda: worker.items)
    writer.transport.abort()
    await until(lambda: worker.cancelled)
    worker.reply(worker.items[0], status="cancelled")
    await until(lambda: served.world.door.dispatcher.in_flight == 0)
    served.world.clean()


async def test_a_full_queue_and_a_shed_say_when_to_come_back(
    served: Served, client: aiohttp.ClientSession
) -> None:
    await served.world.worker()
    served.world.devices = [device(watermark=0.95)]
    await served.world.tell()
    async with client.post("/predictions/m", data=b"x") as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        told = await error_of(response)
        assert told["code"] == "SHED"
        assert told["watermark"] == 0.95


async def test_health_tells_the_truth(served: Served, client: aiohttp.ClientSession) -> None:
    for path in ("/livez", "/healthz"):
        async with client.get(path) as response:
            assert (response.status, await response.json()) == (200, {"live": True})
    async with client.get("/readyz") as response:
        assert response.status == 503
        assert (await response.json())["ready"] is False
    await served.world.tell()
    async with client.get("/readyz") as response:
        assert (response.status, await response.json()) == (200, {"ready": True, "live": True})
    async with client.head("/readyz") as response:
        assert response.status == 200
    async with client.get("/ping") as response:
        assert await response.json() == {"status": "Healthy"}
    served.world.draining = True
    await served.world.tell()
    async with client.get("/readyz") as response:
        assert response.status == 503
        assert response.headers["Connection"] == "close"
    async with client.post("/predictions/m", data=b"x") as response:
        assert (response.status, (await error_of(response))["code"]) == (503, "DRAINING")


async def test_an_error_of_ours_is_a_plain_500(
    served: Served, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    await served.world.worker(answer=lambda i: wire.Answer(i.id, "ok", ()))
    await served.world.tell()

    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the server")

    served.world.door.model = broken  # type: ignore[method-assign, assignment]
    async with client.post("/predictions/m", data=b"x") as response:
        assert response.status == 500
        assert await error_of(response) | {"request_id": ""} == {
            "error": "internal error", "code": "INTERNAL", "request_id": "",
        }  # fmt: skip
    assert "a secret of the server" in caplog.text


async def test_beyond_the_limit_of_connections_the_backlog_waits(served: Served) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(8)]
    await until(lambda: served.site.connections() == 8)
    waiting = asyncio.create_task(
        served.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    )
    idle[0][1].close()
    assert (await waiting).startswith(b"HTTP/1.1 200 ")
    for _, writer in idle:
        writer.close()


async def test_broken_http_makes_no_traceback(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
        got = await served.raw(junk)
        assert got.startswith(b"HTTP/1.")
        assert b" 400 " in got.split(b"\r\n")[0]
    assert "Traceback" not in caplog.text


async def test_bulk_beyond_the_arena_waits_until_a_block_is_free(
    served: Served, client: aiohttp.ClientSession
) -> None:
    worker = await served.world.worker(answer=None)
    await served.world.tell()
    kind = {"Content-Type": "application/octet-stream"}

    async def post() -> int:
        data = b"b" * 290_000
        async with client.post("/predictions/m", data=data, headers=kind) as response:
            return response.status

    posts = [asyncio.create_task(post()) for _ in range(6)]  # 1.7 MB into 1 MiB
    await until(lambda: len(worker.items) == 3)
    await until(lambda: served.world.door.arena.waiting == 3)
    for _ in posts:
        await until(lambda: worker.items)
        worker.reply(
            worker.items[0], parts=(wire.Part("o", b"1", content_type="application/json"),)
        )
    assert await asyncio.gather(*posts) == [200] * 6
    served.world.clean()


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(
    served: Served,
) -> None:
    await served.world.worker()
    await served.world.tell()
    arena = served.world.door.arena
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(
        b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"
        + b"x" * 100_000
    )
    await until(lambda: arena.free < arena.total)
    writer.transport.abort()
    await until(lambda: arena.free == arena.total)
    served.world.clean()

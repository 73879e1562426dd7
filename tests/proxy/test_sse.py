"""Streams: the status waits for the first item, a cut one never looks complete, and a reader who
stalls is not waited for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpusup.proxy import sse
from gpusup.worker import wire

from .conftest import until
from .front import Front, front

TEXT: dict[str, dict[str, Any]] = {
    "text": {"methods": ("generate", "chat")},
    "m": {"methods": ("predict",)},
}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Front]:
    async with front(tmp_path, models=TEXT, write_timeout=0.5) as made:
        yield made


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def piece(text: str) -> tuple[wire.Part, ...]:
    return (wire.Part("text", text.encode(), content_type="text/plain"),)


def events(text: str) -> list[str]:
    return [block.removeprefix("data: ") for block in text.split("\n\n") if block]


def test_data_of_several_lines_is_one_event() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert sse.event(b"a\r\nb\rc") == b"data: a\ndata: b\ndata: c\n\n"


async def test_v2_streams_end_without_a_mark(door: Front, http: aiohttp.ClientSession) -> None:
    url = f"{door.url}/v2/models/text/generate_stream"
    answer = await http.post(url, json={"id": "7", "text_input": "a b", "parameters": {"k": 1}})
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert [json.loads(e) for e in events(await answer.text())] == [
        {"id": "7", "model_name": "text", "model_version": "1", "text_output": "A"},
        {"id": "7", "model_name": "text", "model_version": "1", "text_output": " B"},
    ]
    whole = await http.post(f"{door.url}/v2/models/text/generate", json={"text_input": "a b"})
    assert (await whole.json())["text_output"] == "A B"


async def test_raw_text_comes_whole_or_as_a_stream(
    door: Front, http: aiohttp.ClientSession
) -> None:
    url = f"{door.url}/predictions/text"
    stream = {"Accept": "text/event-stream"}
    answer = await http.post(url, data=b"a b", headers={**stream, "Content-Type": "text/plain"})
    assert events(await answer.text()) == ['{"text":"A"}', '{"text":" B"}', "[DONE]"]
    answer = await http.post(url, json={"prompt": "a b", "max_tokens": 5})
    assert await answer.json() == {"text": "A B"}
    answer = await http.post(url, data=b"a b", headers={"Accept": "text/plain"})
    assert (answer.content_type, await answer.text()) == ("text/plain", "A B")
    assert (await http.post(url, data=b"\xff")).status == 400
    assert (await http.post(url, json={"nothing": 1})).status == 400
    assert (await http.post(f"{door.url}/predictions/m", headers=stream)).status == 406


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"text_input": 1}', b"{}", b"[" * 10_000])
async def test_a_broken_request_gets_its_status(
    door: Front, http: aiohttp.ClientSession, body: bytes
) -> None:
    answer = await http.post(f"{door.url}/v2/models/text/generate_stream", data=body)
    assert answer.status == 400
    assert answer.headers["Content-Type"] == "application/json"


async def test_the_status_waits_for_the_first_item(
    door: Front, http: aiohttp.ClientSession
) -> None:
    worker = door.world.workers[0]
    url = f"{door.url}/v2/models/text/generate_stream"
    asked = asyncio.create_task(http.post(url, json={"text_input": "wait"}))
    await until(lambda: worker.items)
    assert not asked.done()
    worker.reply(worker.items[0], status="invalid", text="no such word")
    answer = await asked
    assert answer.status == 400
    assert (await answer.json())["error"] == "no such word"
    door.world.clean()


@pytest.mark.parametrize("fault", ["failed", "died"])
async def test_a_stream_cut_by_a_fault_says_so_and_never_looks_complete(
    door: Front, http: aiohttp.ClientSession, fault: str
) -> None:
    worker = door.world.workers[0]
    body = {"model": "text", "stream": True, "messages": [{"role": "user", "content": "wait"}]}
    asked = asyncio.create_task(http.post(f"{door.url}/v1/chat/completions", json=body))
    await until(lambda: worker.items)
    item = worker.items[0]
    worker.executing([item])
    worker.reply(item, parts=piece("one"), more=True)
    answer = await asked
    assert answer.status == 200
    if fault == "failed":
        worker.reply(item, status="failed", text="broke")
    else:
        worker.die()
    seen = bytearray()

    async def read_all() -> None:
        async for chunk in answer.content.iter_any():
            seen.extend(chunk)

    with pytest.raises(aiohttp.ClientPayloadError):
        await read_all()
    answer.close()
    last = json.loads(events(seen.decode())[-1])
    assert last["error"]["type"] == "server_error"
    assert b"[DONE]" not in seen


async def test_an_old_reader_gets_clean_bytes(door: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    body = b'{"text_input": "a b"}'
    writer.write(
        b"POST /v2/models/text/generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    assert b"chunked" not in head.lower()
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"}\n\n")
    writer.close()


async def test_who_leaves_cancels_the_work(door: Front, http: aiohttp.ClientSession) -> None:
    worker = door.world.workers[0]
    url = f"{door.url}/v2/models/text/generate_stream"
    asked = asyncio.create_task(http.post(url, json={"text_input": "wait"}))
    await until(lambda: worker.items)
    item = worker.items[0]
    worker.reply(item, parts=piece("one"), more=True)
    (await asked).close()
    await until(lambda: worker.cancelled == [item.id])
    worker.reply(item, status="cancelled")
    await until(lambda: door.world.door.dispatcher.in_flight == 0)
    door.world.clean()


async def test_a_reader_who_stalls_is_dropped(door: Front) -> None:
    worker = door.world.workers[0]
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", door.port))
    body = b'{"text_input": "wait"}'
    await loop.sock_sendall(
        sock,
        b"POST /v2/models/text/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body,
    )
    await until(lambda: worker.items)
    item = worker.items[0]
    given = item.credit
    sent = 0
    while not worker.cancelled and sent < 2000:
        # A worker sends only what it has credit for.
        while given > 0:
            worker.reply(item, parts=piece("x" * 65536), more=True)
            given -= 1
            sent += 1
        await asyncio.sleep(0.01)
        given += sum(count for _, count in worker.credits)
        worker.credits.clear()
    assert worker.cancelled == [item.id]
    assert sent < 200  # 13 MB in sockets and buffers at the very most
    worker.reply(item, status="cancelled")
    sock.close()


async def test_a_quiet_stream_is_kept_alive_by_comments(door: Front) -> None:
    """The comment comes between two items, and is none."""
    seen: list[bytes] = []

    class Response:
        async def write(self, data: bytes) -> None:
            seen.append(data)

    request: Any = None
    response: Any = Response()
    stream = sse._Stream(response, request, 1.0)
    pinging = asyncio.create_task(stream.ping(0.001))
    await until(lambda: len(seen) >= 2)
    pinging.cancel()
    assert set(seen) == {b": ping\n\n"}

from __future__ import annotations

import asyncio
import grp
import io
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpusup.supervisor.commands import UnknownTarget
from gpusup.supervisor.control import Caller, Control
from gpusup.supervisor.wire import StatusView

from .fake_commands import FakeCommands

PATH = f"/tmp/gpusup-test-control-{os.getpid()}.sock"
READER = Caller(name="guest", admin=False)


@pytest.fixture
def commands() -> FakeCommands:
    return FakeCommands()


@pytest.fixture
def control(commands: FakeCommands) -> Control:
    return Control(commands)


@pytest.fixture
async def client(control: Control) -> AsyncIterator[aiohttp.ClientSession]:
    Path(PATH).unlink(missing_ok=True)  # noqa: ASYNC240
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(PATH)
    listener.listen()
    await control.serve(listener)
    async with aiohttp.ClientSession(
        base_url="http://gpusup", connector=aiohttp.UnixConnector(path=PATH)
    ) as session:
        yield session
    await control.close()
    listener.close()
    os.unlink(PATH)


async def ask(control: Control, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    status, kind, content = await control.handle(method, path, body)
    assert kind == "application/json"
    return status, json.loads(content)


async def test_status_is_what_the_struct_says(client: aiohttp.ClientSession) -> None:
    async with client.get("/status") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"
        view = await response.json()
    assert view["schema"] == 1
    assert set(view) == set(StatusView.__struct_fields__)


async def test_verbs_reach_the_supervisor_with_who_asked(
    client: aiohttp.ClientSession, commands: FakeCommands
) -> None:
    async with client.post("/slots/gpu0/cordon", json={"why": "fan"}) as response:
        assert response.status == 200
    async with client.post("/slots/gpu1/drain", json={"limit_s": 5}) as response:
        assert await response.json() == {"change": "c1"}
    async with client.post("/models/digits/reload", json={"version": "2"}) as response:
        assert await response.json() == {"change": "c2"}
    by = commands.calls[0][3]
    assert commands.calls == [
        ("cordon", "gpu0", "fan", by),
        ("drain", "gpu1", 5.0, by),
        ("reload", "digits", {"version": "2"}),
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/slots/gpu7/drain", b"", 404, "not_found"),
        ("GET", "/changes/c9", b"", 404, "not_found"),
        ("GET", "/nonsense", b"", 404, "not_found"),
        ("GET", "/a/b/c/d", b"", 404, "not_found"),
        ("POST", "/models/digits/reload", b'{"version":"99"}', 409, "conflict"),
        ("POST", "/reexec", b"", 400, "invalid"),
        ("POST", "/slots/gpu0/drain", b"{", 400, "invalid"),
        ("POST", "/slots/gpu0/drain", b"[" * 100_000, 400, "invalid"),
        ("POST", "/slots/gpu0/drain", b'{"limit_s":"soon"}', 400, "invalid"),
        ("POST", "/slots/gpu0/drain", b'{"limit_s":-1}', 400, "invalid"),
        ("GET", "/changes/c1?wait=nan", b"", 400, "invalid"),
        ("GET", "/slots/gpu0/drain", b"", 405, "method"),
        ("POST", "/status", b"", 405, "method"),
        ("DELETE", "/slots/gpu0/drain", b"", 405, "method"),
        ("GET", "/models/digits/buckets", b"", 500, "internal"),
    ],
)
async def test_what_can_not_be_is_refused_in_one_line(
    control: Control, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    got, answer = await ask(control, method, path, body)
    assert (got, answer["code"]) == (status, code)
    assert "\n" not in answer["error"]
    if code == "conflict":
        assert answer["change"] == "c1"


async def test_who_may_only_look_can_not_change_anything(
    control: Control, commands: FakeCommands
) -> None:
    status, _, _ = await control.handle("GET", "/status", b"", READER)
    assert status == 200
    status, _, body = await control.handle("POST", "/slots/gpu0/drain", b"", READER)
    assert (status, json.loads(body)["code"]) == (403, "permission")
    assert commands.calls == []


async def test_waiting_for_a_change_returns_when_it_ends(
    control: Control, commands: FakeCommands
) -> None:
    commands.outcome = "running"
    commands.drain("gpu0", None, "me")
    waiting = asyncio.create_task(ask(control, "GET", "/changes/c1?wait=60"))
    await asyncio.sleep(0)
    assert not waiting.done()
    commands.abort("c1")
    async with asyncio.timeout(10):
        status, change = await waiting
    assert (status, change["state"]) == (200, "aborted")


async def test_waiting_for_a_change_ends_with_the_time(
    control: Control, commands: FakeCommands
) -> None:
    commands.outcome = "running"
    commands.drain("gpu0", None, "me")
    _, change = await ask(control, "GET", "/changes/c1?wait=0.1&steps=2")
    assert change["state"] == "running"
    _, change = await ask(control, "GET", "/changes/c1?wait=60&steps=1")  # a step is news
    assert len(change["steps"]) == 2


async def test_events_are_followed_until_the_client_leaves(
    client: aiohttp.ClientSession, commands: FakeCommands
) -> None:
    async with client.get("/events?follow=1") as response:
        first = json.loads(await response.content.readline())
        assert first["kind"] == "following"
        assert json.loads(await response.content.readline())["serial"] == 1
        commands.happened.append({"serial": 2, "kind": "late"})
        async with asyncio.timeout(10):
            assert json.loads(await response.content.readline())["kind"] == "late"


async def test_logs_are_followed_and_unknown_slots_refused_at_once(
    client: aiohttp.ClientSession, commands: FakeCommands
) -> None:
    async with client.get("/slots/gpu0/logs?follow=1&lines=2") as response:
        assert json.loads(await response.content.readline())["lines"] == ["two", "three"]
        commands.lines.append("four")
        async with asyncio.timeout(10):
            assert json.loads(await response.content.readline())["lines"] == ["four"]
    async with client.get("/slots/gpu7/logs?follow=1") as response:
        assert response.status == 404


async def test_following_the_logs_of_a_slot_ends_with_the_slot(
    client: aiohttp.ClientSession, commands: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(target: str, lines: int, since: int) -> tuple[list[str], int]:
        raise UnknownTarget(f"there is no slot {target}")

    async with client.get("/slots/gpu0/logs?follow=1") as response:
        await response.content.readline()
        monkeypatch.setattr(commands, "logs", vanished)
        async with asyncio.timeout(10):
            assert await response.content.read() == b""


async def test_a_defect_is_answered_and_logged(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await ask(control, "GET", "/models/digits/buckets")
    assert (status, answer["code"]) == (500, "internal")
    [record] = [r for r in caplog.records if r.exc_info]
    assert "/models/digits/buckets" in record.getMessage()


async def test_metrics_are_text(client: aiohttp.ClientSession) -> None:
    async with client.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "gpusup_build_info" in await response.text()


async def test_a_huge_body_is_refused_with_the_limit(client: aiohttp.ClientSession) -> None:
    async with client.post("/slots/gpu0/cordon", data=io.BytesIO(b"x" * 2_000_000)) as response:
        assert response.status == 413
        assert "1048576 bytes" in (await response.json())["error"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("curl"), reason="needs root and curl")
@pytest.mark.parametrize(("group", "status"), [("", 403), ("nosuchgroup", 403), ("mine", 200)])
async def test_another_user_may_look_and_with_the_group_also_change(
    commands: FakeCommands, group: str, status: int
) -> None:
    stranger = 65534
    if group == "mine":
        group = grp.getgrgid(stranger).gr_name
    control = Control(commands, group)
    listener = socket.socket(socket.AF_UNIX)
    Path(PATH).unlink(missing_ok=True)  # noqa: ASYNC240
    listener.bind(PATH)
    os.chmod(PATH, 0o666)
    listener.listen()
    await control.serve(listener)

    async def call(*words: str) -> int:
        curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket", PATH]
        process = await asyncio.create_subprocess_exec(
            *curl, *words, stdout=asyncio.subprocess.PIPE, user=stranger, group=0,
            extra_groups=[stranger],
        )  # fmt: skip
        out, _ = await process.communicate()
        return int(out)

    assert await call("http://x/status") == 200
    assert await call("-X", "POST", "http://x/slots/gpu0/uncordon") == status
    await control.close()
    listener.close()
    os.unlink(PATH)

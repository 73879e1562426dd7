"""What the web view keeps and tells, and whom it lets in. In a browser: tests/end_to_end."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpusup.conf.keys import hash_key
from gpusup.supervisor.dashboard_server import Dashboard, DashboardError, page
from gpusup.supervisor.dashboard_watch import BEHIND, Watch

from .commands import gpusup


class FakeSource:
    """A service whose figures the test writes down."""

    def __init__(self) -> None:
        self.pid = 1
        self.requests = 0
        self.events: list[dict[str, Any]] = []
        self.gone = ""
        self.silent: set[str] = set()  # paths without an answer

    async def get(self, path: str) -> Mapping[str, Any]:
        if self.gone or path in self.silent:
            raise OSError(self.gone or f"no answer to {path}")
        if path == "/status":
            model = {
                "name": "m", "requests": self.requests, "p50_s": None, "p99_s": None, "queued": 0,
            }  # fmt: skip
            return {"pid": self.pid, "models": [model], "devices": [], "slots": []}
        if path == "/changes":
            return {"changes": []}
        since = int(path.rpartition("=")[2])
        return {"events": [e for e in self.events if e["serial"] > since]}


def parse(message: bytes | None) -> tuple[str, dict[str, Any]]:
    assert message is not None
    kind, data = message.decode().strip().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


async def test_who_comes_later_gets_the_history_and_the_events_so_far(source: FakeSource) -> None:
    watch = Watch(source)
    source.events = [{"serial": 1, "text": "one"}]
    await watch.look()
    source.events.append({"serial": 2, "text": "two"})
    await watch.look()
    kind, hello = parse(watch.listen().get_nowait())
    assert kind == "hello"
    assert [e["text"] for e in hello["events"]] == ["one", "two"]
    assert len(hello["history"]) == 2
    assert hello["tick"]["status"]["pid"] == 1


async def test_a_rate_is_only_told_where_there_is_something_to_compare(source: FakeSource) -> None:
    watch = Watch(source)
    heard = watch.listen()
    heard.get_nowait()
    for requests in (100, 150):
        source.requests = requests
        await watch.look()
    source.pid, source.requests = 2, 10  # another service: its counts begin anew
    await watch.look()
    rates = [parse(heard.get_nowait())[1]["point"]["models"]["m"]["rate"] for _ in range(3)]
    assert rates[0] is None
    assert rates[1] > 0
    assert rates[2] is None


async def test_events_of_a_new_service_are_not_missed(source: FakeSource) -> None:
    watch = Watch(source)
    source.events = [{"serial": n, "text": "old"} for n in range(1, 10)]
    await watch.look()
    heard = watch.listen()
    heard.get_nowait()
    source.pid, source.events = 2, [{"serial": 1, "text": "new"}]
    await watch.look()
    assert [e["text"] for e in parse(heard.get_nowait())[1]["events"]] == ["new"]


async def test_a_service_that_is_gone_is_said_to_be_gone(source: FakeSource) -> None:
    watch = Watch(source)
    heard = watch.listen()
    heard.get_nowait()
    source.gone = "no answer from there"
    await watch.look()
    kind, told = parse(heard.get_nowait())
    assert kind == "lost"
    assert told["reason"] == "no answer from there"


async def test_a_new_service_that_is_gone_at_once_is_only_lost_for_a_while(
    source: FakeSource,
) -> None:
    watch = Watch(source)
    source.events = [{"serial": 5, "text": "old"}]
    await watch.look()
    heard = watch.listen()
    heard.get_nowait()
    source.pid, source.events = 2, [{"serial": 1, "text": "new"}]
    source.silent = {"/events?since=0"}
    await watch.look()
    assert parse(heard.get_nowait())[0] == "lost"
    source.silent = set()
    await watch.look()
    kind, told = parse(heard.get_nowait())
    assert kind == "tick"
    assert [e["text"] for e in told["events"]] == ["new"]


async def test_a_client_that_does_not_read_is_dropped(source: FakeSource) -> None:
    watch = Watch(source)
    heard = watch.listen()
    for _ in range(BEHIND + 3):
        await watch.look()
    messages = [heard.get_nowait() for _ in range(heard.qsize())]
    assert messages[-1] is None
    assert len(messages) == BEHIND + 1


@asynccontextmanager
async def serving(listen: str, **options: str) -> AsyncIterator[str]:
    dashboard = Dashboard("/nowhere/control.sock", listen, **options)
    await dashboard.start()
    try:
        yield f"http://127.0.0.1:{dashboard.address.rstrip('/').rpartition(':')[2]}/"
    finally:
        await dashboard.close()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def test_other_machines_need_a_key_that_is_an_admins(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[keys.boss]\nhash = "{hash_key("secret")}"\nadmin = true\n'
        f'[keys.client]\nhash = "{hash_key("client")}"\n'
        f'[keys.made-up]\nhash = "{hash_key("word", "scrypt")}"\nadmin = true\n'
    )
    async with serving("0.0.0.0:0", api_keys=str(keys)) as url, aiohttp.ClientSession() as session:

        async def ask(header: str = "") -> int:
            headers = {"Authorization": header} if header else {}
            async with session.get(url, headers=headers) as response:
                return response.status

        assert await ask() == 401
        assert await ask("Bearer wrong") == 401
        assert await ask("Bearer client") == 401
        assert await ask("Bearer secret") == 200
        assert await ask(basic("anybody", "secret")) == 200
        assert await ask(basic("", "word")) == 200
        keys.write_text(f'[keys.client]\nhash = "{hash_key("client")}"\n')
        assert await ask("Bearer secret") == 401


async def test_other_machines_are_refused_without_keys() -> None:
    with pytest.raises(DashboardError, match=r"api_keys must be set"):
        await Dashboard("/nowhere/control.sock", "0.0.0.0:0").start()


async def test_this_machine_needs_no_key_but_the_right_name() -> None:
    async with serving("127.0.0.1:0") as url, aiohttp.ClientSession() as session:
        for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("evil.example", 403)):
            async with session.get(url, headers={"Host": host}) as response:
                assert response.status == status, host
        async with session.get(url) as response:
            assert "script-src 'sha256-" in response.headers["Content-Security-Policy"]
        async with session.get(url + "elsewhere") as response:
            assert response.status == 404
        async with session.get(url + "status.json") as response:
            assert response.status == 503


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text, policy = page()
    assert policy.count("'sha256-") == 2
    for word in (b'<link rel="stylesheet', b'src="http', b"@import", b"innerHTML", b"eval("):
        assert word not in text


def test_without_a_service_it_says_so() -> None:
    done = gpusup("dashboard", "--socket", "/nowhere/control.sock")
    assert done.returncode == 7
    assert "no gpusup answers at /nowhere/control.sock" in done.err

"""The web view in a real browser, on a box with work; and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import aiohttp
import pytest

from .browser import CHROMIUM, browser
from .service import Service, free_port, running

IMAGE = (files("gpusup.conf") / "digits" / "held-out-000-is-7.png").read_bytes()
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here")


def config(port: int) -> str:
    return f"""\
[server]
dashboard = "127.0.0.1:{port}"

[devices]
cpu_slots = 2
cpu_memory = "512MiB"

[models.digits]
handler = "gpusup.worker.digits:Digits"
retry = "safe"
"""


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(folder: Path, port: int) -> Iterator[Service]:
    with running(folder, config(port)) as service:
        yield service


@contextmanager
def load(service: Service, clients: int = 3) -> Iterator[None]:
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            assert service.predict("digits", IMAGE).status == 200
            ended.wait(0.02)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@needs_chromium
@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 900, False), (360, 780, True)])
async def test_a_browser_shows_a_box_under_load(
    service: Service, port: int, width: int, height: int, dark: bool, tmp_path: Path
) -> None:
    with load(service):
        async with browser() as page:
            await page.open(f"http://127.0.0.1:{port}/", width=width, height=height, dark=dark)
            await page.until("document.querySelectorAll('#devices article').length === 2")
            await page.until("parseFloat(document.querySelector('#tiles b').textContent) > 1")
            assert await page.ask("document.querySelector('#state').textContent") == "ready"
            assert await page.ask("document.documentElement.scrollWidth") <= width
            # What was opened stays open while the figures under it change.
            await page.ask("document.querySelector('#workers details').open = true; history.length")
            before = await page.ask("history.length")
            await page.until(f"history.length > {before + 1}")
            assert await page.ask("document.querySelector('#workers details').open")
            story = await page.ask("document.querySelector('#workers details').innerText")
            assert "ready" in story
            assert "spawned" in story
            picture = await page.picture(whole=True)
            assert page.problems == []
    out = Path(os.environ.get("GPUSUP_SCREENSHOTS") or tmp_path)
    (out / f"dashboard-{width}.png").write_bytes(picture)
    assert len(picture) > 10_000


@needs_chromium
async def test_a_swap_is_seen_as_it_happens(service: Service, port: int) -> None:
    async with browser() as page:
        await page.open(f"http://127.0.0.1:{port}/", width=1000, height=800)
        await page.until("document.querySelectorAll('#devices article').length === 2")
        change = await asyncio.to_thread(service.change, "/models/digits/reload", {"version": "2"})
        assert change["state"] == "done"
        await page.until("document.querySelector('#changes').innerText.includes('done')")
        await page.until("document.querySelector('#models').innerText.includes('version 2')")
        assert page.problems == []


async def read_event(response: aiohttp.ClientResponse) -> tuple[str, dict[str, object]]:
    kind = (await response.content.readline()).decode().removeprefix("event: ").strip()
    data = (await response.content.readline()).removeprefix(b"data: ")
    await response.content.readline()
    return kind, json.loads(data)


async def test_the_stream_begins_with_what_was_and_goes_on_with_what_is(
    service: Service, port: int
) -> None:
    async with (
        aiohttp.ClientSession(read_bufsize=2**22) as session,
        session.get(f"http://127.0.0.1:{port}/events") as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream"
        kind, hello = await read_event(response)
        assert kind == "hello"
        assert hello["history"]
        assert hello["events"]
        kind, tick = await read_event(response)
        assert kind == "tick"
        status = tick["status"]
        assert isinstance(status, dict)
        assert status["queue_mark"] == 0.85
        assert [d["name"] for d in status["devices"]] == ["cpu0", "cpu1"]


async def test_a_page_from_elsewhere_cannot_read_it_by_a_name_of_its_own(
    service: Service, port: int
) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            f"http://127.0.0.1:{port}/events", headers={"Host": "rebound.example"}
        ) as response,
    ):
        assert response.status == 403


def test_the_address_of_other_machines_needs_keys(short_path: Path) -> None:
    service = Service(short_path, '[server]\ndashboard = ":0"\n[models]\n')
    service.start(wait_ready=False)
    assert service.process
    assert service.process.wait(30) == 2
    assert "api_keys must be set" in service.log()

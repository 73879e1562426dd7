"""Headless Chromium over its DevTools protocol: open a page, ask it things, take its picture."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
LIMIT_S = 60.0

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._serial = 0
        self.problems: list[str] = []  # what the page's console called an error

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._serial += 1
        await self._socket.send_json({"id": self._serial, "method": method, "params": params})
        while True:
            message = json.loads(await self._socket.receive_str(timeout=LIMIT_S))
            self._note(message)
            if message.get("id") == self._serial:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])
            case _:
                pass

    async def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        async with asyncio.timeout(LIMIT_S):
            # Another process's page can only be looked at again and again.
            while not (value := await self.ask(expression)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return value

    async def picture(self, *, whole: bool = False) -> bytes:
        """PNG of what is visible, or of the whole page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A fresh Chromium with one empty page."""
    profile = Path(tempfile.mkdtemp(prefix="gs-chromium-"))
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        port = await asyncio.wait_for(_port(process), LIMIT_S)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/json/list") as response,
        ):
            pages = [p for p in await response.json(content_type=None) if p["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        shutil.rmtree(profile, ignore_errors=True)


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        words = line.decode(errors="replace")
        if "DevTools listening on ws://" in words:
            return int(words.rpartition("ws://")[2].split("/")[0].rpartition(":")[2])
    raise AssertionError(f"{CHROMIUM} ended with {await process.wait()}")

"""The web view: one page (conf/dashboard.html), and what it shows as server-sent events.

    GET /              the page
    GET /events        `hello` once (history, events), then `tick` every second, `lost` when blind
    GET /status.json   the latest tick

It attaches to the control socket as any client does, whether it runs inside the service
(`server.dashboard`) or by itself (`gpusup dashboard`), and it only reads. A loopback address needs
no key but takes only requests that name it, so that no web page can reach it by a name of its own.
Any other address needs `server.api_keys`, and a key there with `admin = true`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import ssl
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from gpusup.conf.keys import KEY_LIMIT, KeyFileError, matches, read_keys
from gpusup.conf.places import is_loopback, parse_listen

from .dashboard_watch import CLIENTS, ControlSource, Watch

log = logging.getLogger("gpusup.dashboard")


class DashboardError(Exception):
    """It can't be served so; says why in one line."""


class Dashboard:
    """`start` raises DashboardError; afterwards `address` is where it listens."""

    def __init__(
        self,
        control_path: str,
        listen: str,
        *,
        api_keys: str = "",
        tls_cert: str = "",
        tls_key: str = "",
    ) -> None:
        self._listen = listen
        self._api_keys = api_keys
        self._tls = (tls_cert, tls_key)
        self._source = ControlSource(control_path)
        self._runner: web.AppRunner | None = None
        self._watching: asyncio.Task[None] | None = None
        self._accepted = b""
        self._checking = asyncio.Lock()
        self._open = True
        self.watch = Watch(self._source)
        self.address = ""
        self._page, self._policy = page()

    async def start(self) -> None:
        try:
            host, port = parse_listen(self._listen)
        except ValueError as error:
            raise DashboardError(f"dashboard: {error}") from error
        self._open = is_loopback(host)
        if not self._open:
            if not self._api_keys:
                raise DashboardError(
                    f"dashboard: {self._listen} can be reached from other machines, so "
                    "server.api_keys must be set (a key with admin = true opens the page)"
                )
            try:
                read_keys(Path(self._api_keys))
            except KeyFileError as error:
                raise DashboardError(f"dashboard: {error}") from error
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._front)
        app.router.add_get("/events", self._stream)
        app.router.add_get("/status.json", self._status)
        app.on_shutdown.append(self._hang_up)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True,
            shutdown_timeout=1.0,
        )  # fmt: skip
        await self._runner.setup()
        scheme, context = "http", None
        try:
            if not self._open and self._tls[0]:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(*self._tls)
                scheme = "https"
            await web.TCPSite(self._runner, host or None, port, ssl_context=context).start()
        except OSError as error:
            await self.close()
            reason = error.strerror or str(error)
            raise DashboardError(f"dashboard: cannot listen on {self._listen}: {reason}") from error
        bound = self._runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.address = f"{scheme}://{shown}:{bound[1]}/"
        self._watching = asyncio.get_running_loop().create_task(self.watch.run())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._source.close()

    async def _hang_up(self, app: web.Application) -> None:
        self.watch.end()

    # -- requests ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._open:
            # Otherwise any web page could read us, by a name of its own that leads here.
            if not is_loopback(urlsplit(f"//{request.host}").hostname or ""):
                return _plain(403, f"this is a loopback address, and you asked for {request.host}")
        elif not await self._may_enter(request):
            answer = _plain(401, "a key with admin = true is wanted, as the password")
            answer.headers["WWW-Authenticate"] = 'Basic realm="gpusup", charset="UTF-8"'
            return answer
        try:
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            return _plain(error.status, error.reason)
        return response

    async def _may_enter(self, request: web.Request) -> bool:
        key = _key_of(request.headers.get("Authorization", ""))
        if not key or len(key) > KEY_LIMIT:
            return False
        # In a thread, because scrypt takes its time by intent; one at a time, for guessers' sake.
        async with self._checking:
            return await asyncio.to_thread(self._is_admin, key)

    def _is_admin(self, key: str) -> bool:
        path = Path(self._api_keys)
        try:
            # What was right for an older file is not for this one.
            digest = hashlib.sha256(f"{path.stat().st_mtime_ns} {key}".encode()).digest()
            if digest == self._accepted:
                return True
            entries = read_keys(path)
        except (OSError, KeyFileError) as error:
            log.error("dashboard: %s", error)
            return False
        # All of them, always: how long it takes says nothing about which one is close.
        found = [entry.admin for entry in entries.values() if matches(entry, key)]
        if any(found):
            self._accepted = digest
        return any(found)

    async def _front(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._page,
            content_type="text/html",
            charset="utf-8",
            headers={**_HEADERS, "Content-Security-Policy": self._policy},
        )

    async def _status(self, request: web.Request) -> web.StreamResponse:
        if not self.watch.latest:
            return _plain(503, "nothing was seen of the service yet")
        return web.Response(
            body=self.watch.latest, content_type="application/json", headers=_HEADERS
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.watch.crowded():
            return _plain(503, f"{CLIENTS} pages are open, there can be no more")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue = self.watch.listen()
        try:
            while (message := await queue.get()) is not None:
                await response.write(message)
        except ConnectionResetError:
            pass
        finally:
            self.watch.leave(queue)
        return response


_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _plain(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n", headers=_HEADERS)


def _key_of(header: str) -> str:
    """The key in `Bearer KEY`, or the password in what browsers send after asking for one."""
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
    return ""


def page() -> tuple[bytes, str]:
    """The page, and a policy that lets it run its own script and style and nothing else."""
    text = (files("gpusup.conf") / "dashboard.html").read_text(encoding="utf-8")

    def sources(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
            for part in found
        )

    policy = (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text.encode(), policy

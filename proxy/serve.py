"""The proxy process from its first word to its last."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import time
from typing import Final, assert_never

import msgspec
from aiohttp import web

from gpusup.conf.log import event, reopen
from gpusup.conf.schema import Config
from gpusup.supervisor import wire

from .app import Runner, Site, make_app
from .arena import Arena
from .body import BodyReader
from .counts import Counts
from .dispatch import Dispatcher
from .door import Door
from .handlers import add_health_routes, add_raw_routes
from .link import Link
from .surfaces import add_surfaces
from .tls import Tls, TlsError

_REPORT_S: Final = 0.1
_USED_S: Final = 1.0
#: A report is due at least so often, even if nothing has changed: it says that we are alive.
_ALIVE_S: Final = 1.0
_LATENCY_S: Final = 0.5
_GC_OBJECTS: Final = 20_000


def make_door(config: Config, name: str, link: Link, rng: random.Random | None = None) -> Door:
    """All that is behind the HTTP surface, wired together; nothing of it runs yet."""
    arena = Arena(config.server.arena)
    counts = Counts()
    reader = BodyReader(config.server, arena)
    dispatcher = Dispatcher(
        config,
        name=name,
        arena=arena,
        counts=counts,
        tell=link.send,
        rng=rng or random.Random(),
    )
    return Door(
        config,
        dispatcher=dispatcher,
        link=link,
        arena=arena,
        reader=reader,
        counts=counts,
    )


def make_surfaces(app: web.Application, door: Door) -> None:
    add_raw_routes(app, door)
    add_health_routes(app, door)
    add_surfaces(app, door)


class Process:
    """One proxy: link, door, HTTP server. `run` returns the exit status."""

    def __init__(self, config: Config, name: str, listener: socket.socket, link: socket.socket):
        self._config = config
        self._name = name
        self._listener = listener
        self._link_sock = link
        self._link = Link(self._heard, self._link_lost)
        self._door = make_door(config, name, self._link)
        self._stop: asyncio.Future[float] | None = None
        self._runner: Runner | None = None
        self._site: Site | None = None
        self._tls: Tls | None = None
        self._last: wire.ProxyReport | None = None
        self._last_at = 0.0
        self._latency: dict[str, tuple[float, float]] = {}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        self._link_sock.setblocking(False)
        await loop.create_unix_connection(lambda: self._link, sock=self._link_sock)
        self._link.send(wire.ProxyHello(self._name, os.getpid()))
        server = self._config.server
        if server.tls_cert:
            self._tls = Tls(server.tls_cert, server.tls_key)
        app = make_app(self._door)
        make_surfaces(app, self._door)
        self._runner = Runner(app, self._door)
        await self._runner.setup()
        self._site = Site(
            self._runner,
            self._listener,
            most=server.connections,
            unread_s=server.write_timeout,
            ssl_context=self._tls.context if self._tls else None,
        )
        await self._site.start()
        # What is there by now stays; requests make many objects but few cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_OBJECTS, 20, 50)
        self._link.send(wire.Listening(self._site.name))
        reports = loop.create_task(self._reports())
        reports.add_done_callback(self._no_reports)
        limit_s = await self._stop
        await self._leave(limit_s)
        reports.cancel()
        (ended,) = await asyncio.gather(reports, return_exceptions=True)
        broken = not isinstance(ended, asyncio.CancelledError)
        if not broken:
            self._report()
        await self._door.dispatcher.close()
        self._link.close()
        return 1 if broken else 0

    def _no_reports(self, task: asyncio.Task[None]) -> None:
        """Without them the supervisor is blind to us: leave, so that it starts another."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        event("reports-failed", "error", error=repr(error))
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(self._config.server.drain_limit)

    async def _leave(self, limit_s: float) -> None:
        """Accept nothing, answer what is there, then close what is idle."""
        assert self._site is not None
        assert self._runner is not None
        self._door.stopping = True
        end = time.monotonic() + limit_s
        await self._site.stop()
        # Clients that ask are answered with `Connection: close`, and so leave by themselves; it
        # is for the idle ones that we close, since a request may be on its way to us. Again and
        # again, because the answer to who is busy now may have begun before we were to leave.
        notice = (
            0.0 if self._door.dispatcher.snapshot.draining else self._config.server.drain_notice
        )
        close_from = min(end, time.monotonic() + notice)
        while self._site.connections() and (now := time.monotonic()) < end:
            if now >= close_from:
                self._runner.close_idle()
            await asyncio.sleep(0.02)
        self._runner._shutdown_timeout = max(0.1, end - time.monotonic())
        await self._runner.cleanup()

    def _link_lost(self) -> None:
        # Without a supervisor there is nobody to serve for: it restarts everything it finds.
        if self._stop is None or not self._stop.done():
            os._exit(0)

    def _heard(self, message: wire.ToProxy) -> None:
        match message:
            case wire.Snapshot():
                self._door.dispatcher.on_snapshot(message)
            case wire.DeviceUpdate():
                self._door.dispatcher.on_devices(message)
            case wire.StopProxy(limit_s=limit_s):
                if self._stop is not None and not self._stop.done():
                    self._stop.set_result(limit_s)
            case wire.Reread():
                self._reread()
            case wire.Reply():
                pass  # the link has given it to who asked
            case _:
                assert_never(message)

    def _reread(self) -> None:
        reopen()
        if self._tls is not None:
            try:
                self._tls.reload()
            except TlsError as error:
                event("certificate-not-reloaded", "error", error=str(error))
        for reread in self._door.rereads:
            reread()

    async def _reports(self) -> None:
        used_at = last = latency_at = time.monotonic()
        while True:
            await asyncio.sleep(_REPORT_S)
            now = time.monotonic()
            dispatcher = self._door.dispatcher
            dispatcher.tick(now - last)
            last = now
            if now - used_at >= _USED_S and dispatcher.used:
                used_at = now
                self._link.send(wire.Used(tuple(sorted(dispatcher.used))))
                dispatcher.used.clear()
            if now >= latency_at:
                latency_at = now + _LATENCY_S
                self._latency = self._door.counts.latency(now)
            if not self._link.paused:
                self._report()

    def _report(self) -> None:
        """What changed since the last one; now and then also if nothing did."""
        door = self._door
        dispatcher = door.dispatcher
        now = time.monotonic()
        counted = door.counts.changed()
        counters, histograms, stats = door.counts.drain(now, time.time())
        gauges = wire.ProxyReport(
            queued=dispatcher.queued(),
            in_flight=dispatcher.flights(),
            leased=dispatcher.leased(),
            connections=self._site.connections() if self._site is not None else 0,
            arena_free=door.arena.free,
            arena_total=door.arena.total,
            bands=dispatcher.bands(),
            latency=self._latency,
        )
        if not counted and gauges == self._last and now - self._last_at < _ALIVE_S:
            return
        self._last, self._last_at = gauges, now
        self._link.send(
            msgspec.structs.replace(gauges, counters=counters, histograms=histograms, stats=stats)
        )

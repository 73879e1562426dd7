"""Test 6, clients that vanish: what they held comes back, and nobody computes for them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from gpusup.conf.schema import ServerConfig

from .certify_bench import Bench
from .certify_math import summary
from .certify_ramp import ms, told
from .certify_result import Result
from .certify_service import NO_CONTROL, CertifyError
from .certify_wall import Wall

TITLE: Final = "Clients that vanish: cut off, half-closed, no longer reading"
COUNT: Final = 25
MARGIN_S: Final = 5.0
#: The configured limits may be minutes; with these a quick run can wait for them.
SHORT_LIMITS: Final = {"idle_timeout": "4s", "body_timeout": "3s", "write_timeout": "3s"}
_PIPELINED: Final = 600


@dataclass(frozen=True, slots=True)
class Held:
    """What clients hold in the service at one moment."""

    descriptors: int
    leases: int
    arena: int  # bytes not free
    in_flight: int

    def words(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.leases} leases, {self.arena} bytes of blocks, "
            f"{self.in_flight} requests"
        )


async def run(bench: Bench, result: Result) -> None:
    target = bench.target
    server = target.config.server if target.config else ServerConfig()
    wall: Wall | None = target.wall
    url = urlsplit(target.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    if url.scheme == "https":
        result.skipped = "half-open connections are made on plain sockets; the service speaks TLS"
        return
    idle_s = max(server.idle_timeout, server.body_timeout, server.write_timeout) + MARGIN_S
    # The server's own limits are what must hold; a request whole is over much sooner.
    rate = await bench.base_rate(share=0.1, most=30.0)
    whole, half, path = _requests(bench, host)
    bench.progress.step("clients: waiting for rest", 0.0)
    await bench.settled()
    await _until_quiet(bench)
    before = await held(bench)
    opened: list[socket.socket] = []

    async def others(act: Callable[[], Awaitable[None]]) -> str:
        """`act` while others are served. Returns what happened to those."""
        async with bench.load.running(rate) as samples:
            await act()
        result.samples += samples
        found = summary(samples, rate)
        result.figures["requests"] = result.figures.get("requests", 0) + found.requests
        if not found.clean:
            result.figures["bad"] = result.figures.get("bad", 0) + found.requests - found.good
        return told(found.codes)

    async def part(name: str, act: Callable[[], Awaitable[None]], limit_s: float, how: str) -> None:
        bench.progress.step(f"clients: {name}", 0.2)
        bench.mark(result, name)
        try:
            trouble = await others(act)
        except OSError as error:
            result.check(name, False, f"cannot be done: {error}")
            return
        finally:
            began = time.monotonic()
        if before is None:
            alive = await _alive(bench)
            result.check(name, alive and not trouble, f"{how}; still served after it" if alive
                         else f"{how}; the service does not answer any more")  # fmt: skip
            return
        back, now = await _back(bench, before, limit_s)
        words = (
            f"{how}: all back after {ms(time.monotonic() - began)}"
            if back
            else (
                f"{how}: {now.words() if now else 'unknown'} {limit_s:.0f} s later, "
                f"{before.words()} before"
            )
        )
        result.check(name, back and not trouble, f"{words}, the limit is {limit_s:.0f} s"
                     + (f"; others suffered: {trouble}" if trouble else ""))  # fmt: skip

    async def cut() -> None:
        if wall is not None:
            for data, read in ((whole, True), (half, False), (whole, False)):
                await asyncio.to_thread(wall.open, port, data, COUNT, read=read)
            await asyncio.to_thread(wall.cut)
        else:
            for data in (whole, half):
                opened.extend(await _open(host, port, data, COUNT))
        await asyncio.sleep(0.5)

    async def half_close() -> None:
        for sock in await _open(host, port, whole, COUNT):
            sock.shutdown(socket.SHUT_WR)
            opened.append(sock)
        await asyncio.sleep(0.5)

    async def stop_reading() -> None:
        for sock in await _open(host, port, path * _PIPELINED, 5, small=True):
            opened.append(sock)
        await asyncio.sleep(0.5)

    async def reset() -> None:
        for sock in await _open(host, port, whole, 4 * COUNT):
            # No linger: a reset instead of the usual farewell.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()

    try:
        how = (
            f"{3 * COUNT} connections whose link was cut (network namespace), idle, in mid-body "
            "and waiting for an answer"
            if wall is not None
            else f"{2 * COUNT} abandoned sockets, in mid-body and idle (no network namespace: "
            + ("the service is not ours)" if not target.owned else "not permitted here)")
        )
        await part("dropped without FIN", cut, idle_s, how)
        await part(
            "half-closed",
            half_close,
            idle_s,
            f"{COUNT} that sent a request and shut their sending side",
        )
        await part("readers that stop", stop_reading, idle_s,
                   f"5 that sent {_PIPELINED} requests each and read nothing")  # fmt: skip
        await part("reset", reset, MARGIN_S, f"{4 * COUNT} that reset right after their request")
    finally:
        for sock in opened:
            sock.close()
    bad, requests = result.figures.get("bad", 0), result.figures.get("requests", 0)
    result.check(
        "others are served",
        bad == 0,
        f"{requests - bad} of {requests} requests of others answered well",
    )
    await _work_stops(bench, result)


async def _work_stops(bench: Bench, result: Result) -> None:
    name = "GPU work stops"
    if bench.target.control is None:
        result.skip(name, NO_CONTROL)
        return
    with contextlib.suppress(CertifyError):
        await bench.settled()
    metric = "gpusup_worker_busy_seconds_total"
    await asyncio.sleep(0.5)  # workers tell what they did a few times a second
    first = await bench.target.metric(metric)
    await asyncio.sleep(1.0)
    spent = await bench.target.metric(metric) - first
    gone = await bench.target.metric("gpusup_client_disconnects_total")
    result.check(
        name, spent < 0.05,
        f"workers computed {spent * 1000:.0f} ms in the second after; {gone:.0f} requests were "
        "given up because their client was gone",
    )  # fmt: skip


def _requests(bench: Bench, host: str) -> tuple[bytes, bytes, bytes]:
    """(a whole request, one that stops in mid-body, one without a body and a long answer)."""
    body = bench.bodies[0]
    lines = "".join(f"{k}: {v}\r\n" for k, v in body.headers.items())
    url = urlsplit(bench.load.url)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {host}\r\n{lines}"
    whole = f"{head}Content-Length: {len(body.data)}\r\n\r\n".encode() + body.data
    # Bulk, so that it would hold a block of the arena.
    size = max(200_000, len(body.data))
    half = f"{head}Content-Length: {size}\r\n\r\n".encode() + bytes(size // 2)
    return whole, half, f"GET /openapi.json HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def _open(
    host: str, port: int, data: bytes, count: int, *, small: bool = False
) -> list[socket.socket]:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(count):
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.wait_for(loop.sock_connect(sock, (host, port)), 10)
        with contextlib.suppress(TimeoutError, ConnectionError):
            # A server that no longer reads is what some of them are about.
            await asyncio.wait_for(loop.sock_sendall(sock, data), 2)
        found.append(sock)
    return found


async def held(bench: Bench) -> Held | None:
    """None where it can't be seen."""
    target = bench.target
    if target.control is None:
        return None
    leases: Any = await target.call("GET", "/leases")
    status = await target.status()
    descriptors = 0
    for proxy in status["proxies"]:
        with contextlib.suppress(psutil.Error):
            descriptors += psutil.Process(proxy["pid"]).num_fds()
    return Held(
        descriptors=descriptors,
        leases=sum(len(one) for one in leases["leases"].values()),
        arena=sum(one["total"] - one["free"] for one in leases["arena"].values()),
        in_flight=sum(sum(one.values()) for one in leases["in_flight"].values()),
    )


async def _until_quiet(bench: Bench) -> None:
    """Connections of the generator are closed by then: two equal counts in a row."""
    last = await held(bench)
    for _ in range(50):
        await asyncio.sleep(0.1)
        now = await held(bench)
        if now == last:
            return
        last = now


async def _back(bench: Bench, before: Held, limit_s: float) -> tuple[bool, Held | None]:
    end = time.monotonic() + limit_s
    while True:
        now = await held(bench)
        if now is not None and (
            now.descriptors <= before.descriptors + 1  # the control call itself may be seen
            and now.leases <= before.leases
            and now.arena <= before.arena
            and now.in_flight == 0
        ):
            return True, now
        if time.monotonic() > end:
            return False, now
        await asyncio.sleep(0.05)


async def _alive(bench: Bench) -> bool:
    samples = await bench.load.run(5.0, 1.0)
    return all(s.good for s in samples)

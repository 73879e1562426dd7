"""Test 7, hostile input: refused quickly, without touching the device, and each with its record."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from gpusup.conf.schema import ServerConfig
from gpusup.conf.units import format_size

from .certify_attacks import Attack, attacks
from .certify_bench import Bench
from .certify_math import summary
from .certify_ramp import ms, told
from .certify_result import Result
from .certify_service import NO_CONTROL

TITLE: Final = "Hostile input: bombs, lies about sizes, nesting, slow senders"
ANSWER_LIMIT_S: Final = 1.0
#: On top of twice the configured limit for slow senders: one that comes just after a check has
#: two periods.
SLOW_MARGIN_S: Final = 3.0
#: Beyond this the device was touched: allocators and drivers move a little by themselves.
TOUCHED_BYTES: Final = 16 * 2**20
READ_S: Final = 0.05
LOG_LIMIT_S: Final = 3.0


@dataclass(slots=True)
class Seen:
    """`took_s` counts from the last byte that had to be sent; status 0: closed without a word."""

    attack: Attack
    status: int = 0
    took_s: float = 0.0
    code: str = ""
    problem: str = ""


async def run(bench: Bench, result: Result) -> None:
    target = bench.target
    server = target.config.server if target.config else ServerConfig()
    url = urlsplit(target.url)
    if url.scheme == "https":
        result.skipped = "the requests are made byte by byte; the service speaks TLS"
        return
    host, port = url.hostname or "127.0.0.1", url.port or 80
    await bench.settled()
    rate = await bench.base_rate(share=0.1, most=30.0)
    path = urlsplit(bench.load.url).path
    todo = await asyncio.to_thread(attacks, host, target.model, path, bench.bodies[0], server)
    quick = [a for a in todo if not a.slow]
    slow = [a for a in todo if a.slow]
    seen: list[Seen] = []
    memory: list[float] = []
    reader = asyncio.create_task(_watch(bench, memory))
    try:
        if target.control is not None:
            await asyncio.sleep(5 * READ_S)  # readings from before the first of them
        for number, attack in enumerate(quick):
            bench.progress.step(f"hostile: {attack.name}", 0.8 * number / len(todo))
            seen.append(await _try(attack, host, port))
    finally:
        reader.cancel()  # what follows has other clients beside, who may use the device
        with contextlib.suppress(asyncio.CancelledError):
            await reader
    bench.progress.step(f"hostile: {', '.join(a.name for a in slow)}", 0.8)
    async with bench.load.running(rate) as samples:
        bench.mark(result, "slow senders")
        limit = slow_limit(server)
        tries = [_try(attack, host, port, limit + 2) for attack in slow]
        seen += await asyncio.gather(*tries)
    result.samples += samples
    for one in seen:
        _judge(result, one, server)
    found = summary(samples, rate)
    result.check(
        "others are served meanwhile", found.clean,
        f"{found.good} of {found.requests} answered well, p99 {ms(found.p99)}"
        + (f"; {told(found.codes)}" if found.codes else ""),
    )  # fmt: skip
    refused = [one for one in seen if _refused(one)]
    result.figures = {
        "sent": len(seen), "refused": len(refused),
        "slowest_s": max((o.took_s for o in seen if not o.attack.slow), default=0.0),
        "answers": [
            {"name": o.attack.name, "status": o.status, "code": o.code, "took_s": o.took_s}
            for o in seen
        ],
    }  # fmt: skip
    _memory(result, memory, bench)
    await _records(bench, result, seen)


def slow_limit(server: ServerConfig) -> float:
    return 2 * max(server.body_timeout, server.idle_timeout) + SLOW_MARGIN_S


def _refused(one: Seen) -> bool:
    return one.status in one.attack.wanted or (one.status == 0 and one.attack.may_close)


def _judge(result: Result, one: Seen, server: ServerConfig) -> None:
    attack = one.attack
    limit = ANSWER_LIMIT_S
    if attack.slow:
        limit = slow_limit(server)
    holds = _refused(one) and one.took_s <= limit and not one.problem
    what = f"{one.status} {one.code}".strip() if one.status else one.problem or "closed"
    wanted = "/".join(map(str, sorted(attack.wanted)))
    text = f"{what} after {ms(one.took_s)}, the limit is {limit:g} s"
    if not _refused(one):
        text += f"; {wanted} was to be expected"
    result.check(attack.name, holds, text)


def _memory(result: Result, memory: list[float], bench: Bench) -> None:
    name = "device memory untouched"
    if not memory:
        result.skip(name, NO_CONTROL)
        return
    grown = max(memory) - memory[0]
    result.figures["memory_grown"] = grown
    result.check(
        name, grown <= TOUCHED_BYTES,
        f"at most {format_size(round(max(0.0, grown)))} above the start, {len(memory)} readings; "
        f"the limit is {format_size(TOUCHED_BYTES)}",
    )  # fmt: skip


async def _watch(bench: Bench, memory: list[float]) -> None:
    """The devices' use by us, while it is refused. A foreign process is none of our doing."""
    if bench.target.control is None:
        return
    while True:
        status = await bench.target.status()
        memory.append(
            float(
                sum(d["total"] - d["free"] - d["foreign"] for d in status["devices"] if d["known"])
            )
        )
        await asyncio.sleep(READ_S)


async def _records(bench: Bench, result: Result, seen: list[Seen]) -> None:
    """Requests whose head could be read have an id; each must have exactly one line of its own."""
    name = "one log record each"
    if not bench.target.owned:
        result.skip(name, "its log is not ours to read")
        return
    wanted = {o.attack.id: o.attack.name for o in seen if o.attack.named and o.status}
    end = time.monotonic() + LOG_LIMIT_S
    while True:
        counts = count_records(bench.target.log_text(), set(wanted))
        missing = [wanted[key] for key in wanted if not counts.get(key)]
        if not missing or time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    twice = [wanted[key] for key, count in counts.items() if count > 1]
    words = (
        f"{len(wanted) - len(missing)} of {len(wanted)} have one, with client, path, status, code "
        "and size"
    )
    if missing:
        words += f"; none: {', '.join(missing)}"
    if twice:
        words += f"; more than one: {', '.join(twice)}"
    result.check(name, not missing and not twice, words)


def count_records(log: str, ids: set[str]) -> dict[str, int]:
    """Request records with all their features, by request id."""
    counts: dict[str, int] = {}
    for line in log.splitlines():
        if "certify-" not in line:
            continue
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        key = record.get("request_id", "")
        features = ("path", "status", "code", "bytes", "remote")
        if record.get("event") == "request" and key in ids and all(f in record for f in features):
            counts[key] = counts.get(key, 0) + 1
    return counts


async def _try(attack: Attack, host: str, port: int, limit_s: float = 15.0) -> Seen:
    seen = Seen(attack)
    began = time.monotonic()
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
    except (OSError, TimeoutError) as error:
        seen.problem = f"cannot connect: {error}"
        return seen
    clock = [began]

    async def send() -> None:
        with contextlib.suppress(OSError):
            async for piece in attack.pieces():
                writer.write(piece)
                await writer.drain()
                if not attack.slow and attack.due > 0:
                    attack.due -= len(piece)
                    if attack.due <= 0:
                        clock[0] = time.monotonic()  # from here on it could know
                elif not attack.slow and not attack.endless:
                    clock[0] = time.monotonic()

    sender = asyncio.create_task(send())
    try:
        async with asyncio.timeout(limit_s):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.took_s = max(0.0, time.monotonic() - clock[0])
            seen.status = int(head.split(b" ", 2)[1])
            seen.code = _code(await _body(reader, head))
    except (asyncio.IncompleteReadError, ConnectionError):
        seen.took_s = max(0.0, time.monotonic() - clock[0])
    except (TimeoutError, ValueError, IndexError, asyncio.LimitOverrunError):
        seen.took_s = time.monotonic() - clock[0]
        seen.problem = f"no answer in {limit_s:g} s"
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sender
        writer.transport.abort()
    return seen


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                return await reader.readexactly(min(int(value), 65536))
    return b""


def _code(body: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(body).get("code", ""))
    return ""

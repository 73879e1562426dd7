"""Test 2, faults: what breaks is replaced by itself, in time, with errors that say why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from gpusup.conf.load import load
from gpusup.conf.schema import ModelConfig, SupervisionConfig

from .certify_bench import Bench
from .certify_math import Sample, summary
from .certify_ramp import ms, told
from .certify_result import Result
from .certify_service import CertifyError, CertifyGaveUp, all_ready
from .check import has_gpu

TITLE: Final = "Faults: kill, stop, hang, lost probe, lost GPU, proxy killed, re-exec"
EXTRA: Final = "certify-faults"
BUDGET_S: Final = 2.0
#: A request that was on its way through a process that dies may die with it, up to so much later.
GRACE_S: Final = 0.25
RETURN_S: Final = 10.0
#: What a client may be told: who was at fault and what to do. Anything else is no clear error.
CLEAR: Final = {429, 502, 503, 504}

BY_HAND: Final = (
    "A real unload of the driver is for a person: gpusupctl drain gpu0; systemctl stop "
    "nvidia-persistenced; rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; watch gpusupctl "
    "status say that the driver is gone; modprobe nvidia_uvm; gpusupctl uncordon gpu0."
)


def extra_models(path: Path | None) -> dict[str, dict[str, Any]]:
    """A small model beside the one under test that hangs when it is told to. Raises ConfigError."""
    use = load(path).devices.use
    first = use[0] if use != "auto" else "gpu0" if has_gpu() else "cpu0"
    return {
        EXTRA: {
            "handler": "gpusup.worker.certify_faults:Faults",
            "devices": ["cpu0" if first == "cpu" else first],
            "workers": 1,
            "budget": f"{BUDGET_S:g}s",
            "required": False,
        }
    }


@dataclass(slots=True)
class Fault:
    """One of them, with load around it."""

    bench: Bench
    result: Result
    rate: float

    async def tried(
        self,
        name: str,
        act: Callable[[], Awaitable[tuple[float, str]]],
        limit_s: float,
        *,
        dies: bool = False,
    ) -> float | None:
        """`act` does it, waits for the return, says how long that took. None: it did not return."""
        bench, result = self.bench, self.result
        bench.mark(result, name)
        began = time.monotonic()
        took, words, problem = None, "", ""
        async with bench.load.running(self.rate) as samples:
            await asyncio.sleep(bench.profile.calm_s)
            broken = time.monotonic()
            try:
                took, words = await act()
            except (CertifyError, CertifyGaveUp) as error:
                problem = str(error).splitlines()[0]
            await asyncio.sleep(bench.profile.calm_s)
        bench.mark(result, "back")
        result.samples += samples
        found = summary(samples, self.rate)
        lost = [s for s in samples if s.status <= 0]
        excused = [s for s in lost if dies and s.sent <= broken + GRACE_S]
        unclear = [s for s in samples if s.status > 0 and not s.good and not _clear(s)]
        fine = took is not None and took <= limit_s and len(lost) == len(excused) and not unclear
        text = problem or f"{words} after {ms(took or 0.0)}, the limit is {limit_s:.0f} s"
        text += f"; {found.good} of {found.requests} requests answered well meanwhile"
        if found.codes:
            text += f", {told(found.codes)}"
        if excused:
            text += f" ({len(excused)} were in the process that was killed)"
        if unclear:
            text += "; not a clear error"
        result.check(name, fine, text)
        result.figures.setdefault("events", []).append(
            {"name": name, "took_s": took, "whole_s": time.monotonic() - began,
             "requests": found.requests, "good": found.good, "codes": found.codes}
        )  # fmt: skip
        return took


def _clear(sample: Sample) -> bool:
    return sample.status in CLEAR and bool(sample.code)


async def run(bench: Bench, result: Result) -> None:
    target = bench.target
    if target.control is None:
        result.skipped = "faults need the control socket (--control)"
        return
    if not bench.allowed_faults:
        result.skipped = "faults would hurt a running service; allow them with --allow-faults"
        return
    rate = await bench.base_rate(share=0.15, most=50.0)
    supervision = target.config.supervision if target.config else SupervisionConfig()
    fault = Fault(bench, result, rate)
    slots = await target.slots()
    # A start takes what it takes with this model; its first crash costs no wait worth the name.
    start_s = max((sum(s["seconds"].values()) for s in slots), default=1.0)
    back_s = 5.0 + 3 * start_s + 2 * supervision.backoff.initial
    result.figures |= {"budget_s": BUDGET_S, "start_s": start_s, "rate": round(rate, 1)}

    bench.progress.step("faults: kill -9 of a worker", 0.1)
    took = await fault.tried(
        "worker killed", lambda: _signalled(bench, signal.SIGKILL, 0, back_s), back_s
    )
    result.figures["kill_s"] = took
    bench.progress.step("faults: proxy killed", 0.2)
    await fault.tried("proxy killed", lambda: _proxy_killed(bench), RETURN_S, dies=True)
    bench.progress.step("faults: supervisor re-executed", 0.3)
    await fault.tried("supervisor re-executed", lambda: _reexec(bench), 2 * RETURN_S)
    await _hangs(fault, back_s)
    await _probe_lost(fault)
    await _gpu_lost(fault, back_s)
    bench.progress.step("faults: SIGSTOP of a worker", 0.7)
    # Idle it is missed for want of beats; within a batch, by its budget.
    budget = (
        target.config.models[target.model].budget
        if target.config
        else ModelConfig(handler="").budget
    )
    limit = max(supervision.beat_limit, 1.2 * budget) + supervision.term_limit + back_s
    await fault.tried(
        "worker stopped (SIGSTOP)", lambda: _signalled(bench, signal.SIGSTOP, -1, limit), limit
    )
    result.notes.append(BY_HAND)


async def _signalled(
    bench: Bench, number: signal.Signals, which: int, limit_s: float
) -> tuple[float, str]:
    victims = [s for s in await bench.target.slots() if s["pid"] and s["state"] == "ready"]
    if not victims:
        raise CertifyError("no worker is ready")
    victim = victims[which]
    slot, generation = victim["slot"], victim["generation"]
    _kill(victim["pid"], number)

    def back(status: Any) -> bool:
        return all_ready(status) and any(
            s["slot"] == slot and s["generation"] > generation for s in status["slots"]
        )

    took = await bench.target.until(f"the return of {slot}", back, limit_s + 5)
    last = next(s for s in await bench.target.slots() if s["slot"] == slot)["last_exit"]
    return took, f"{slot} was replaced ({last})"


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise CertifyError(f"{number.name} to process {pid}: {error.strerror}") from error


async def _proxy_killed(bench: Bench) -> tuple[float, str]:
    status = await bench.target.status()
    victim = status["proxies"][0]
    _kill(victim["pid"], signal.SIGKILL)
    took = await bench.target.until(
        f"the return of {victim['name']}",
        lambda s: (
            all_ready(s)
            and all(p["state"] == "serving" for p in s["proxies"])
            and victim["pid"] not in {p["pid"] for p in s["proxies"]}
        ),
        RETURN_S + 5,
    )
    return took, f"{victim['name']} was replaced"


async def _reexec(bench: Bench) -> tuple[float, str]:
    before = await bench.target.status()
    workers = {s["pid"] for s in before["slots"]}
    await bench.target.call("POST", "/reexec")
    took = await bench.target.until(
        "the new program's first answer",
        lambda s: s["uptime_s"] < before["uptime_s"] and all_ready(s),
        2 * RETURN_S + 5,
    )
    after = await bench.target.status()
    if after["pid"] != before["pid"]:
        raise CertifyError(f"it has pid {after['pid']} instead of {before['pid']}")
    kept = len(workers & {s["pid"] for s in after["slots"]})
    if kept < len(workers):
        raise CertifyError(f"only {kept} of {len(workers)} workers outlived it")
    return took, f"it went on with all {kept} workers"


async def _hangs(fault: Fault, back_s: float) -> None:
    bench, result = fault.bench, fault.result
    slots = [s for s in (await bench.target.status())["slots"] if s["model"] == EXTRA]
    names = {
        "hold-gil": "worker hangs holding the GIL",
        "free-gil": "worker hangs with the GIL free",
        "busy-device": "device busy for ever",
    }
    if not slots:
        for name in names.values():
            result.skip(name, "it needs a service of certify's own")
        return
    slot = slots[0]["slot"]
    cuda = slots[0]["device"].startswith("gpu")
    limit = 1.2 * BUDGET_S + 1.0
    for number, (do, name) in enumerate(names.items()):
        if do == "busy-device" and not cuda:
            result.skip(name, "there is no GPU here")
            continue
        bench.progress.step(f"faults: {name}", 0.4 + 0.07 * number)
        answers: list[tuple[float, int, str]] = []

        async def hang(do: str = do, answers: list[Any] = answers) -> tuple[float, str]:
            answers.append(await _ask_to(bench, do))
            asked, status, code = answers[0]
            if not 500 <= status < 600 or not code:
                raise CertifyError(f"the request was answered {status} {code}, no clear error")
            if asked > limit:
                raise CertifyError(f"answered after {ms(asked)}, the limit is {ms(limit)}")
            back = await bench.target.until(f"the return of {slot}", all_ready, back_s)
            return asked + back, f"answered {status} {code} after {ms(asked)} and replaced"

        await fault.tried(name, hang, limit + back_s)
        if answers and do == "free-gil":
            result.figures["hang_s"] = answers[0][0]


async def _ask_to(bench: Bench, do: str) -> tuple[float, int, str]:
    """(seconds, status, code); status 0: no answer."""
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{bench.target.url}/predictions/{EXTRA}",
                data=json.dumps({"do": do, "at": began}),
                headers={"Content-Type": "application/json"},
            ) as response,
        ):
            told_ = await response.json(content_type=None)
            code = str(told_.get("code", "")) if isinstance(told_, dict) else ""
            return time.monotonic() - began, response.status, code
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        return time.monotonic() - began, 0, type(error).__name__


async def _probe_lost(fault: Fault) -> None:
    bench, name = fault.bench, "probe lost"
    probes = bench.target.named("gpusup: probe")
    if not probes:
        why = "NVML is absent here, so no probe runs" if bench.target.owned else "it is not ours"
        fault.result.skip(name, why)
        return
    bench.progress.step("faults: probe killed", 0.55)

    async def kill() -> tuple[float, str]:
        before = probes[0].pid
        _kill(before, signal.SIGKILL)
        began = time.monotonic()
        while True:
            now = bench.target.named("gpusup: probe")
            status = await bench.target.status()
            known = all(d["known"] for d in status["devices"] if d["kind"] == "cuda")
            if any(p.pid != before for p in now) and known and all_ready(status):
                return time.monotonic() - began, "replaced, all devices known again"
            if time.monotonic() - began > RETURN_S:
                raise CertifyError(f"no new probe within {RETURN_S:g} s")
            await asyncio.sleep(0.02)

    await fault.tried(name, kill, RETURN_S)


async def _gpu_lost(fault: Fault, back_s: float) -> None:
    """The probe is made to say so; nothing is done to the GPU."""
    bench, name = fault.bench, "GPU lost"
    target = bench.target
    devices = [d for d in (await target.status())["devices"] if d["kind"] == "cuda"]
    if not devices:
        fault.result.skip(name, "there is no GPU here")
        return
    if target.overrides is None:
        fault.result.skip(name, "it needs a service of certify's own")
        return
    device, path = devices[-1], target.overrides
    bench.progress.step("faults: GPU lost", 0.6)

    async def lose() -> tuple[float, str]:
        async with _overridden(path, {device["uuid"]: {"lost": True}}):
            seen = await target.until(
                f"the loss of {device['name']}",
                lambda s: any(d["name"] == device["name"] and d["fault"] for d in s["devices"]),
                RETURN_S,
            )
            await asyncio.sleep(bench.profile.calm_s)
            status = await target.status()
            why = next(d["fault"] for d in status["devices"] if d["name"] == device["name"])
        back = await target.until(f"the return of {device['name']}", all_ready, RETURN_S + back_s)
        return back, f"said {why!r} after {ms(seen)}; {device['name']} serves again"

    await fault.tried(name, lose, RETURN_S + back_s)


@asynccontextmanager
async def _overridden(path: Path, rules: dict[str, Any]) -> AsyncIterator[None]:
    await asyncio.to_thread(path.write_text, json.dumps(rules))
    try:
        yield
    finally:
        await asyncio.to_thread(path.unlink, missing_ok=True)

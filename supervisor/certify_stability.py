"""Test 4, stability: a long stretch of low traffic; nothing may grow and nothing restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from gpusup.conf.units import format_size

from .certify_bench import Bench
from .certify_math import Growth, growth, summary
from .certify_ramp import ms, per_s, told
from .certify_result import Result
from .leak import Slope

TITLE: Final = "Stability: low traffic for long; memory, descriptors, threads"
READ_S: Final = 1.0
#: Readings of one kind that are kept: days are read less often.
READINGS: Final = 7200
#: A run that was interrupted goes on from here, in the report's folder.
FILE: Final = "stability.jsonl"
#: Descriptors or threads for each thousand requests.
COUNT_LIMIT: Final = 1.0
#: Requests are kept in memory for one stretch at a time: three days have too many.
STRETCH_S: Final = 60.0
_KEPT_SAMPLES: Final = 200_000


@dataclass(slots=True)
class Readings:
    """By name, (requests served so far, value)."""

    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, requests: int, at: float, value: float) -> None:
        self.points.setdefault(name, []).append((float(requests), value))
        self.times.setdefault(name, []).append((at, value))


async def run(bench: Bench, result: Result) -> None:
    if bench.target.control is None:
        result.skipped = "memory and restarts can't be read without the control socket (--control)"
        return
    seconds = bench.profile.stability_s
    rate = await bench.base_rate(share=0.1, most=50.0)
    slope_limit = bench.target.config.leak.slope_limit if bench.target.config else 2**20
    path = bench.options.report / FILE
    key = {"profile": bench.profile.name, "model": bench.target.model, "seconds": seconds}
    before = load_past(path, key)
    elapsed, requests, bad = before
    if elapsed:
        result.notes.append(
            f"goes on after {elapsed:.0f} s of an earlier run; slopes are of what came since"
        )
    generations = await _generations(bench)
    oom_before = kernel_ooms()
    warm = await bench.load.run(rate * 2, 3.0)  # the first requests fill caches
    result.samples += warm
    readings = Readings()
    began = time.monotonic()
    end = began + max(0.0, seconds - elapsed)
    codes: dict[str, int] = {}
    p99s: list[float] = []
    served = 0
    while (left := end - time.monotonic()) > 0.5:
        stretch = min(STRETCH_S, left)
        bench.progress.step(f"stability: {left:.0f} s to go", 1 - left / max(seconds, 1))
        reader = asyncio.create_task(_read_on(bench, readings, began, served, rate))
        try:
            samples = await bench.load.run(rate, stretch)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        served += len(samples)
        found = summary(samples, rate)
        requests, bad = requests + found.requests, bad + found.requests - found.good
        p99s.append(found.p99)
        for code, count in found.codes.items():
            codes[code] = codes.get(code, 0) + count
        if len(result.samples) < _KEPT_SAMPLES:
            result.samples += samples
        elapsed += stretch
        save_past(path, key, elapsed, requests, bad)
    now = await _generations(bench)
    restarts = sum(max(0, now.get(slot, 0) - g) for slot, g in generations.items())
    path.unlink(missing_ok=True)  # it came to its end: the next run is a new one
    _judge(result, readings, slope_limit, bench)
    for name, points in readings.times.items():
        if name.endswith(("resident", "allocated")):
            result.series[name] = [(t, v / 2**20) for t, v in points]
    worst = max(p99s, default=0.0)
    result.figures |= {
        "seconds": elapsed, "requests": requests, "rate": round(rate, 1), "bad": bad,
        "restarts": restarts, "worst_p99_s": worst,
    }  # fmt: skip
    result.check(
        "all answered", bad == 0,
        f"{requests - bad} of {requests} in {elapsed:.0f} s at {per_s(rate)}, worst p99 of a "
        f"stretch {ms(worst)}" + (f"; {told(codes)}" if codes else ""),
    )  # fmt: skip
    result.check("no worker restarted", restarts == 0, f"{restarts} restarts")
    after = kernel_ooms()
    if oom_before is None or after is None:
        result.skip("no kernel OOM", "/proc/vmstat does not count them here")
    else:
        result.check(
            "no kernel OOM", after == oom_before, f"{after - oom_before} OOM kills on this machine"
        )


def _judge(result: Result, readings: Readings, slope_limit: float, bench: Bench) -> None:
    slopes: dict[str, Any] = {}
    worst: dict[str, tuple[float, str, Growth]] = {}
    for name, points in sorted(readings.points.items()):
        kind = name.rsplit(" ", 1)[1]
        grown = growth(points)
        if grown.whole is None:
            continue
        slopes[name] = {"per_thousand": grown.whole.value, "low": grown.whole.low,
                        "high": grown.whole.high, "points": grown.whole.points}  # fmt: skip
        # The one that is furthest above the limit stands for all of its kind.
        careful = min(s.low for s in (grown.whole, grown.later) if s is not None)
        if kind not in worst or careful > worst[kind][0]:
            worst[kind] = (careful, name, grown)
    result.figures["slopes_per_thousand_requests"] = slopes
    result.notes.append(
        "A slope fails where its whole 95 % interval is above the limit, over the whole time after "
        "the first quarter and again over the later half; the lowest reading of a stretch counts."
    )
    for kind, title, limit in (
        ("allocated", "allocated memory", slope_limit),
        ("reserved", "reserved memory", slope_limit),
        ("resident", "resident memory", slope_limit),
        ("descriptors", "number of open descriptors", COUNT_LIMIT),
        ("threads", "number of threads", COUNT_LIMIT),
    ):
        if kind not in worst:
            result.skip(title, "too few readings, or the processes are not ours to look at")
            continue
        _, name, grown = worst[kind]
        assert grown.whole is not None
        what = format_size(round(limit)) if limit == slope_limit else f"{limit:g}"
        result.check(
            f"{title} does not grow",
            not grown.exceeds(limit),
            f"largest: {name.rsplit(' ', 1)[0]} {slope_words(grown.whole, limit == slope_limit)} "
            f"per thousand requests; the limit is {what}",
        )


def slope_words(slope: Slope, size: bool) -> str:
    def show(value: float) -> str:
        if not size:
            return f"{value:+.2f}"
        sign = "-" if value < 0 else "+"
        return f"{sign}{format_size(round(abs(value)))}"

    return f"{show(slope.value)} (95 %: {show(slope.low)} to {show(slope.high)})"


async def _read_on(
    bench: Bench, readings: Readings, began: float, served: int, rate: float
) -> None:
    start = time.monotonic()
    while True:
        now = time.monotonic()
        requests = served + int((now - start) * rate)
        for slot in await bench.target.slots():
            for kind in ("allocated", "reserved"):
                if slot["memory"].get(kind):
                    name = f"{slot['slot']} {kind}"
                    readings.add(name, requests, now - began, slot["memory"][kind])
        await asyncio.to_thread(_read_processes, bench, readings, requests, now - began)
        await asyncio.sleep(max(READ_S, bench.profile.stability_s / READINGS))


def _read_processes(bench: Bench, readings: Readings, requests: int, at: float) -> None:
    for process in bench.target.processes():
        with contextlib.suppress(psutil.Error, OSError):
            title = " ".join(process.cmdline()).removeprefix("gpusup: ").strip()
            title = title.split(" (")[0].split(" /")[0]
            if not title.startswith(("worker", "proxy", "supervisor", "probe", "zygote")):
                continue
            with process.oneshot():
                readings.add(f"{title} resident", requests, at, process.memory_info().rss)
                readings.add(f"{title} threads", requests, at, process.num_threads())
            readings.add(f"{title} descriptors", requests, at, process.num_fds())


async def _generations(bench: Bench) -> dict[str, int]:
    return {s["slot"]: s["generation"] for s in await bench.target.slots()}


def kernel_ooms() -> int | None:
    """Processes the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def load_past(path: Path, key: dict[str, Any]) -> tuple[float, int, int]:
    """(seconds, requests, bad ones) of an interrupted run of the same test; zeros without one."""
    try:
        lines = path.read_text().splitlines()
        told: Sequence[dict[str, Any]] = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return 0.0, 0, 0
    mine = [one for one in told if one.get("key") == key]
    if not mine:
        return 0.0, 0, 0
    return float(mine[-1]["elapsed"]), int(mine[-1]["requests"]), int(mine[-1]["bad"])


def save_past(path: Path, key: dict[str, Any], elapsed: float, requests: int, bad: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"key": key, "elapsed": elapsed, "requests": requests, "bad": bad}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")

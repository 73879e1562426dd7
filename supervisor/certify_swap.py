"""Test 5, swap: new versions under load, and one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from pathlib import Path
from typing import Any, Final

import psutil

from gpusup.conf.places import weights_of

from .certify_bench import Bench
from .certify_math import Ratio, Sample, percentile, ratio, summary
from .certify_ramp import ms, per_s, told
from .certify_result import Result
from .certify_service import CertifyError, all_ready
from .certify_toml import DIGITS, quoted

TITLE: Final = "Swap: versions change under load; a failing one is taken back"
#: Answers after each swap that count as first.
FIRST: Final = 5
GONE_LIMIT_S: Final = 10.0
#: About so many requests at least are answered when calm, and meet the failing version.
MEANWHILE: Final = 10
BROKEN: Final = "gpusup.worker.certify_faults:Broken"


async def run(bench: Bench, result: Result) -> None:
    target = bench.target
    if target.control is None:
        result.skipped = "versions can't be changed without the control socket (--control)"
        return
    if not bench.allowed_faults:
        result.skipped = "swaps change a running service; allow it with --allow-faults"
        return
    swaps = bench.profile.swaps
    rate = await bench.base_rate(share=0.15, most=100.0)
    versions = await _versions(bench)
    calm = await bench.load.run(rate, max(2 * bench.profile.calm_s, MEANWHILE / rate))
    result.samples += calm
    p50 = percentile([s.latency for s in calm], 0.5)
    rest = await bench.resting()
    old_pids: set[int] = set()
    spans: list[tuple[float, float]] = []
    states: list[str] = []
    left: list[str] = []
    failures: list[str] = []
    async with bench.load.running(rate) as samples:
        await asyncio.sleep(bench.profile.calm_s)
        for number in range(swaps):
            bench.progress.step(f"swap {number + 1} of {swaps}", number / swaps)
            before = {s["pid"] for s in await target.slots() if s["pid"]}
            version = versions[(number + 1) % len(versions)]
            began = time.monotonic()
            bench.mark(result, f"swap to {version}")
            path = f"/models/{target.model}/reload"
            change = await target.change(path, {"version": version})
            spans.append((began, time.monotonic()))
            states.append(change["state"])
            if change["state"] != "done":  # then the old ones are to stay
                failures.append(_said(change))
                continue
            old_pids |= before
            if lingering := await _lingering(before):
                left.append(lingering)
        await asyncio.sleep(bench.profile.calm_s)
    result.samples += samples
    found = summary(samples, rate)
    firsts = [percentile(one, 0.5) for one in first_answers(samples, spans, versions) if one]
    first = percentile(firsts, 0.5)
    during = usual_while(samples, spans, p50)
    change = ratio(firsts, during) if len(firsts) > 1 else Ratio(value=9.9, low=9.9, high=9.9)
    usual = percentile(during, 0.5)
    took = [b - a for a, b in spans]
    result.figures = {
        "swaps": swaps, "took_s": took, "requests": found.requests,
        "bad": found.requests - found.good, "p50_s": p50, "p50_during_s": usual,
        "first_answers_p50_s": first, "versions": versions,
    }  # fmt: skip
    result.check(
        "swaps came to their end", set(states) == {"done"},
        f"{states.count('done')} of {swaps} done, {ms(percentile(took, 0.5))} each (median)"
        + (f"; {failures[0]}" if failures else ""),
    )  # fmt: skip
    result.check(
        "in-flight requests complete", found.clean,
        f"{found.good} of {found.requests} answered well at {per_s(rate)}, "
        f"slowest {ms(found.worst)}"
        + (f"; {told(found.codes)}" if found.codes else ""),
    )  # fmt: skip
    result.check(
        "first answers after a swap below 2 x p50", change.low < 2,
        f"the first {FIRST} of a swap take {ms(first)} (median), p50 is {ms(p50)} when calm and "
        f"{ms(usual)} while swapping: {change.value:.1f} x the larger (95 %: {change.low:.1f} to "
        f"{change.high:.1f}); fails where all of that is above 2",
    )  # fmt: skip
    result.check(
        "old processes gone", not left,
        "; ".join(left) or f"all {len(old_pids)} ended within {GONE_LIMIT_S:g} s of their swap",
    )  # fmt: skip
    await _memory_back(bench, result, old_pids, rest)
    await _rollback(bench, result, rate)


def first_answers(
    samples: list[Sample], spans: list[tuple[float, float]], versions: list[str]
) -> list[list[float]]:
    """By swap, the first latencies of its new version; with one version only, after its end."""
    found: list[list[float]] = []
    for number, (began, ended) in enumerate(spans):
        version = versions[(number + 1) % len(versions)]
        if len(versions) > 1:
            mine = [s for s in samples if s.ended > began and s.version == version and s.good]
        else:
            mine = [s for s in samples if s.due > ended and s.good]
        found.append([s.latency for s in sorted(mine, key=lambda s: s.ended)[:FIRST]])
    return found


def usual_while(
    samples: list[Sample], spans: list[tuple[float, float]], calm: float
) -> list[float]:
    """By swap, the median latency while it went on, but no less than when all was calm.

    Starting a worker takes a core, which a small box then lacks for everybody: that is no cold
    start, and comparing with the calm would take it for one.
    """
    found = []
    for began, ended in spans:
        mine = [s.latency for s in samples if began <= s.due <= ended and s.good]
        found.append(max(calm, percentile(mine, 0.5)) if mine else calm)
    return found


async def _versions(bench: Bench) -> list[str]:
    """What can be swapped to, the present one first: by the weights that lie there."""
    status = await bench.target.status()
    model = next(m for m in status["models"] if m["name"] == bench.target.model)
    now = str(model["version"])
    config = bench.target.config
    if config is None:
        return [now]
    section = config.models[bench.target.model]
    if section.handler == DIGITS and not section.weights:
        return [now, "2" if now == "1" else "1"]
    if "{version}" not in section.weights:
        return [now]
    there = [v for v in _numbers(section.weights) if v != now]
    return [now, there[-1]] if there else [now]


def _numbers(pattern: str) -> list[str]:
    path = Path(pattern)
    at = next(n for n, part in enumerate(path.parts) if "{version}" in part)
    folder, part = Path(*path.parts[:at]), path.parts[at]
    wanted = re.compile(re.escape(part).replace(r"\{version\}", r"(\d+)") + "$")
    found = []
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if (hit := wanted.match(entry.name)) and Path(weights_of(pattern, hit[1])).exists():
                found.append(hit[1])
    return sorted(found, key=int)


def _said(change: Any) -> str:
    """The beginning of what a change said in the end; "" if nothing."""
    return str(change.get("text", "")).partition("\n")[0][:160]


async def _lingering(pids: set[int]) -> str:
    """Which of them are still there after the limit, in words."""
    end = time.monotonic() + GONE_LIMIT_S
    while alive := [pid for pid in pids if lives(pid)]:
        if time.monotonic() > end:
            return f"{', '.join(map(str, alive))} still there after {GONE_LIMIT_S:g} s"
        await asyncio.sleep(0.02)
    return ""


def lives(pid: int) -> bool:
    """A zombie of somebody else's holds nothing any more."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def _memory_back(bench: Bench, result: Result, pids: set[int], rest: float) -> None:
    await bench.settled()
    after = await bench.resting()
    grown = (after - rest) / rest if rest else 0.0
    result.figures["rest_before"], result.figures["rest_after"] = rest, after
    listed = await gpu_pids()
    alive = {s["pid"] for s in await bench.target.slots() if s["pid"]}
    if listed is not None and not listed & alive:
        result.skip(
            "old memory gone by pid on the GPU",
            "the driver does not list the present workers either: it sees other pids than we do",
        )
    elif listed is None:
        result.skip(
            "old memory gone by pid on the GPU",
            "no nvidia-smi here; on a CPU slot memory goes with its process",
        )
    else:
        held = pids & listed
        result.check(
            "old memory gone by pid on the GPU", not held,
            f"the driver lists {', '.join(map(str, held))}" if held
            else f"the driver lists none of {len(pids)} old processes",
        )  # fmt: skip
    status = await bench.target.status()
    if any(d["kind"] == "cuda" for d in status["devices"]):
        result.check(
            "device memory as before", grown < 0.03,
            f"at rest {grown:+.2%} of before the swaps; the limit is 3%",
        )  # fmt: skip
    else:
        result.skip(
            "device memory as before",
            f"processes of different age differ in resident memory ({grown:+.1%}); needs a GPU",
        )


async def gpu_pids() -> set[int] | None:
    """Processes that hold GPU memory; None if nobody can tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    process = await asyncio.create_subprocess_exec(
        tool, "--query-compute-apps=pid", "--format=csv,noheader",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 10)
    except TimeoutError:
        process.kill()
        return None
    if process.returncode:
        return None
    return {int(word) for word in out.decode().split() if word.isdigit()}


def with_broken(config: str, model: str) -> str:
    """The text of a configuration of certify's own with a handler for `model` that fails."""
    section = config.index(f"[models.{quoted(model)}]")
    return config[:section] + re.sub(
        r"^handler = .*$", f'handler = "{BROKEN}"', config[section:], count=1, flags=re.M
    )


async def _rollback(bench: Bench, result: Result, rate: float) -> None:
    """The handler is changed for one that fails on the device; the old one must go on."""
    target = bench.target
    name = "a failing version rolls back"
    if not target.owned or target.config is None:
        result.skip(name, "it needs the configuration file of a service of certify's own")
        return
    path = target.folder / "gpusup.toml"
    good = path.read_text()
    broken = with_broken(good, target.model)
    bench.mark(result, "failing version")
    async with bench.load.running(rate) as samples:
        path.write_text(broken)
        try:
            answer = await target.call("POST", "/reload-config")
            change: Any = await target.call("GET", f"/changes/{answer['changes'][0]}?wait=300")
        finally:
            path.write_text(good)
        with contextlib.suppress(CertifyError):
            await target.until("the return of all workers", all_ready, 60.0)
        await asyncio.sleep(max(0.5, MEANWHILE / rate))
    result.samples += samples
    found = summary(samples, rate)
    with contextlib.suppress(CertifyError):  # the file says again what is served
        for one in (await target.call("POST", "/reload-config"))["changes"]:
            await target.call("GET", f"/changes/{one}?wait=60")
    state = change["state"]
    text = _said(change)
    result.check(
        name, state in ("rolled-back", "failed") and found.clean and bool(text),
        f"{state}: {text or 'without a word'}; meanwhile {found.good} of "
        f"{found.requests} answered well" + (f"; {told(found.codes)}" if found.codes else ""),
    )  # fmt: skip

"""Test 1, load: the highest rate that keeps the SLA, and a longer stretch at the stated rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Final

from .certify_bench import Bench
from .certify_math import LOST, Sample, Summary, percentile, summary, variation
from .certify_result import Result
from .certify_service import NO_CONTROL

TITLE: Final = "Load: open arrivals, ramp to the knee, then the stated rate"
FIRST_RATE: Final = 20.0
#: Where even that is too much, it is halved as far as this.
LEAST_RATE: Final = 1.0
MOST: Final = 100_000.0
#: Without --rate, the share of the highest rate that is held: what one would run a box at.
STATED_SHARE: Final = 0.5
REST_LIMIT: Final = 0.03
#: The stated rate is held in so many parts, with a rest behind each.
HELD_PARTS: Final = 4
#: Without --rate: so often it is halved if it was not kept for that long.
RETRIES: Final = 3


async def run(bench: Bench, result: Result) -> None:
    options, profile, sla = bench.options, bench.profile, bench.options.sla
    control = bench.target.control is not None
    ooms = await bench.ooms()
    bench.progress.step("load: warming up", 0.0)
    warm = await bench.load.run(FIRST_RATE, 2.0)
    result.samples += warm
    rests: list[float] = []

    async def at(rate: float) -> bool:
        bench.mark(result, per_s(rate))
        _, kept = _noted(bench, result, rate, await bench.load.run(rate, profile.step_s))
        await bench.settled(60.0)
        return kept

    async def rest() -> None:
        """Only after the first pass through all rates: until then caches and pools fill."""
        if control:
            await asyncio.sleep(0.3)
            rests.append(await bench.resting())

    good, bad = 0.0, math.inf
    rate = FIRST_RATE
    while rate <= MOST:
        bench.progress.step(f"load: {per_s(rate)}", 0.1)
        if not await at(rate):
            bad = rate
            break
        good = rate
        rate *= 2
    while not good and rate > LEAST_RATE:
        rate = bad = max(LEAST_RATE, rate / 2)
        bench.progress.step(f"load: {per_s(rate)}", 0.1)
        if await at(rate):
            good, bad = rate, rate * 2
    for _ in range(profile.bisections if good and bad < math.inf else 0):
        rate = math.sqrt(good * bad)
        bench.progress.step(f"load: {per_s(rate)}", 0.5)
        good, bad = (rate, bad) if await at(rate) else (good, rate)
        await rest()
    bench.knee = good
    slowest = result.rates[-1]

    stated = options.rate or STATED_SHARE * (good or bad)
    seconds = profile.hold_s
    missed: list[float] = []
    while True:
        held = await _hold(bench, result, stated, rest)
        found, kept = _noted(bench, result, stated, held, stated=True)
        # What the user states is certified or not. What was derived from short steps is a guess,
        # and may be taken back in the open; then the highest rate was too good to be true as well.
        if options.rate or kept or len(missed) == RETRIES:
            break
        missed.append(stated)
        stated *= STATED_SHARE
        bench.knee = stated / STATED_SHARE  # the other tests work at shares of it
    reached = percentile([s.latency for s in held], sla.share)
    whose = "as stated" if options.rate else f"{stated / good:.0%} of the highest" if good else ""
    if missed:
        whose += f"; {', '.join(map(per_s, missed))} not kept for so long"
    result.figures = {
        "highest_rate": round(good, 1),
        "first_rate_that_failed": None if bad == math.inf else round(bad, 1),
        "stated_rate": round(stated, 1),
        "sla": str(sla),
        "held": asdict(found),
        "sla_percentile_s": reached,
        "requests": len(result.samples),
        "bodies": bench.sizes_from,
        "rest_bytes": [int(r) for r in rests],
    }
    result.check(
        "highest rate",
        good > 0,
        f"{per_s(good)} keeps {sla}"
        + (f", {per_s(bad)} does not" if bad < math.inf else "; no limit was found")
        if good
        else f"not even {per_s(bad)} keeps {sla}: {_why(slowest)}",
    )
    result.check(
        "SLA at the stated rate",
        reached <= sla.limit_s and not found.growing,
        f"p{sla.share * 100:g} is {ms(reached)} at {per_s(stated)} ({whose}) over {seconds:g} s; "
        f"the limit is {ms(sla.limit_s)}" + ("; answers came ever later" if found.growing else ""),
    )
    result.check(
        "all answered at the stated rate",
        found.clean,
        f"{found.good} of {found.requests} answered well"
        + (f"; {told(found.codes)}" if found.codes else ""),
    )
    lost = sum(1 for s in result.samples if s.status == LOST)
    result.figures["lost"] = lost
    result.check(
        "0 lost",
        lost == 0,
        f"{lost} of {len(result.samples)} requests got no answer, overload included",
    )
    late = found.lag_p99
    result.check(
        "the generator kept up",
        late <= max(0.05, 0.2 * sla.limit_s),
        f"it sent within {ms(late)} of the schedule (p99); that is part of the latencies shown",
    )
    if not control:
        result.skip("resting memory", NO_CONTROL)
    else:
        change = variation(rests)
        result.check(
            "resting memory",
            change < REST_LIMIT,
            f"varies by {change:.2%} over {len(rests)} rests between stretches of load; the limit "
            f"is {REST_LIMIT:.0%}",
        )
    await bench.check_ooms(result, ooms)


def _noted(
    bench: Bench, result: Result, rate: float, samples: list[Sample], **more: object
) -> tuple[Summary, bool]:
    """One more rate of the ramp. Returns also whether it kept the SLA."""
    found = summary(samples, rate)
    kept = bench.keeps(found, samples)
    result.samples += samples
    result.rates.append({**asdict(found), "kept": kept, **more})
    return found, kept


async def _hold(
    bench: Bench, result: Result, rate: float, rest: Callable[[], Awaitable[None]]
) -> list[Sample]:
    held: list[Sample] = []
    seconds = bench.profile.hold_s
    bench.progress.step(f"load: {per_s(rate)} for {seconds:g} s", 0.6)
    bench.mark(result, f"stated: {per_s(rate)}")
    for _ in range(HELD_PARTS):
        held += await bench.load.run(rate, seconds / HELD_PARTS)
        await bench.settled(60.0)
        await rest()
    return held


def ms(seconds: float) -> str:
    """As people read it: 12 ms, 1.50 s."""
    if math.isinf(seconds):
        return "never"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def per_s(rate: float) -> str:
    """Requests a second, as people read it: 1200/s, 2.5/s."""
    return f"{rate:.0f}/s" if rate >= 20 else f"{rate:.3g}/s"


def told(codes: dict[str, int]) -> str:
    return ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))


def _why(rate: dict[str, object]) -> str:
    codes = rate["codes"]
    words = told(codes) if isinstance(codes, dict) and codes else ""
    late = "answers came ever later, " if rate["growing"] else ""
    return words or f"{late}p99 {ms(float(str(rate['p99'])))}"

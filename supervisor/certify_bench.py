"""What the seven tests share: the options, the profile, the running service and the samplers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from .certify_bodies import Sizes, make_bodies
from .certify_load import Body, Load, generator
from .certify_math import Sample, Summary, keeps, percentile, summary
from .certify_result import Mark, Result
from .certify_service import NO_CONTROL, CertifyError, Target

SAMPLE_S: Final = 0.5
#: More readings than this and every second one is dropped; three days fit.
SERIES_LIMIT: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds, and counts."""

    name: str
    step_s: float  # of the ramp, at each rate
    hold_s: float  # at the stated rate
    bisections: int
    window_s: float  # of mixed
    windows: int  # pairs of them
    stability_s: float
    swaps: int
    calm_s: float  # around faults and swaps


PROFILES: Final = {
    "quick": Profile(
        name="quick", step_s=2.0, hold_s=10.0, bisections=2, window_s=2.5, windows=4,
        stability_s=120.0, swaps=10, calm_s=1.0,
    ),
    "standard": Profile(
        name="standard", step_s=8.0, hold_s=60.0, bisections=4, window_s=10.0, windows=6,
        stability_s=1800.0, swaps=10, calm_s=3.0,
    ),
    "soak": Profile(
        name="soak", step_s=15.0, hold_s=300.0, bisections=5, window_s=20.0, windows=8,
        stability_s=72 * 3600.0, swaps=10, calm_s=5.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sla:
    """`share` of all requests within `limit_s`: 0.99 and 2.0 for "p99=2s"."""

    share: float = 0.99
    limit_s: float = 2.0

    def __str__(self) -> str:
        return f"p{self.share * 100:g}={self.limit_s:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    config: Path | None
    url: str
    control: str
    model: str
    profile: Profile
    sla: Sla
    report: Path
    allow_faults: bool
    rate: float  # requests a second; 0: half of the highest that keeps the SLA
    sizes: Path | None
    inputs: tuple[Path, ...]


class Progress(Protocol):
    def say(self, text: str) -> None: ...
    def step(self, text: str, done: float) -> None: ...


@dataclass(slots=True)
class Series:
    """Readings over the whole time: (monotonic, value) under names like "cpu0 watermark"."""

    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, at: float, value: float) -> None:
        found = self.values.setdefault(name, [])
        found.append((at, value))
        if len(found) > SERIES_LIMIT:
            del found[1::2]


@dataclass(slots=True, kw_only=True)
class Bench:
    options: Options
    progress: Progress
    target: Target
    load: Load
    bodies: list[Body]
    sizes_from: str
    series: Series
    knee: float = 0.0  # requests a second; 0: not known yet
    allowed_faults: bool = False

    @property
    def profile(self) -> Profile:
        return self.options.profile

    def mark(self, result: Result, text: str) -> None:
        result.marks.append(Mark(time.monotonic(), text))

    async def base_rate(self, share: float = 0.25, most: float = 200.0) -> float:
        """A rate that leaves the service at ease; by a short ramp where `load` did not run."""
        if not self.knee:
            self.knee = self.options.rate or await self._quick_knee()
        return max(1.0, min(most, share * self.knee))

    async def _quick_knee(self) -> float:
        rate, good = 10.0, 0.0
        while rate <= 2000:
            self.progress.step(f"looking for a rate to work with: {rate:g}/s", 0.0)
            samples = await self.load.run(rate, 1.5)
            if not self.keeps(summary(samples, rate), samples):
                break
            good = rate
            rate *= 3
        return good or 4.0

    async def resting(self) -> float:
        """Bytes held on all devices while nothing is done: the median of a few readings."""
        readings = []
        for _ in range(5):
            status = await self.target.status()
            readings.append(
                sum(
                    d["total"] - d["free"] - d["reclaimable"]
                    for d in status["devices"]
                    if d["known"]
                )
            )
            await asyncio.sleep(0.1)
        return percentile([float(r) for r in readings], 0.5)

    async def settled(self, limit_s: float = 10.0) -> None:
        """Until nothing is queued or at work. Raises CertifyError."""
        if self.target.control is None:
            return
        end = time.monotonic() + limit_s
        while True:
            leases = await self.target.call("GET", "/leases")
            busy = [
                name
                for kind in ("in_flight", "queued")
                for name, found in leases[kind].items()
                if any(found.values())
            ]
            if not busy:
                return
            if time.monotonic() > end:
                raise CertifyError(
                    f"{', '.join(busy)} still has work {limit_s:g} s after the last request"
                )
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Memory, watermarks and restarts are noted meanwhile."""
        if self.target.control is None:
            yield
            return
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(CertifyError):
                status = await self.target.status()
                now = time.monotonic()
                for d in status["devices"]:
                    if d["known"]:
                        self.series.add(f"{d['name']} watermark", now, d["watermark"])
                        self.series.add(f"{d['name']} used", now, d["total"] - d["free"])
                        self.series.add(f"{d['name']} total", now, d["total"])
            await asyncio.sleep(SAMPLE_S)

    def keeps(self, found: Summary, samples: list[Sample]) -> bool:
        """`found`: the summary of `samples`."""
        sla = self.options.sla
        return keeps(found, sla.share, sla.limit_s, [s.latency for s in samples])

    async def ooms(self) -> float | None:
        """Out-of-memory events so far; None where they can't be seen."""
        if self.target.control is None:
            return None
        return await self.target.metric("gpusup_worker_ooms_total")

    async def check_ooms(self, result: Result, before: float | None) -> None:
        name, now = "0 out of memory", await self.ooms()
        if before is None or now is None:
            result.skip(name, NO_CONTROL)
        else:
            result.check(name, now == before, f"{now - before:.0f} out-of-memory events")


@asynccontextmanager
async def bench_for(
    options: Options, progress: Progress, target: Target, series: Series
) -> AsyncIterator[Bench]:
    """A generator that talks to `target`, with bodies that its model answers."""
    sizes = Sizes(file=options.sizes, inputs=options.inputs)
    path, bodies, origin = await make_bodies(target, sizes)
    async with generator(f"{target.url}{path}", bodies, target.folder / "bodies") as load:
        bench = Bench(
            options=options, progress=progress, target=target, load=load, bodies=bodies,
            sizes_from=origin, series=series,
            allowed_faults=target.owned or options.allow_faults,
        )  # fmt: skip
        async with bench.sampled():
            yield bench

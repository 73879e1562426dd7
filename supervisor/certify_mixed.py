"""Test 3, mixed load: does what else runs on the machine reach the clients?"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from .certify_bench import Bench
from .certify_math import Ratio, Sample, percentile, ratio, summary
from .certify_meter import background, metered
from .certify_ramp import ms, per_s, told
from .certify_result import Result, Verdict

TITLE: Final = "Mixed: CPU hogs on all cores, disk reads, a foreign process on the GPU"
CHANGE_LIMIT: Final = 1.15
#: If the interval holds the limit, more windows are taken, so many times at most.
ROUNDS: Final = 3
_DISK_BYTES: Final = 256 * 2**20

_SPIN: Final = "x = 1\nwhile True:\n    x = (x * 48271) % 2147483647"
_READ: Final = """\
import os, sys
while True:
    fd = os.open(sys.argv[1], os.O_RDONLY)
    while os.read(fd, 1 << 20):
        pass
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
"""


async def run(bench: Bench, result: Result) -> None:
    if bench.options.url and not bench.allowed_faults:
        result.skipped = "hogs would harm a running service; allow it with --allow-faults"
        return
    profile = bench.profile
    control = bench.target.control is not None
    ooms = await bench.ooms()
    rate = await bench.base_rate()
    devices = (await bench.target.status())["devices"] if control else []
    gpus = [d for d in devices if d["kind"] == "cuda"]
    calm: list[float] = []
    busy: list[float] = []
    loaded: list[Sample] = []
    bare: tuple[list[float], list[float]] = ([], [])
    foreign = ""
    found = Ratio(value=math.nan, low=math.nan, high=math.nan)
    with _disk_file(bench.target.folder) as disk:
        for turn in range(ROUNDS):
            for number in range(profile.windows):
                bench.progress.step(
                    "mixed: calm and busy windows in turn", number / profile.windows
                )
                async with metered(bare[0]):
                    samples = await bench.load.run(rate, profile.window_s)
                result.samples += samples
                calm.append(percentile([s.latency for s in samples], 0.5))
                bench.mark(result, "hogs")
                async with _hogs(disk, gpus) as foreign, metered(bare[1]):
                    samples = await bench.load.run(rate, profile.window_s)
                bench.mark(result, "calm")
                result.samples += samples
                loaded += samples
                busy.append(percentile([s.latency for s in samples], 0.5))
            found = ratio(busy, calm)
            if not gpus or turn == ROUNDS - 1 or not found.low < CHANGE_LIMIT < found.high:
                break
    met = summary(loaded, rate)
    result.figures = {
        "rate": round(rate, 1), "windows": len(busy), "calm_p50_s": calm, "busy_p50_s": busy,
        "change": found.value - 1, "change_low": found.low - 1, "change_high": found.high - 1,
        "busy_p99_s": met.p99, "hogs": _words(), "bare_s": bare,
    }  # fmt: skip
    words = (
        f"p50 changes by {found.value - 1:+.0%} (95 %: {found.low - 1:+.0%} to "
        f"{found.high - 1:+.0%}) over {len(busy)} pairs of windows at {per_s(rate)}"
    )
    machine = ratio(bare[1], bare[0]) if all(len(each) > 1 for each in bare) else None
    if machine is not None:
        words += f"; a bare loop with the same precedence sees {machine.value - 1:+.0%}"
    if not gpus:
        result.skip(
            "latency change below 15 %",
            f"the model computes on the same cores that the hogs take, so this compares the "
            f"kernel's scheduler with itself; it needs a GPU. For the record: {words}",
        )
        result.skip("a foreign process on the GPU", "there is no GPU here")
    else:
        name = "latency change below 15 %, or admission that says why"
        admitted = met.refused > 0 and all(code for code in met.codes)
        words += f"; refused with a reason: {told(met.codes)}" if met.refused else ""
        verdict = judge(found, machine, admitted=admitted)
        if verdict == "skipped":
            assert machine is not None
            result.skip(
                name,
                f"{words}. So this machine's cores slow each other down by more than the limit, "
                f"which no server can win back; ours adds {found.value / machine.value - 1:+.0%} "
                f"to that. For cores of its own see docs/certify.md",
            )
        else:
            result.check(name, verdict == "passed", words)
        result.check("a foreign process on the GPU", bool(foreign), foreign or "it did not start")
    sla = bench.options.sla
    reached = percentile([s.latency for s in loaded if s.status not in (429, 503)], sla.share)
    result.check(
        "SLA while busy", reached <= sla.limit_s,
        f"p{sla.share * 100:g} is {ms(reached)} with {_words()}; the limit is {ms(sla.limit_s)}",
    )  # fmt: skip
    result.check(
        "nothing lost, nothing failed", met.lost + met.failed == 0,
        f"{met.good} of {met.requests} answered well, {met.refused} refused with a reason"
        + (f"; {told(met.codes)}" if met.codes else ""),
    )  # fmt: skip
    await bench.check_ooms(result, ooms)


def judge(change: Ratio, machine: Ratio | None, *, admitted: bool) -> Verdict:
    """`change` of the latency; `machine`: the same of a loop that only computes, None: unknown.

    Where the loop alone is slowed down by more than the limit, and the service by less than the
    limit more than that, the machine can't show what is asked.
    """
    if change.value < CHANGE_LIMIT or (change.low <= CHANGE_LIMIT and admitted):
        return "passed"
    if machine is not None and machine.value >= CHANGE_LIMIT > change.value / machine.value:
        return "skipped"
    return "failed"


def _words() -> str:
    kind = "ffmpeg" if shutil.which("ffmpeg") else "a compute loop"
    return f"{kind} on each of {os.cpu_count()} cores and a disk reader"


@contextlib.contextmanager
def _disk_file(folder: Path) -> Any:
    path = folder / "disk"
    with path.open("wb") as file:
        block = os.urandom(2**20)
        for _ in range(_DISK_BYTES // len(block)):
            file.write(block)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@asynccontextmanager
async def _hogs(disk: Path, gpus: Sequence[Any]) -> AsyncIterator[str]:
    """Yields what the process on the GPU said it took."""
    if ffmpeg := shutil.which("ffmpeg"):
        spin = [ffmpeg, "-v", "quiet", "-f", "lavfi", "-i", "testsrc2=size=1280x720:rate=1000",
                "-threads", "1", "-c:v", "mpeg4", "-f", "null", "-"]  # fmt: skip
    else:
        spin = [sys.executable, "-c", _SPIN]
    commands = [spin] * (os.cpu_count() or 1) + [[sys.executable, "-c", _READ, str(disk)]]
    processes = [background(words) for words in commands]
    foreign = ""
    try:
        if gpus:
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[0]["uuid"]}
            words = [sys.executable, "-m", "gpusup.worker.certify_hog", "0.3"]
            hog = background(words, stdout=subprocess.PIPE, env=env)
            processes.append(hog)
            assert hog.stdout is not None
            foreign = (await asyncio.to_thread(hog.stdout.readline)).strip()
        yield foreign
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            await asyncio.to_thread(process.wait)
            if process.stdout is not None:
                process.stdout.close()

"""The load generator: wrk, and how much of the machine somebody else used meanwhile."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers import BenchProblem
from server import Server

SCRIPT = Path(__file__).parent / "post.lua"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of wrk. Answers other than 2xx are not in `per_s`."""

    per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    foreign: float  # share of all cores that neither the server nor wrk used, but somebody did


@dataclass(frozen=True, slots=True)
class Wrk:
    """`core` empty: unpinned."""

    program: str
    env: dict[str, str]
    core: str = "1"

    @classmethod
    def find(cls, folder: str, core: str = "1") -> Wrk:
        """From `folder` (filled by carry_wrk.sh) or from PATH; raises BenchProblem."""
        if not folder:
            program = shutil.which("wrk")
            if not program:
                raise BenchProblem("cannot find wrk; on Debian: apt-get install -y wrk")
            return cls(program, dict(os.environ), core)
        path = Path(folder).resolve() / "wrk"
        if not path.exists():
            raise BenchProblem(f"there is no {path}; fill the folder with carry_wrk.sh")
        path.chmod(0o755)  # some ways of copying a folder lose it
        libraries = f"{path.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        return cls(str(path), os.environ | {"LD_LIBRARY_PATH": libraries}, core)

    def run(self, server: Server, connections: int, seconds: float, threads: int = 1) -> Run:
        """Closed loop on `connections`. Raises BenchProblem when wrk itself fails."""
        pinned = ["taskset", "-c", self.core] if self.core else []
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as body:
            body.write(server.body)
            body.flush()
            env = self.env | {"BENCH_BODY": body.name, "BENCH_TYPE": server.content_type}
            busy, own, began = busy_s(), _own_s(server), time.perf_counter()
            done = subprocess.run(
                [*pinned, self.program, f"-t{min(threads, connections)}", f"-c{connections}",
                 f"-d{max(1, round(seconds))}s", "--timeout", "30s", "--latency",
                 "-s", str(SCRIPT), server.url],
                env=env, capture_output=True, text=True, timeout=seconds + 60, check=False,
            )  # fmt: skip
            took = time.perf_counter() - began
            others = busy_s() - busy - (_own_s(server) - own)
        lines = [line for line in done.stdout.splitlines() if line.startswith("JSON ")]
        if not lines:
            raise BenchProblem(f"wrk failed on {server.url}: {done.stdout[-300:]}{done.stderr}")
        said = json.loads(lines[0].removeprefix("JSON "))
        failed = sum(said[kind] for kind in ("connect", "read", "write", "status", "timeout"))
        return Run(
            per_s=(said["requests"] - said["status"]) / (said["duration_us"] / 1e6),
            p50_ms=said["p50_us"] / 1e3,
            p99_ms=said["p99_us"] / 1e3,
            errors=failed,
            foreign=max(0.0, others / took / (os.cpu_count() or 1)),
        )


def middle(runs: Sequence[Run]) -> float:
    """The median rate."""
    return statistics.median(run.per_s for run in runs)


def ratio(ours: float, theirs: float) -> float | None:
    """None where they answered nothing: there is nothing to compare with."""
    return ours / theirs if theirs else None


def busy_s() -> float:
    """CPU seconds that all cores have spent on programs since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, fields[1:4])) / TICKS  # user, nice, system


def _own_s(server: Server) -> float:
    total = server.cpu_s()
    for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(whose)
        total += used.ru_utime + used.ru_stime
    return total

"""frontdoor, payload and conv: requests and bytes per second beside the peers."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from contest import CONV, GPUSUP, Job, Setting, server_for
from load import Run, middle, ratio
from peers import BenchProblem
from result import Result, spread
from server import Server

#: A run in which others used more of the machine than this is repeated, once.
QUIET = 0.15
PAYLOAD_MIB = 12


def interleaved(
    setting: Setting,
    job: Job,
    connections: int,
    seconds: float,
    rounds: int,
    after_start: Callable[[Server], None] = lambda server: None,
) -> dict[str, list[Run]]:
    """Each round starts every server in turn, warms it up and loads it: A B C, A B C, ...

    A peer that does not start is left out, with a word about it; gpusup has to start.
    """
    runs: dict[str, list[Run]] = {name: [] for name in setting.names()}
    for number in range(rounds):
        for name in list(runs):
            try:
                with server_for(name, job, setting) as server:
                    after_start(server)
                    setting.wrk.run(server, connections, 1)
                    run = setting.wrk.run(server, connections, seconds)
                    if run.foreign > QUIET and not setting.quick:
                        again = setting.wrk.run(server, connections, seconds)
                        run = min(run, again, key=lambda r: r.foreign)
            except BenchProblem as problem:
                setting.say(f"{name}: {problem}")
                if name == GPUSUP:
                    raise
                del runs[name]
                continue
            runs[name].append(run)
            setting.say(f"round {number + 1}/{rounds} {name}: {run.per_s:.0f}/s")
    return runs


def _columns(unit: str) -> tuple[str, ...]:
    return ("server", unit, "p50 ms", "p99 ms", "errors", "others' CPU")


def _row(name: str, runs: list[Run], scale: float = 1.0) -> tuple[str, ...]:
    return (
        name,
        spread([run.per_s * scale for run in runs]),
        f"{statistics.median(run.p50_ms for run in runs):.2f}",
        f"{statistics.median(run.p99_ms for run in runs):.2f}",
        str(sum(run.errors for run in runs)),
        f"{max(run.foreign for run in runs):.0%}",
    )


def frontdoor(setting: Setting) -> Result:
    """The cost of everything but the model: a JSON no-op, the whole server on core 0."""
    result = Result("frontdoor", _columns("req/s"))
    job = Job(mode="noop", cores="0")
    runs = interleaved(setting, job, 16, setting.seconds(4), setting.rounds(3))
    for name, of_it in runs.items():
        result.rows.append(_row(name, of_it))
        result.figures[f"{name}_per_s"] = middle(of_it)
        result.figures[f"{name}_errors"] = sum(run.errors for run in of_it)
        if name != GPUSUP:
            result.ratios[f"frontdoor_vs_{name}"] = ratio(middle(runs[GPUSUP]), middle(of_it))
    result.goals = {
        "frontdoor_vs_mosec": (">=", 2.0),
        "frontdoor_vs_litserve": (">=", 12.0),
        "gpusup_errors": ("<=", 0),
    }
    result.notes = ["16 connections, server on core 0, wrk on core 1", *setting.best_settings()]
    return result


def payload(setting: Setting) -> Result:
    """Bodies of 12 MiB whose length is the answer."""
    result = Result("payload", _columns("MB/s"))
    body = bytes(PAYLOAD_MIB << 20)
    megabytes = len(body) / 1e6
    job = Job(mode="length", body=body, cores="0")
    # Never shorter: the slowest peer needs more than a second for its first round of answers.
    runs = interleaved(setting, job, 16, 4, setting.rounds(3))
    for name, of_it in runs.items():
        result.rows.append(_row(name, of_it, megabytes))
        result.figures[f"{name}_mb_per_s"] = middle(of_it) * megabytes
        result.figures[f"{name}_errors"] = sum(run.errors for run in of_it)
        if name != GPUSUP:
            result.ratios[f"payload_vs_{name}"] = ratio(middle(runs[GPUSUP]), middle(of_it))
    result.goals = {"payload_vs_mosec": (">=", 1.2), "gpusup_errors": ("<=", 0)}
    result.notes = [
        f"{PAYLOAD_MIB} MiB, 16 connections, server on core 0, wrk on core 1",
        *setting.best_settings(),
    ]
    return result


def in_process(width: int, seconds: float) -> dict[int, float]:
    """Batch size -> images per second of the bare net on core 0, one thread, no server."""
    program = Path(__file__).parent / "apps" / "in_process.py"
    env = os.environ | {"BENCH_MODE": "conv", "BENCH_WIDTH": str(width), "OMP_NUM_THREADS": "1"}
    command = ["taskset", "-c", "0", sys.executable, str(program), str(seconds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchProblem(f"the in-process run failed: {done.stderr[-400:]}")
    return {int(rows): rate for rows, rate in json.loads(done.stdout).items()}


def conv(setting: Setting) -> Result:
    """A small residual net with batching, against the same net in a bare loop.

    The bare loop is measured before and after the servers. Everybody batches up to the size that
    is best there.
    """
    result = Result("conv", ("server", "images/s", *_columns("")[2:], "of in-process"))
    seconds = setting.seconds(1)
    before = in_process(16, seconds)
    rows = max(before, key=before.__getitem__)
    job = Job(mode="conv", body=CONV, rows=rows, width=16, model={"wait": "5ms"})
    # A client that waits for its answer can't fill the next batch: with as many clients as rows
    # everybody's batches would stay half empty, and with them the comparison with a full one.
    clients = max(32, 2 * rows)
    runs = interleaved(setting, job, clients, setting.seconds(4), setting.rounds(3), Server.split)
    after = in_process(16, seconds)
    best = statistics.mean((before[rows], after[rows]))
    for name, of_it in runs.items():
        result.rows.append((*_row(name, of_it), f"{middle(of_it) / best:.2f}"))
        result.figures[f"{name}_per_s"] = middle(of_it)
        result.figures[f"{name}_errors"] = sum(run.errors for run in of_it)
        key = "conv_vs_inprocess" if name == GPUSUP else f"{name}_vs_inprocess"
        result.ratios[key] = middle(of_it) / best
    result.figures |= {"in_process_per_s": best, "in_process_rows": rows}
    result.figures["in_process_by_rows"] = {str(k): v for k, v in before.items()}
    result.goals = {"conv_vs_inprocess": (">=", 0.95), "gpusup_errors": ("<=", 0)}
    result.notes = [
        f"{clients} connections, batches of up to {rows} (best in process), worker alone on "
        "core 0, front end and wrk on core 1",
        *setting.best_settings(),
    ]
    return result

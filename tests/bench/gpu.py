"""gpu-images and gpu-latency: ResNet-50 and ViT-B/16 on a real GPU, beside the bare device."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from contest import GPUSUP, Job, Setting, server_for
from load import Run, middle, ratio
from peers import APPS, BenchProblem
from result import Result, spread
from server import Server

sys.path.insert(0, str(APPS))
import work

HANDLERS = Path(__file__).parents[1] / "gpu" / "handlers.py"
IMAGE = bytes(range(256)) * (3 * 224 * 224 // 256)
NETS = {"resnet50": "ResNet50", "vit_b_16": "ViT"}
CLIENTS = 256
ROWS = 64
FRONTS = 6


def device_alone(net: str, quick: bool) -> dict[str, Any]:
    """{"images_per_s": {rows: rate}, "latency_ms": {...}} of the net as a CUDA graph, no server."""
    command = [sys.executable, str(APPS / "device_alone.py"), net, "0.5" if quick else "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise BenchProblem(f"the device alone failed: {done.stderr[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def gpu_job(net: str, rows: int) -> Job:
    sizes = [3, 224, 224]
    return Job(
        mode=net,
        body=IMAGE,
        rows=rows,
        fronts=FRONTS,
        handler=f"{HANDLERS}:{NETS[net]}",
        model={
            "buckets": [sizes],
            "wait": "2ms",
            "dtype": "fp16",
            "weights": work.weights_file(net),
        },
        # It takes seconds to import, and is not what is measured.
        tables={"supervision": {"preload": ["torchvision"]}},
    )


def busy_share(server: Server, before: float, began: float) -> float:
    return (busy_s(server) - before) / (time.perf_counter() - began)


def busy_s(server: Server) -> float:
    """Seconds that gpusup's workers have computed, by its own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    lines = [x for x in text.splitlines() if x.startswith("gpusup_worker_busy_seconds_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def serve(
    name: str, job: Job, setting: Setting, connections: int, runs: list[Run], busy: list[float]
) -> None:
    """One start of one server: warm up, then one run; gpusup's busy share goes to `busy`."""
    threads = min(6, max(1, (os.cpu_count() or 2) // 3))
    with server_for(name, job, setting) as server:
        setting.wrk.run(server, connections, setting.seconds(2), threads)
        before = busy_s(server) if name == GPUSUP else 0.0
        began = time.perf_counter()
        # With many clients a slow server needs seconds for its first round of answers.
        seconds = 6.0 if connections > 1 else setting.seconds(6)
        runs.append(setting.wrk.run(server, connections, seconds, threads))
        if name == GPUSUP:
            busy.append(busy_share(server, before, began))
        setting.say(f"{name} {job.mode} x{connections}: {runs[-1]}, start {server.start_s:.1f} s")


def compare(setting: Setting, result: Result, net: str, connections: int) -> dict[str, list[Run]]:
    """Rounds of every server in turn; a row for each."""
    runs: dict[str, list[Run]] = {name: [] for name in setting.names()}
    busy: list[float] = []
    job = gpu_job(net, ROWS)
    for _ in range(setting.rounds(2)):
        for name in list(runs):
            try:
                serve(name, job, setting, connections, runs[name], busy)
            except BenchProblem as problem:
                setting.say(f"{name}: {problem}")
                if name == GPUSUP:
                    raise
                del runs[name]
    for name, of_it in runs.items():
        result.rows.append(
            (f"{name} {net}", str(connections), spread([run.per_s for run in of_it]),
             spread([run.p50_ms for run in of_it], 2), spread([run.p99_ms for run in of_it], 2),
             str(sum(run.errors for run in of_it)))
        )  # fmt: skip
    result.figures[f"{net}_errors"] = sum(run.errors for run in runs[GPUSUP])
    result.figures[f"{net}_device_busy"] = statistics.median(busy)
    return runs


def no_errors(setting: Setting) -> dict[str, tuple[str, float]]:
    """The goal that every request to gpusup had its answer, for each net."""
    return {f"{net}_errors": ("<=", 0) for net in setting.nets or NETS}


COLUMNS = ("server", "clients", "images/s", "p50 ms", "p99 ms", "errors")


def images(setting: Setting) -> Result:
    """Throughput at 256 clients against the device at its best batch."""
    result = Result("gpu-images", COLUMNS)
    for net in setting.nets or NETS:
        alone = device_alone(net, setting.quick or setting.most_rounds == 1)["images_per_s"]
        best = max(alone, key=alone.__getitem__)
        result.rows.append((f"device alone {net}", "-", f"{alone[best]:.0f}", "-", "-", "-"))
        result.figures[f"{net}_device_by_rows"] = alone
        result.figures[f"{net}_device_images_per_s"] = alone[best]
        result.figures[f"{net}_device_rows"] = int(best)
        runs = compare(setting, result, net, CLIENTS)
        rates = {name: middle(of_it) for name, of_it in runs.items()}
        for name, rate in rates.items():
            result.figures[f"{net}_{name}_images_per_s"] = rate
            key = f"{net}_vs_device" if name == GPUSUP else f"{net}_vs_{name}"
            result.ratios[key] = ratio(rates[GPUSUP], alone[best] if name == GPUSUP else rate)
        result.ratios[f"{net}_vs_device_same_rows"] = rates[GPUSUP] / alone[str(ROWS)]
    result.goals = {
        "resnet50_gpusup_images_per_s": (">=", 15000),
        "vit_b_16_vs_device": (">=", 0.97),
        "resnet50_device_busy": (">=", 0.95),
        **no_errors(setting),
    }
    result.notes = [
        f"fp16, random weights, raw bodies of {len(IMAGE)} bytes, {FRONTS} front ends, "
        f"batches of up to {ROWS}; device alone: CUDA graph, nothing copied",
        *setting.best_settings(),
    ]
    return result


def latency(setting: Setting) -> Result:
    """p50 of one client at a time."""
    result = Result("gpu-latency", COLUMNS)
    for net in setting.nets or NETS:
        alone = device_alone(net, setting.quick or setting.most_rounds == 1)["latency_ms"]
        result.rows.append((f"device alone {net}", "-", "-", f"{alone['graph']:.2f}", "-", "-"))
        result.figures[f"{net}_graph_ms"] = alone["graph"]
        result.figures[f"{net}_eager_ms"] = alone["eager"]
        for name, of_it in compare(setting, result, net, 1).items():
            key = "" if name == GPUSUP else f"{name}_"
            result.figures[f"{net}_{key}p50_ms"] = statistics.median(r.p50_ms for r in of_it)
    result.goals = {"resnet50_p50_ms": ("<=", 1.6), **no_errors(setting)}
    result.notes = [
        f"one client, raw bodies of {len(IMAGE)} bytes; device alone: one row, without copies",
        *setting.best_settings(),
    ]
    return result

"""Where the time of a loaded service goes: batches, the device, each process, each thread.

    python tests/gpu/profile_load.py [--wrk DIR] [--nets resnet50,vit_b_16] [--proxies 6]
        [--clients 256,1] [--rows 64] [--seconds 8] [--stacks DIR] [--cpu]

Prints one JSON object for each net and number of clients. With --stacks, `py-spy` samples the
worker and one proxy in a second run (it costs a little): DIR gets the folded stacks, one file each,
and the JSON the functions that most of the samples end in.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import rig
import work
from service import Service

NETS = {"resnet50": "ResNet50", "vit_b_16": "ViT"}
SMI = "clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,clocks_event_reasons.active"
TOP = 12


def config(net: str, cpu: bool, proxies: int, rows: int) -> str:
    model = rig.resnet(
        cpu, handler=f"{rig.HERE}/handlers.py:{NETS[net]}", weights=work.weights_file(net),
        max_rows=rows, wait="2ms", dtype="model" if cpu else "fp16",
    )  # fmt: skip
    return f"[server]\nproxies = {proxies}\n{rig.PRELOAD}{rig.devices(cpu)}{model}"


def totals(service: Service) -> dict[str, float]:
    """Sums over all labels of what the workers count."""
    names = {
        "gpusup_worker_busy_seconds_total": "busy_s",
        "gpusup_batch_rows_sum": "rows",
        "gpusup_batch_rows_count": "batches",
        "gpusup_compute_seconds_sum": "compute_s",
        "gpusup_batch_wait_seconds_sum": "wait_s",
        "gpusup_queue_seconds_sum": "queue_s",
        "gpusup_request_seconds_sum": "request_s",
        "gpusup_request_seconds_count": "requests",
    }
    found = dict.fromkeys(names.values(), 0.0)
    for line in service.get("/metrics").body.decode().splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in names:
            found[names[name]] += float(line.rsplit(" ", 1)[1])
    return found


def loaded(
    service: Service, wrk: rig.Wrk, given: argparse.Namespace, clients: int
) -> dict[str, Any]:
    """One run, after one of two seconds that is not looked at. Shares of cores, seconds in ms."""
    url = f"http://127.0.0.1:{service.port}/predictions/resnet"
    wrk.run(url, clients, 2)
    before, began = totals(service), time.monotonic()
    shares = rig.CpuShares(service)
    smi: list[list[str]] = []
    with rig.looking(lambda: smi.extend(device(given.cpu)), given.seconds / 4):
        run = wrk.run(url, clients, given.seconds)
    cores = shares.stop()
    took = time.monotonic() - began
    grew = {name: value - before[name] for name, value in totals(service).items()}
    batches, requests = grew["batches"] or 1, grew["requests"] or 1
    return {
        **run,
        "busy": round(grew["busy_s"] / took, 3),
        "rows_per_batch": round(grew["rows"] / batches, 1),
        **{
            f"{name}_ms": round(grew[f"{name}_s"] / requests * 1e3, 2)
            for name in ("compute", "wait", "queue", "request")
        },
        "cores": cores,
        "device": smi,
    }


def device(cpu: bool) -> list[list[str]]:
    return [] if cpu else rig.nvidia_smi("gpu", SMI)


def sampled(
    service: Service, wrk: rig.Wrk, given: argparse.Namespace, net: str, clients: int
) -> dict[str, Any]:
    """Raises FileNotFoundError without py-spy in PATH."""
    spy = shutil.which("py-spy")
    if spy is None:
        raise FileNotFoundError("cannot find py-spy in PATH")
    worker = next(iter(service.pids().values()))
    proxy = proxies_of(service)[0]
    seconds = max(2, round(given.seconds) - 2)
    url = f"http://127.0.0.1:{service.port}/predictions/resnet"
    spies: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}
    for name, pid, more in (
        ("worker", worker, ["--threads"]),
        ("worker-gil", worker, ["--threads", "--gil"]),
        ("proxy", proxy, ["--threads"]),
    ):
        path = given.stacks / f"{net}-{clients}-{name}.folded"
        argv = [spy, "record", "-p", str(pid), "-d", str(seconds), "-r", "200", "-f", "raw",
                "--nonblocking", "-o", str(path), *more]  # fmt: skip
        spies[name] = (
            path,
            subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE),
        )
    found: dict[str, Any] = {"load": wrk.run(url, clients, given.seconds)}
    for name, (path, spying) in spies.items():
        _, said = spying.communicate(timeout=60)
        found[name] = top(path) if path.exists() else said.decode(errors="replace")[-400:]
    return found


def proxies_of(service: Service) -> list[int]:
    assert service.process
    family = psutil.Process(service.process.pid).children(recursive=True)
    return [p.pid for p in family if " ".join(p.cmdline()).startswith("gpusup: proxy")]


def top(path: Path) -> dict[str, float]:
    """Share of the samples by thread and innermost function."""
    counts: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        thread = next((f for f in frames if f.startswith("thread")), "")
        counts[f"{thread} {frames[-1]}"] += int(count)
    total = counts.total() or 1
    return {name[-90:]: round(count / total, 3) for name, count in counts.most_common(TOP)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrk", default="")
    parser.add_argument("--nets", default="resnet50,vit_b_16")
    parser.add_argument("--proxies", type=int, default=6)
    parser.add_argument("--clients", default="256,1")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--stacks", type=Path, metavar="DIR")
    parser.add_argument("--cpu", action="store_true", help="try the script out on a CPU slot")
    given = parser.parse_args()
    wrk = rig.Wrk(given.wrk)
    if given.stacks:
        given.stacks.mkdir(parents=True, exist_ok=True)
    for net in given.nets.split(","):
        text = config(net, given.cpu, given.proxies, 4 if given.cpu else given.rows)
        with rig.started(text, limit_s=120) as service:
            for clients in map(int, given.clients.split(",")):
                found: dict[str, Any] = {"net": net, "rows": given.rows, "clients": clients}
                look = partial(loaded, service, wrk, given, clients)
                rig.attempt(found, "run", look, service.log)
                if given.stacks:
                    look = partial(sampled, service, wrk, given, net, clients)
                    rig.attempt(found, "stacks", look, service.log)
                print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

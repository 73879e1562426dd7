"""Images of mixed sizes on a GPU with little memory: gpusup, then a server without limits.

    python tests/gpu/vram_mix.py [--seconds 60] [--naive-seconds N] [--clients 10,50,200] [--cpu]

A ballast process leaves 24 GiB free. ResNet-50 and ViT-B/16 behind one handler get raw images of
256, 512, 1024 and 2048 pixels (0.4, 0.3, 0.2, 0.1). Right is: no worker dies, every request has an
answer (429 and 503 with Retry-After are answers), and the use stays within the budget.
Prints a table on standard error and one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import rig
import work
from mixed_clients import ask
from service import Service, free_port

from gpusup.supervisor.certify_math import percentile

HERE = Path(__file__).resolve().parent
BUDGET_GIB = 24.0
GIB = 2**30
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
ANSWERED = {"200", "429", "503"}


def config(cpu: bool, sizes: list[int]) -> str:
    buckets = [[3, size, size] for size in sizes]
    memory = "" if cpu else f'[devices.memory]\ngpu0 = "{BUDGET_GIB:g}GiB"\n'
    where = rig.devices(cpu, ["gpu0"])
    return f"""[server]
proxies = {1 if cpu else 4}
{rig.PRELOAD}{where}{memory}
[models.mixed]
handler = "{HERE}/handlers.py:Mixed"
weights = "{work.WEIGHTS}"
buckets = {json.dumps(buckets)}
max_rows = {4 if cpu else 16}
decode_threads = {2 if cpu else 4}
workers = 1
"""


@contextlib.contextmanager
def ballast(*words: str, env: dict[str, str] | None = None) -> Iterator[dict[str, int]]:
    """A process that holds device memory; what it took. See ballast.py."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "ballast.py"), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})},
    ) as process:  # fmt: skip
        try:
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the ballast process ended")
            yield json.loads(line)
        finally:
            process.kill()


class Peak:
    """The most device memory in use by anybody at any look, by NVML. 0 on a CPU."""

    def __init__(self, cpu: bool) -> None:
        self.used = 0
        self._cpu = cpu

    def look(self) -> None:
        self.used = max(self.used, nvml_used(self._cpu))

    def gib(self, base: int) -> float | None:
        """Above `base`; None where nothing was seen."""
        return round(max(0, self.used - base) / GIB, 2) if self.used else None


_nvml: list[Any] = []


def nvml_used(cpu: bool) -> int:
    """Bytes of the first device in use by anybody; 0 on a CPU. Raises if NVML can't tell."""
    if cpu:
        return 0
    import pynvml

    if not _nvml:
        pynvml.nvmlInit()
        _nvml.append(pynvml.nvmlDeviceGetHandleByIndex(0))
    memory = pynvml.nvmlDeviceGetMemoryInfo(_nvml[0])
    return int(memory.total - memory.free)


class Watch:
    """Bands and use as gpusup sees them at each look."""

    def __init__(self, service: Service) -> None:
        self.bands: Counter[str] = Counter()
        self.used = 0
        self.total = 0
        self._service = service

    def look(self) -> None:
        if status := self._service.try_status():
            device = status["devices"][0]
            self.bands[device["band"]] += 1
            self.total = device["total"]
            self.used = max(self.used, device["total"] - device["free"])


def load(url: str, clients: int, seconds: float, sizes: list[int]) -> dict[str, Any]:
    """Clients in several processes for so long; their figures together."""
    processes = max(1, min(8, clients // 5, (os.cpu_count() or 2) // 2))
    shares = [clients // processes + (n < clients % processes) for n in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "mixed_clients.py"), url, "--clients", str(share),
             "--seconds", f"{seconds:g}", "--sizes", ",".join(map(str, sizes)),
             "--weights", ",".join(map(str, WEIGHTS)), "--seed", str(number)],
            stdout=subprocess.PIPE, text=True,
        )
        for number, share in enumerate(shares)
    ]  # fmt: skip
    counts: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    times: dict[str, list[float]] = {}
    lost: list[str] = []
    without = 0
    for process in running:
        try:
            said, _ = process.communicate(timeout=seconds + 120)
        except subprocess.TimeoutExpired:
            process.kill()
            said = ""
        if not said:
            lost.append("a process of clients did not end")
            continue
        found = json.loads(said)
        counts.update(found["counts"])
        texts.update(found["texts"])
        without += found["no_retry_after"]
        lost += found["lost"]
        for size, some in found["times"].items():
            times.setdefault(size, []).extend(some)
    every = [t for some in times.values() for t in some]
    return {
        "clients": clients,
        "counts": dict(counts),
        "not_answered": sum(n for status, n in counts.items() if status not in ANSWERED) + without,
        "lost": lost[:4],
        "images_per_s": round(len(every) / seconds, 1),
        "p50_s": at(every, 0.5),
        "p99_s": at(every, 0.99),
        "p99_s_by_size": {size: at(some, 0.99) for size, some in sorted(times.items())},
        "texts": dict(texts.most_common(3)),
    }


def at(times: list[float], share: float) -> float | None:
    return round(percentile(times, share), 3) if times else None


def with_gpusup(
    found: dict[str, Any],
    cpu: bool,
    sizes: list[int],
    clients: list[int],
    seconds: float,
    base: int,
) -> dict[str, Any]:
    found["runs"] = []
    began = time.monotonic()
    with rig.started(config(cpu, sizes), limit_s=150) as service:
        found["start_s"] = round(time.monotonic() - began, 1)
        slot = service.status()["slots"][0]
        found["slot"] = {k: slot[k] for k in ("seconds", "memory")}
        found["graphs"] = dict(Counter(slot["graphs"].values()))
        url = f"http://127.0.0.1:{service.port}/predictions/mixed"
        for count in clients:
            before = service.pids()
            run: dict[str, Any] = {"clients": count}
            watch, peak = Watch(service), Peak(cpu)
            with rig.looking(watch.look, 0.2), rig.looking(peak.look, 0.02):
                work_it = partial(load, url, count, seconds, sizes)
                rig.attempt(run, "load", work_it, service.log)
            after = service.status()["slots"]
            run = {
                **run["load"],
                "same_pids": service.pids() == before,
                "restarts": sum(s["restarts"] for s in after),
                "ooms_contained": sum(ooms(service).values()),
                "bands": dict(watch.bands),
                "used_by_status_gib": round(watch.used / GIB, 2),
                "budget_gib": round(watch.total / GIB, 2),
                "peak_gib": peak.gib(base),
            }  # fmt: skip
            found["runs"].append(run)
            say(f"gpusup, {count} clients: {run}")
        found["log"] = "" if healthy(found, cpu) else service.log()[-rig.LOG_TAIL :]
    found["right"] = healthy(found, cpu)
    return found


def ooms(service: Service) -> dict[str, float]:
    found: dict[str, float] = rig.metric(service, "gpusup_worker_ooms_total", "slot")
    return found


def healthy(found: dict[str, Any], cpu: bool) -> bool:
    """A run on a GPU whose use nobody saw is not."""
    most = 0.0 if cpu else float("inf")
    return all(
        run.get("same_pids")
        and not run.get("restarts")
        and run.get("not_answered") == 0
        and not run.get("lost")
        and (most if run.get("peak_gib") is None else run["peak_gib"]) <= BUDGET_GIB
        for run in found["runs"]
    )


def naive(
    found: dict[str, Any],
    cpu: bool,
    sizes: list[int],
    clients: list[int],
    seconds: float,
    base: int,
    dtype: str,
) -> dict[str, Any]:
    """The same load on a server without limits; stops after the first count that breaks it."""
    found |= {"dtype": dtype, "runs": [], "fails_at": None}
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "naive_mixed.py"), "--port", str(port), "--dtype", dtype,
             "--weights", work.WEIGHTS, *(["--cpu"] if cpu else [])],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}/predict"
            found["server"] = (
                "fastapi" if importlib.util.find_spec("fastapi") else "aiohttp in its place"
            )
            if not until_it_answers(url, process, 90):
                log.seek(0)
                raise RuntimeError(f"the naive server did not start: {log.read()[-1500:]!r}")
            for count in clients:
                peak = Peak(cpu)
                with rig.looking(peak.look, 0.02):
                    run = load(url, count, seconds, sizes)
                run["alive"] = process.poll() is None
                run["peak_gib"] = peak.gib(base)
                found["runs"].append(run)
                say(f"naive {dtype}, {count} clients: {run}")
                if run["not_answered"]:
                    found["fails_at"] = count
                    break
        finally:
            process.kill()
            process.wait(10)
    return found


def until_it_answers(url: str, process: subprocess.Popen[bytes], limit_s: float) -> bool:
    port = int(url.split(":")[2].split("/")[0])
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            if ask(connection, "/predict", bytes(3 * 32 * 32))[0] == 200:
                return True
        time.sleep(0.2)
    return False


def say(text: str) -> None:
    print(text[:1500], file=sys.stderr, flush=True)


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = [
        [
            "server",
            "clients",
            "200",
            "429",
            "503",
            "other",
            "images/s",
            "p50 s",
            "p99 s",
            "peak GiB",
        ]
    ]
    for name, part in result.items():
        for run in part.get("runs", []) if isinstance(part, dict) else []:
            counts = run.get("counts", {})
            rows.append([
                name, run.get("clients"), *(counts.get(s, 0) for s in ("200", "429", "503")),
                run.get("not_answered"), run.get("images_per_s"), run.get("p50_s"),
                run.get("p99_s"), run.get("peak_gib"),
            ])  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of clients")
    parser.add_argument("--naive-seconds", type=float, default=0.0, help="default: the same")
    parser.add_argument("--clients", default="", help="default 10,50,200 (with --cpu 2,4,8)")
    parser.add_argument("--skip-naive", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="try the script out on a CPU slot")
    parser.add_argument("--out", type=Path, help="write the JSON there as it grows")
    given = parser.parse_args()
    cpu = given.cpu
    sizes = [32, 64, 96, 128] if cpu else [256, 512, 1024, 2048]
    clients = [int(c) for c in (given.clients or ("2,4,8" if cpu else "10,50,200")).split(",")]
    for name in ("resnet50", "vit_b_16"):
        work.weights_file(name)
    result: dict[str, Any] = {"machine": rig.machine(), "seconds": given.seconds}

    def step(name: str, what: Callable[[dict[str, Any]], Any]) -> None:
        result[name] = {}
        rig.attempt(result, name, lambda: what(result[name]), str)
        if given.out:
            given.out.write_text(json.dumps(result))

    holding = (
        contextlib.nullcontext({"free": 0, "total": 0, "taken": 0})
        if cpu
        else ballast("--leave-gib", f"{BUDGET_GIB:g}")
    )
    with contextlib.suppress(KeyboardInterrupt), holding as held:
        result["ballast"] = held
        base = nvml_used(cpu)
        step("gpusup", lambda found: with_gpusup(found, cpu, sizes, clients, given.seconds, base))
        if not given.skip_naive:
            seconds = given.naive_seconds or given.seconds
            step("naive", lambda found: naive(found, cpu, sizes, clients, seconds, base, "fp16"))
            if result["naive"].get("fails_at") is None and "error" not in result["naive"]:
                # Within 24 GiB in half precision; in the precision that weights come in?
                last = clients[-1:]
                step(
                    "naive_fp32",
                    lambda found: naive(found, cpu, sizes, last, seconds, base, "fp32"),
                )
    print(rig.table(rows_of(result)), file=sys.stderr)
    print(json.dumps(result))
    return 0 if result.get("gpusup", {}).get("right") else 1


if __name__ == "__main__":
    raise SystemExit(main())

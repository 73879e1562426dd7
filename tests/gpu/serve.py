"""One run on a real GPU: serve, kill, drain, swap, and the three ways a CUDA worker breaks.

    python tests/gpu/serve.py [--out DIR] [--only serve,faults]

Prints one JSON object. Needs torch with CUDA, torchvision, and gpusup importable.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from service import Service, running

HERE = Path(__file__).parent
IMAGE = bytes(range(256)) * (3 * 224 * 224 // 256)

RESNET = f"""
[models.resnet]
handler = "{HERE}/handlers.py:ResNet50"
max_rows = 64
buckets = [[3, 224, 224]]
retry = "safe"
"""

BREAKABLE = f"""
[models.break]
handler = "{HERE}/faulty.py:Breakable"
budget = "2s"
workers = 2
"""


class Load:
    """Clients in closed loops; counts answers by status."""

    def __init__(self, ask: Callable[[], int], clients: int = 8) -> None:
        self.counts: dict[int, int] = {}
        self.longest = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(ask,)) for _ in range(clients)]

    def _loop(self, ask: Callable[[], int]) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                status = ask()
            except OSError:
                status = 0
            took = time.monotonic() - began
            with self._lock:
                self.counts[status] = self.counts.get(status, 0) + 1
                self.longest = max(self.longest, took)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def serve(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    began = time.monotonic()
    with running(folder, RESNET) as service:
        try:
            found["start_to_ready_s"] = round(time.monotonic() - began, 2)
            slot = service.status()["slots"][0]
            found["slot"] = {k: slot[k] for k in ("slot", "seconds", "memory", "graphs")}
            found["device"] = service.status()["devices"][0]
            times = []
            for _ in range(200):
                t = time.perf_counter()
                reply = service.predict("resnet", IMAGE)
                times.append(time.perf_counter() - t)
                assert reply.status == 200, reply.body
            found["one_client_p50_ms"] = round(statistics.median(times) * 1e3, 2)
            found["answer"] = reply.json()
            found |= recover(service)
        except BaseException:
            found["error"] = traceback.format_exc()
        found["log"] = service.log()[-3000:] if "error" in found else ""
    return found


def recover(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ask() -> int:
        return service.predict("resnet", IMAGE).status

    slot = service.status()["slots"][0]
    with Load(ask) as load:
        time.sleep(1)
        os.kill(slot["pid"], signal.SIGKILL)
        t = time.monotonic()
        service.until(
            lambda: (
                (s := service.slot(slot["slot"]))["state"] == "ready"
                and s["generation"] > slot["generation"]
            )
        )
        found["kill_to_ready_s"] = round(time.monotonic() - t, 3)
        service.until(lambda: service.predict("resnet", IMAGE).status == 200)
        found["kill_to_answer_s"] = round(time.monotonic() - t, 3)
    found["kill_counts"] = load.counts
    for how in ("surge", "in-place"):
        with Load(ask, 16) as load:
            time.sleep(1)
            t = time.monotonic()
            change = service.change("/models/resnet/reload", {"strategy": how})
            found[f"swap_{how}_s"] = round(time.monotonic() - t, 2)
        found[f"swap_{how}"] = {
            "state": change["state"], "text": change["text"], "steps": change["steps"],
            "counts": load.counts, "longest_request_s": round(load.longest, 3),
        }  # fmt: skip
    before = service.status()["devices"][0]["free"]
    t = time.monotonic()
    change = service.change(f"/slots/{slot['slot']}/drain")
    found["drain_s"] = round(time.monotonic() - t, 3)
    found["drained_free_gib"] = round((service.status()["devices"][0]["free"] - before) / 2**30, 2)
    found["device_drained"] = service.status()["devices"][0]
    service.control("POST", f"/slots/{slot['slot']}/uncordon")
    service.wait_ready()
    return found


def faults(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with running(folder, BREAKABLE) as service:

        def ask(do: str = "ok") -> Any:
            return service.predict("break", json.dumps({"do": do}).encode())

        try:
            for do in ("oom", "assert", "hang"):
                before = service.pids()
                with Load(lambda: ask().status, 4) as load:
                    time.sleep(0.5)
                    t = time.monotonic()
                    reply = ask(do)
                    took = time.monotonic() - t
                    time.sleep(1)
                    service.until(lambda: service.status()["state"] == "ready", 60)
                    healed = time.monotonic() - t
                found[do] = {
                    "status": reply.status, "body": reply.json(), "answered_s": round(took, 3),
                    "healed_s": round(healed, 3), "others": load.counts,
                    "same_pids": service.pids() == before,
                    "last_exit": [s["last_exit"] for s in service.status()["slots"]],
                }  # fmt: skip
        except BaseException:
            found["error"] = traceback.format_exc()
        found["log"] = service.log()[-6000:] if "error" in found else ""
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="serve,faults")
    args = parser.parse_args()
    result = {}
    for name in args.only.split(","):
        result[name] = {"serve": serve, "faults": faults}[name](Path(mkdtemp(prefix="gs-")))
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        (args.out / "serve.json").write_text(text)
    return int(any("error" in part for part in result.values()))


if __name__ == "__main__":
    raise SystemExit(main())

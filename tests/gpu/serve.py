"""One run on a real GPU: serve, kill, drain, swap, a standby, and three ways a CUDA worker breaks.

    python tests/gpu/serve.py [--out DIR] [--only serve,standby,faults] [--cpu]

Prints one JSON object. Right is: both swaps are done and nothing but 200s meanwhile; a worker
survives memory that runs out, and is replaced after an assert or a hang. Needs torch with CUDA,
torchvision, and gpusup importable. With --cpu the script itself is tried out on a CPU slot; the
faults are those of a GPU and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import rig
from service import Service

HERE = Path(__file__).resolve().parent
LIMIT_S = 120.0
STRATEGIES = ("surge", "in-place")

BREAKABLE = f"""
[models.break]
handler = "{HERE}/faulty.py:Breakable"
budget = "2s"
workers = 2
"""


def serve(cpu: bool, found: dict[str, Any]) -> dict[str, Any]:
    config = rig.PRELOAD + rig.devices(cpu) + rig.resnet(cpu, retry="safe")
    began = time.monotonic()
    with rig.started(config, limit_s=LIMIT_S) as service:
        found["start_to_ready_s"] = round(time.monotonic() - began, 2)
        slot = service.status()["slots"][0]
        found["slot"] = {k: slot[k] for k in ("slot", "seconds", "memory", "graphs")}
        found["device"] = service.status()["devices"][0]
        times = []
        for _ in range(20 if cpu else 200):
            t = time.perf_counter()
            reply = service.predict("resnet", rig.IMAGE)
            times.append(time.perf_counter() - t)
            assert reply.status == 200, reply.body
        found["one_client_p50_ms"] = round(statistics.median(times) * 1e3, 2)
        found["answer"] = service.predict("resnet", rig.IMAGE).json()
        recover(service, found)
    swaps = [found[f"swap_{how}"] for how in STRATEGIES]
    found["right"] = all(s["state"] == "done" and set(s["counts"]) == {"200"} for s in swaps)
    return found


def standby(cpu: bool, found: dict[str, Any]) -> dict[str, Any]:
    """The same death, with a standby ready to follow."""
    config = rig.PRELOAD + rig.devices(cpu) + rig.resnet(cpu, retry="safe", standby=True)
    with rig.started(config, limit_s=LIMIT_S) as service:
        name = service.status()["slots"][0]["slot"]
        service.until(lambda: service.slot(name)["standby"] == "ready", LIMIT_S)
        before = service.slot(name)
        found["device_with_standby"] = service.status()["devices"][0]
        kill(service, found)
        found["standby_took_over"] = service.slot(name)["pid"] == before["standby_pid"]
        found["reclaim"] = service.status()["devices"][0]["release"]
        service.until(lambda: service.slot(name)["standby"] == "ready", LIMIT_S)  # the next one
    found["right"] = found["standby_took_over"] and set(found["kill_counts"]) == {"200"}
    return found


def kill(service: Service, found: dict[str, Any]) -> None:
    """SIGKILL to the only worker under 8 clients, and how long until it is made good."""
    slot = service.status()["slots"][0]
    with rig.Load(service, clients=8) as load:
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
        service.until(lambda: service.predict("resnet", rig.IMAGE).status == 200)
        found["kill_to_answer_s"] = round(time.monotonic() - t, 3)
        found["phases_after_kill_s"] = service.slot(slot["slot"])["seconds"]
        found["graphs_after_kill"] = service.slot(slot["slot"])["graphs"]
    found["kill_counts"] = load.counts()
    found["kill_longest_request_s"] = load.longest_s()


def recover(service: Service, found: dict[str, Any]) -> None:
    slot = service.status()["slots"][0]
    kill(service, found)
    for how in STRATEGIES:
        with rig.Load(service, clients=16) as load:
            time.sleep(1)
            t = time.monotonic()
            change = service.change("/models/resnet/reload", {"strategy": how})
            found[f"swap_{how}_s"] = round(time.monotonic() - t, 2)
        found[f"swap_{how}"] = {
            "state": change["state"], "text": change["text"], "steps": change["steps"],
            "counts": load.counts(), "longest_request_s": load.longest_s(),
        }  # fmt: skip
    before = service.status()["devices"][0]["free"]
    t = time.monotonic()
    change = service.change(f"/slots/{slot['slot']}/drain")
    found["drain_s"] = round(time.monotonic() - t, 3)
    found["drained_free_gib"] = round((service.status()["devices"][0]["free"] - before) / 2**30, 2)
    found["device_drained"] = service.status()["devices"][0]
    service.control("POST", f"/slots/{slot['slot']}/uncordon")
    service.wait_ready()


def faults(cpu: bool, found: dict[str, Any]) -> dict[str, Any]:
    if cpu:
        return {"skipped": "needs a GPU"}
    with rig.started(BREAKABLE, limit_s=LIMIT_S) as service:
        for do in ("oom", "assert", "hang"):
            before = service.pids()
            with rig.Load(service, "break", 4, body=b'{"do": "ok"}') as load:
                time.sleep(0.5)
                t = time.monotonic()
                reply = service.predict("break", json.dumps({"do": do}).encode())
                took = time.monotonic() - t
                time.sleep(1)
                service.until(lambda: service.status()["state"] == "ready", 60)
                healed = time.monotonic() - t
            found[do] = {
                "status": reply.status, "body": reply.json(), "answered_s": round(took, 3),
                "healed_s": round(healed, 3), "others": load.counts(),
                "same_pids": service.pids() == before,
                "last_exit": [s["last_exit"] for s in service.status()["slots"]],
            }  # fmt: skip
    # Only memory that runs out is survived by the worker that asked for it.
    found["right"] = all(found[do]["same_pids"] == (do == "oom") for do in found)
    return found


PARTS = {"serve": serve, "standby": standby, "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="serve,standby,faults")
    parser.add_argument("--cpu", action="store_true", help="try the script out on a CPU slot")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    wanted = args.only.split(",")
    with contextlib.suppress(KeyboardInterrupt):
        for name in wanted:
            result[name] = {}
            rig.attempt(result, name, partial(PARTS[name], args.cpu, result[name]), str)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        (args.out / "serve.json").write_text(text)
    parts = [result.get(name, {}) for name in wanted]
    return 0 if all(part.get("right") or part.get("skipped") for part in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())

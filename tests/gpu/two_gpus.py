"""gpusup on two real GPUs: pinning, balance, drain, swaps, a kill, a lost GPU, a hidden GPU.

    python tests/gpu/two_gpus.py [--wrk DIR] [--proxies 8] [--seconds 8] [--only pinned,...] [--cpu]

Batches are bounded at 32 rows, which half of 256 clients still fill: then two GPUs against one tell
of balance and proxies alone. The point `wide` measures the same with 64 rows.

Some four minutes. Prints a table on standard error and one JSON object; each point that fails says
why, and the others go on. With --cpu the script itself is tried out on two CPU slots.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rig
import work
from two_points import RUNS, Box, balance, drain, foreign, hidden, kill, lost, pinned, swap, write


def config(given: argparse.Namespace, use: list[str], rows: int = 0) -> str:
    # No request runs twice: a death shows what it costs.
    model = rig.resnet(given.cpu, retry="never", max_rows=rows or given.rows)
    where = rig.devices(given.cpu, use)
    return f"[server]\nproxies = {given.proxies}\n{rig.PRELOAD}{where}{model}"


def one_gpu(given: argparse.Namespace, wrk: rig.Wrk, rows: int = 0) -> dict[str, Any]:
    """One GPU's rates with all clients, and with half of them."""
    with rig.started(config(given, ["gpu0"], rows)) as service:
        url = f"http://127.0.0.1:{service.port}/predictions/resnet"
        wrk.run(url, given.clients, 2)
        clients = (given.clients, given.clients // 2)
        return {
            name: wrk.run(url, count, given.seconds)
            for name, count in zip(RUNS, clients, strict=True)
        }


def wide(given: argparse.Namespace, wrk: rig.Wrk) -> dict[str, Any]:
    """As `balance` with batches of twice the rows: one GPU fills them, two with as many clients
    do not, so that the ratio is not judged."""
    rows = 2 * given.rows
    one = one_gpu(given, wrk, rows)
    with rig.started(config(given, ["gpu0", "gpu1"], rows)) as service:
        found: dict[str, Any] = balance(Box(service, given, wrk), one, goal=0.0)
        return {"rows": rows} | found


POINTS = ("pinned", "balance", "foreign", "drain", "swap", "kill", "lost", "hidden", "wide")
#: Seconds after which a point is broken off.
LIMITS = {"swap": 150.0, "foreign": 90.0, "wide": 120.0}


def summary(result: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = [["point", "right", "took s", "what"]]
    for name in ("one_gpu", *POINTS):
        point = result.get(name)
        if not point:
            continue
        rates = {k: point[k]["images_per_s"] for k in (*RUNS, "both", "both_full") if k in point}
        keys = ("error", "skipped", "ratio", "ratio_half", "ratio_full", "failed",
                "kill_to_answer_s", "ready_again_s", "out_of_rotation_s", "back_s",
                "used_mib")  # fmt: skip
        words = [f"{k}={v}" for k, v in rates.items()]
        words += [f"{k}={point[k]}" for k in keys if k in point]
        rows.append([name, point.get("right", "-"), point.get("took_s"), "; ".join(words)[:160]])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrk", default="", help="folder filled by tests/bench/carry_wrk.sh")
    parser.add_argument("--proxies", type=int, default=8)
    parser.add_argument("--clients", type=int, default=256, help="of wrk")
    parser.add_argument("--rows", type=int, default=0, help="a batch's bound (default: 32, CPU: 2)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measured rate")
    parser.add_argument("--only", default=",".join(POINTS))
    parser.add_argument("--limit", type=float, default=420.0, help="no point begins after that")
    parser.add_argument("--cpu", action="store_true", help="try the script out on CPU slots")
    parser.add_argument("--out", type=Path, help="write the JSON there as it grows")
    given = parser.parse_args()
    given.rows = given.rows or (2 if given.cpu else 32)
    began = time.monotonic()
    wanted = given.only.split(",")
    wrk = rig.Wrk(given.wrk)
    work.weights_file("resnet50")
    machine = rig.machine()
    result: dict[str, Any] = {"machine": machine, "proxies": given.proxies, "rows": given.rows}
    log: list[Callable[[], str]] = [str]

    def point(name: str, step: Callable[[], Any]) -> None:
        if name not in (*wanted, "one_gpu", "both_gpus") or time.monotonic() - began > given.limit:
            return
        print(f"{time.monotonic() - began:6.1f} s: {name}", file=sys.stderr, flush=True)
        rig.attempt(result, name, step, lambda: log[0](), LIMITS.get(name, 60.0))
        if given.out:
            given.out.write_text(json.dumps(result))

    idle = {} if given.cpu else rig.gpus()
    if "balance" in wanted:
        point("one_gpu", lambda: one_gpu(given, wrk))
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        overrides = Path(folder) / "overrides.json"
        write(overrides, {})
        env = {"GPUSUP_PROBE_OVERRIDES": str(overrides)}

        def both() -> None:
            with rig.started(config(given, ["gpu0", "gpu1"]), env=env) as service:
                signal.setitimer(signal.ITIMER_REAL, 0)  # each point has a limit of its own
                log[0] = service.log
                box = Box(service, given, wrk)
                steps: dict[str, Callable[[], Any]] = {
                    "pinned": lambda: pinned(box),
                    "balance": lambda: balance(box, result.get("one_gpu", {})),
                    "foreign": lambda: foreign(box),
                    "drain": lambda: drain(box, idle),
                    "swap": lambda: swap(box),
                    "kill": lambda: kill(box),
                    "lost": lambda: lost(box, overrides),
                }
                for name, step in steps.items():
                    point(name, step)
                    rig.attempt(result, "recovered", box.all_well, service.log, 60)
                    if result["recovered"]:
                        result.setdefault("not_recovered", {})[name] = result["recovered"]
                result.pop("recovered", None)

        if set(wanted) - {"hidden", "wide"}:
            rig.attempt(result, "both_gpus", both, str, 120)
    if not result.get("both_gpus"):
        result.pop("both_gpus", None)
    point("hidden", lambda: hidden(given.cpu, list(idle)))
    point("wide", lambda: wide(given, wrk))
    result["took_s"] = round(time.monotonic() - began, 1)
    print(rig.table(summary(result)), file=sys.stderr)
    text = json.dumps(result)
    if given.out:
        given.out.write_text(text)
    print(text)
    points = [result.get(name, {}) for name in wanted]
    right = all(p.get("right") or p.get("skipped") for p in points)
    return 0 if right and not {"both_gpus", "not_recovered"} & result.keys() else 1


if __name__ == "__main__":
    raise SystemExit(main())

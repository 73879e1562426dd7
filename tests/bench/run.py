"""Measures gpusup and its peers side by side: `run.py NAME [--json] [--quick] [--peers a,b]`.

Everything happens on loopback, in bounded runs, with the same generator, body and model for all.
Exit code 0: measured (whatever the numbers say), 1: something needed is missing, 2: usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gpu
import recovery
import swap
import throughput
from contest import Setting
from load import Wrk
from peers import PEERS, USUAL, BenchProblem, chosen
from result import Result
from server import give_priority

BENCHES: dict[str, Callable[[Setting], Result]] = {
    "frontdoor": throughput.frontdoor,
    "payload": throughput.payload,
    "conv": throughput.conv,
    "recovery": recovery.recovery,
    "swap": swap.swap,
    "gpu-images": gpu.images,
    "gpu-latency": gpu.latency,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one short round: a smoke test")
    parser.add_argument("--rounds", type=int, default=99, help="at most so many")
    parser.add_argument("--nets", default="", help="gpu-*: resnet50,vit_b_16 (default: both)")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}; default {','.join(USUAL)}")
    parser.add_argument("--cache", default="~/.cache/gpusup-bench", help="for the peers' venvs")
    parser.add_argument("--wrk", default="", metavar="DIR", help="filled by carry_wrk.sh")
    parser.add_argument("--gpu", action="store_true", help="recovery and swap on the GPUs")
    parser.add_argument(
        "--standby", action="store_true", help="recovery: gpusup has its standbys ready"
    )
    parser.add_argument("--weights-mib", type=int, default=0, help="swap: size of the weights")
    parser.add_argument("--nice", type=int, default=0, help="of all that runs; below 0 as root")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and configurations there")
    told = parser.parse_args()
    on_gpu = told.name.startswith("gpu-")
    # swap has no peers, and peers on a GPU machine must be there already.
    usual = "naive" if on_gpu else "" if told.name == "swap" else ",".join(USUAL)
    with tempfile.TemporaryDirectory(prefix="gpusup-bench-") as temporary:
        folder = Path(told.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            give_priority(os.getpid(), told.nice)
            setting = Setting(
                folder=folder,
                cache=Path(told.cache).expanduser(),
                wrk=Wrk.find(told.wrk, core="" if on_gpu else "1"),
                peers=tuple(chosen(usual if told.peers is None else told.peers)),
                quick=told.quick,
                gpu=told.gpu or on_gpu,
                nice=told.nice,
                weights_bytes=(told.weights_mib or (5120 if told.gpu else 64)) << 20,
                most_rounds=max(1, told.rounds),
                standby=told.standby,
                nets=tuple(filter(None, told.nets.split(","))),
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
            if not on_gpu and len(os.sched_getaffinity(0)) < 2:
                raise BenchProblem("two cores are needed: one for the server, one for the load")
            result = BENCHES[told.name](setting)
        except (BenchProblem, PermissionError) as problem:
            print(f"cannot measure {told.name}: {problem}", file=sys.stderr)
            return 1
    print(result.to_json() if told.json else result.to_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A foreign process on a GPU: takes memory, and computes if told to.

    python ballast.py --leave-gib 24            all but 24 GiB
    python ballast.py --take-share 0.5 --busy 0.5    half of the memory and of the time

CUDA_VISIBLE_DEVICES says which GPU. Prints {"taken", "free", "total"} in bytes once it has them,
and holds them until its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import torch


def compute(share: float, stop: threading.Event) -> None:
    """Keep the device busy for this share of the time, in slices of 20 ms."""
    a = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    while not stop.is_set():
        began = time.perf_counter()
        while time.perf_counter() - began < 0.02 * share:
            for _ in range(4):
                a @ a
            torch.cuda.synchronize()
        time.sleep(max(0.0, 0.02 - (time.perf_counter() - began)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leave-gib", type=float, default=0.0)
    parser.add_argument("--take-share", type=float, default=0.0, help="of all the memory")
    parser.add_argument("--busy", type=float, default=0.0, help="share of the time")
    given = parser.parse_args()
    torch.ones(1, device="cuda")  # the context takes memory too
    free, total = torch.cuda.mem_get_info()
    size = int(total * given.take_share) or free - int(given.leave_gib * 2**30)
    block = torch.empty(max(1, min(size, free)), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"taken": block.numel(), "free": free, "total": total}), flush=True)
    stop = threading.Event()
    if given.busy:
        threading.Thread(target=compute, args=(given.busy, stop), daemon=True).start()
    sys.stdin.read()
    stop.set()
    time.sleep(0.1)


if __name__ == "__main__":
    main()

"""The bare device: the net as a CUDA graph, by batch size. argv: net, seconds for each size.

Prints {"images_per_s": {rows: rate}, "latency_ms": {"graph": ms, "eager": ms}}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import work


def rate(run: Callable[[], object], seconds: float) -> float:
    """Calls per second, with the queue of the device kept full."""
    run()
    torch.cuda.synchronize()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        done += 10
    return done / (time.perf_counter() - began)


def one_by_one_ms(run: Callable[[], object], seconds: float) -> float:
    """Median time of a call that is waited for."""
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


@torch.inference_mode()  # type: ignore[untyped-decorator]
def main() -> None:
    name, seconds = sys.argv[1], float(sys.argv[2])
    net = work.gpu_net(name)
    rates: dict[int, float] = {}
    latency: dict[str, float] = {}
    for rows in (1, 16, 32, 64, 128, 256):
        images = torch.randint(0, 255, (rows, 3, 224, 224), dtype=torch.uint8, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                work.gpu_forward(net, images)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work.gpu_forward(net, images)
        rates[rows] = rows * rate(graph.replay, seconds)
        if rows == 1:
            latency["graph"] = one_by_one_ms(graph.replay, seconds)
            latency["eager"] = one_by_one_ms(lambda i=images: work.gpu_forward(net, i), seconds)  # type: ignore[misc]
    print(json.dumps({"images_per_s": rates, "latency_ms": latency}))


main()

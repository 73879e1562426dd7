"""The pool, CUDA graphs and a registered arena in one process, for a few seconds.

    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py

Compares the answers with the eager ones. Exit 0 and "right" if all agree, at least half of those
sent at once were compared, and graphs were captured. With --cpu the script itself is tried out.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpusup.worker import wire
from gpusup.worker.entry import Entry
from gpusup.worker.handlers import from_file

SIDE = 32
MODEL = f"""
import torch
from gpusup.worker.model import Model, Tensor

class Net(Model):
    inputs = (Tensor("image", "UINT8", (3, {SIDE}, {SIDE})),)
    outputs = (Tensor("scores", "FP32", (10,)),)
    def load(self, device, version):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10),
        ).to(device).eval()
    def forward(self, batch):
        return self.net(batch.float().div(255))
"""


def images(seed: int, rows: int) -> np.ndarray[Any, Any]:
    chance = np.random.default_rng(seed)
    return chance.integers(0, 256, (rows, 3, SIDE, SIDE), dtype=np.uint8)


def part(pixels: np.ndarray[Any, Any]) -> wire.Part:
    return wire.Part("image", pixels.tobytes(), datatype="UINT8", shape=pixels.shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    began = time.monotonic()
    engines: Any = from_file(str(Path(__file__).parents[1] / "worker" / "engines.py"))
    engines.LIMIT_S = 120.0  # everything is slower under a sanitizer
    device = "cpu" if given.cpu else "cuda"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "net.py"
        model.write_text(MODEL)
        served = {
            graphs: engines.Served(f"{model}:Net", device=device, max_rows=8, graphs=graphs).start()
            for graphs in (True, False)
        }
        fast, slow = served[True], served[False]
        asked: dict[int, np.ndarray[Any, Any]] = {}
        for turn in range(3):
            for rows in (1, 2, 3, 5, 8):
                pixels = images(10 * turn + rows, rows)
                got = np.array(engines.values(fast.one(part(pixels), rows=rows)))
                want = np.array(engines.values(slow.one(part(pixels), rows=rows)))
                wrong += not np.allclose(got, want, rtol=1e-2, atol=1e-2)
        # Many at once: both slabs in use, rows of several requests in each.
        answered = len(fast.answers)
        answers: dict[int, wire.Answer] = {}
        for seed in range(42):
            (entry,) = fast.offer([part(images(seed, 1))])
            asked[entry.item.id] = images(seed, 1)
            if seed % 14 == 13:  # as many as it takes without saying "busy"
                answers = fast.wait(answered + len(asked))
        busy = 0
        for number, pixels in asked.items():
            if answers[number].status == "busy":
                busy += 1
                continue
            want = np.array(engines.values(slow.one(part(pixels))))
            wrong += not np.allclose(np.array(engines.values(answers[number])), want, atol=1e-2)
        arena = "not on a CPU" if given.cpu else in_place(engines, fast, slow)
        status = dict(fast.engine.pong(1).graphs)
        for one in served.values():
            one.stop()
    wrong += arena == "wrong"
    wrong += 2 * busy > len(asked)  # too few were compared
    wrong += not given.cpu and "captured" not in status.values()
    print(
        json.dumps(
            {
                "right": not wrong, "wrong": wrong, "busy": busy, "arena": arena,
                "graphs": status, "took_s": round(time.monotonic() - began, 1),
            }
        )
    )  # fmt: skip
    return int(bool(wrong))


def in_place(engines: Any, fast: Any, slow: Any) -> str:
    """Items in an arena that CUDA reads by itself, as those of the front door are."""
    size, page = 3 * SIDE * SIDE, 4096
    memory = mmap.mmap(-1, 64 * page)
    arena = memoryview(memory)
    fast.engine.map_arena(2, arena)
    fast.until(lambda: bool(fast.engine._loop.arenas.connections()))
    asked: dict[int, np.ndarray[Any, Any]] = {}
    answered = len(fast.answers)
    entries = []
    for n in range(8):
        pixels = images(100 + n, 1)
        arena[n * page : n * page + size] = pixels.tobytes()
        block = wire.Part("image", wire.Block(n * page, size), datatype="UINT8", shape=pixels.shape)
        entries.append(Entry(wire.Item(10_000 + n, (block,)), 2, lambda answer: None, arena))
        asked[10_000 + n] = pixels
    fast.engine.offer(entries)
    answers = fast.wait(answered + len(asked))
    right = all(
        np.allclose(
            np.array(engines.values(answers[number])),
            np.array(engines.values(slow.one(part(pixels)))),
            atol=1e-2,
        )
        for number, pixels in asked.items()
    )
    fast.engine.drop(2)
    fast.until(lambda: not fast.engine._loop.arenas.connections())
    return "right" if right else "wrong"


if __name__ == "__main__":
    sys.exit(main())

"""The engine on a real device: graphs, slabs, memory that runs out, a context that breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusup.worker import wire
from gpusup.worker.entry import Entry, LoadProblem
from gpusup.worker.handlers import from_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]

engines: Any = from_file(str(Path(__file__).parents[1] / "worker" / "engines.py"))
tensor, values = engines.tensor, engines.values

Make = Callable[..., Any]

MODELS = '''
import torch
from gpusup.worker.model import Model, Tensor

class Net(Model):
    """A small convolutional net in half precision, always with the same weights."""
    inputs = (Tensor("image", "UINT8", (3, 64, 64)),)
    outputs = (Tensor("scores", "FP32", (10,)),)
    def load(self, device, version):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, 2), torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, 2), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
        ).to(device).half().eval()
    def forward(self, batch):
        return self.net(batch.half().div(255)).float()

class Looks(Net):
    """Looks at a value on the host: no graph can do that."""
    def forward(self, batch):
        if float(batch.float().sum()) < 0:
            raise ValueError("negative")
        return super().forward(batch)

class Wide(Model):
    inputs = (Tensor("x", "FP32", (-1,)),)
    outputs = (Tensor("y", "FP32", (-1,)),)
    def forward(self, batch):
        return batch * 2

class Large(Model):
    """An output that is copied back beside the compute stream."""
    inputs = (Tensor("x", "FP32", (1024, 512)),)
    outputs = (Tensor("y", "FP32", (1024, 512)),)
    def forward(self, batch):
        return batch * 2 + 1

class Hungry(Model):
    """Takes so many GiB per row as the row says."""
    inputs = (Tensor("x", "FP32", (1,)),)
    outputs = (Tensor("y", "FP32", (1,)),)
    capturable = False
    def forward(self, batch):
        gib = float(batch.sum())
        block = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=batch.device)
        return batch + block[:1].float() * 0 if block.numel() else batch

class Breaks(Model):
    """A device-side assert at 666."""
    inputs = (Tensor("x", "FP32", (1,)),)
    outputs = (Tensor("y", "FP32", (1,)),)
    capturable = False
    def forward(self, batch):
        table = torch.zeros(4, device=batch.device)
        return batch + table[(batch == 666).long().flatten() * 1000][:, None]
'''


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with engines.builder(tmp_path / "models.py", MODELS, device="cuda") as build:
        yield build


def image(seed: int, rows: int = 1) -> wire.Part:
    chance = np.random.default_rng(seed)
    data = chance.integers(0, 256, (rows, 3, 64, 64), dtype=np.uint8)
    return wire.Part("image", data.tobytes(), datatype="UINT8", shape=data.shape)


def test_graphs_are_captured_for_each_power_of_two(make: Make) -> None:
    ready = make("Net", max_rows=16).load()
    assert ready.graphs == {f"3x64x64/UINT8/{n}": "captured" for n in (1, 2, 4, 8, 16)}
    assert ready.memory.static > 0
    assert all(peak > 0 for peak in ready.peaks.values())


def test_a_graph_answers_as_the_eager_model_does(make: Make) -> None:
    fast = make("Net", max_rows=16).start()
    slow = make("Net", max_rows=16, graphs=False).start()
    assert "eager" in slow.engine.pong(1).graphs["all"]
    for rows in (1, 2, 3, 5, 16):
        part = image(rows, rows)
        got = np.array(values(fast.one(part, rows=rows)))
        want = np.array(values(slow.one(part, rows=rows)))
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def test_many_batches_in_flight_never_mix_their_rows(make: Make) -> None:
    served = make("Net", max_rows=16).start()
    alone = {}
    for seed in range(8):
        alone[seed] = np.array(values(served.one(image(seed))))
    asked: dict[int, int] = {}
    before = len(served.answers)
    for turn in range(40):
        for seed in range(turn % 8 + 1):
            (entry,) = served.offer([image(seed)])
            asked[entry.item.id] = seed
        served.wait(before + len(asked))
    answers = served.wait(before + len(asked))
    answered = {n: seed for n, seed in asked.items() if answers[n].status != "busy"}
    assert len(answered) > len(asked) / 2
    for number, seed in answered.items():
        np.testing.assert_allclose(np.array(values(answers[number])), alone[seed], atol=1e-2)


def test_large_outputs_come_back_whole(make: Make) -> None:
    served = make("Large", max_rows=4).start()
    assert "captured" in served.engine.pong(1).graphs.values()
    chance = np.random.default_rng(1)
    asked = {}
    for _ in range(6):
        x = chance.standard_normal((1, 1024, 512)).astype(np.float32)
        (entry,) = served.offer([tensor(x)])
        asked[entry.item.id] = x
    answers = served.wait(len(asked))
    for number, x in asked.items():
        np.testing.assert_allclose(np.array(values(answers[number])), x * 2 + 1, rtol=1e-5)


def test_what_cannot_be_captured_runs_eagerly_and_says_why(make: Make) -> None:
    served = make("Looks", max_rows=4).start()
    graphs = served.engine.pong(1).graphs
    assert all(text.startswith("eager: ") for text in graphs.values()), graphs
    assert served.one(image(1)).status == "ok"


def test_shapes_without_a_bucket_run_eagerly(make: Make) -> None:
    served = make("Wide", max_rows=4, buckets=[[8]], fit="exact").start()
    assert values(served.one(tensor([[1.0] * 8]))) == [[2.0] * 8]
    assert values(served.one(tensor([[1.0] * 5]))) == [[2.0] * 5]


def test_padding_shows_nothing_of_others(make: Make) -> None:
    served = make("Wide", max_rows=4, buckets=[[8]], fit="pad").start()
    for _ in range(3):
        assert values(served.one(tensor([[9.0] * 8]))) == [[18.0] * 8]
    assert values(served.one(tensor([[1.0] * 5]))) == [[2.0] * 5]


def test_items_in_a_registered_arena_are_read_in_place(make: Make) -> None:
    import mmap

    served = make("Net", max_rows=16).start()
    part = image(3)
    want = values(served.one(part))
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 2**20)
    arena = memoryview(mmap.mmap(fd, 2**20))
    os.close(fd)
    assert isinstance(part.data, bytes)
    size = len(part.data)
    arena[4096 : 4096 + size] = part.data
    served.engine.map_arena(2, arena)
    served.until(lambda: bool(served.engine._loop.arenas.connections()))
    block = wire.Part("image", wire.Block(4096, size), datatype="UINT8", shape=part.shape)
    entry = Entry(wire.Item(10_000, (block,)), 2, lambda answer: None, arena)
    served.engine.offer([entry])
    np.testing.assert_allclose(np.array(values(served.wait(2)[10_000])), np.array(want), atol=1e-2)
    served.engine.drop(2)
    served.until(lambda: not served.engine._loop.arenas.connections())


def test_out_of_memory_is_contained(make: Make) -> None:
    served = make("Hungry", memory_cap=4 * 2**30, max_rows=8, wait=1.0).start()
    # Other tests' engines have had work space on streams of theirs, which the process keeps.
    before = torch.cuda.memory_reserved()
    large = served.one(tensor([[100.0]]))
    assert large.status == "too_large"  # more than the worker may ever have
    assert "bytes are there" in large.text
    # Four of a GiB and a half do not fit together; in smaller batches they do.
    entries = served.offer(*[[tensor([[1.5]])] for _ in range(4)])
    answers = served.wait(5)
    assert {answers[e.item.id].status for e in entries} == {"ok"}
    assert served.fences == []
    served.engine.trim()
    served.until(lambda: served.engine.pong(1).memory.reserved < before + 2**29)


def test_the_wrong_device_is_refused(make: Make) -> None:
    served = make("Net", device_uuid="GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(LoadProblem, match="pinned to GPU-0000") as caught:
        served.load()
    assert caught.value.cause == "device"


BREAK = """
import sys
from pathlib import Path
from gpusup.worker.handlers import from_file
engines = from_file(sys.argv[1])
served = engines.Served(sys.argv[2] + ":Breaks", device="cuda", max_rows=4).start()
assert served.one(engines.tensor([[1.0]])).status == "ok"
answer = served.one(engines.tensor([[666.0]]))
served.until(lambda: bool(served.fences))
print(answer.status, "|", served.fences[0], flush=True)
import os
os._exit(0)
"""


def test_a_device_side_assert_fences_the_worker(tmp_path: Path) -> None:
    """In a process of its own: nothing works in this one afterwards."""
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    helper = Path(__file__).parents[1] / "worker" / "engines.py"
    done = subprocess.run(
        [sys.executable, "-c", BREAK, str(helper), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("failed | "), done.stderr
    assert "device-side assert" in done.stdout

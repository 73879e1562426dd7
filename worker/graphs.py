"""CUDA graphs per (bucket, rows): captured once, replayed on the pool's slabs.

Launching the kernels of a small batch takes longer than running them; a graph launches all at
once. Each is captured twice, for both slabs of its bucket, so that one can be filled while the
other computes. What can't be captured runs eagerly, and `status` says why.
"""

from __future__ import annotations

import bisect
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from .compute import one_line
from .device import is_oom, is_sticky
from .outputs import Outputs, outputs_of
from .pool import Key, Slab

if TYPE_CHECKING:
    from .cuda_runner import CudaRunner

_log = logging.getLogger(__name__)

#: Larger outputs are copied back beside the compute stream.
LARGE: Final = 2**20
#: A graph's answers may differ from the eager ones by this share of the largest value.
TOLERANCE: Final = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float32: 1e-3}


@dataclass(slots=True)
class Captured:
    """`outputs` lie on the device, for `rows` rows; `hosts` are page-locked, of the same shapes."""

    graph: Any
    rows: int
    outputs: Outputs
    hosts: list[torch.Tensor]


class CannotCapture(Exception):
    pass


class Graphs:
    """Belongs to the thread that computes. `off` is why nothing is captured at all, or ""."""

    def __init__(self, runner: CudaRunner, off: str) -> None:
        self._runner = runner
        self._off = off
        self._stream = torch.cuda.Stream()
        self._memory = torch.cuda.graph_pool_handle()
        self._by_key: dict[Key, list[tuple[int, list[Captured]]]] = {}
        self._todo: deque[tuple[Key, int]] = deque()
        self._begun: list[Captured] = []  # of the first one wanted
        self.status = runner.status
        if off:
            self.status["all"] = f"eager: {off}"

    def want(self, key: Key, rows: int) -> None:
        """Capture this when there is time."""
        if not self._off and key.pooled and not key.degrade and (key, rows) not in self._todo:
            self._todo.append((key, rows))

    def pending(self) -> bool:
        return bool(self._todo)

    def find(self, key: Key, rows: int, slot: int) -> Captured | None:
        """The smallest captured graph that takes `rows`."""
        sizes = self._by_key.get(key)
        if not sizes:
            return None
        at = bisect.bisect_left(sizes, rows, key=lambda entry: entry[0])
        return sizes[at][1][slot] if at < len(sizes) else None

    def sizes(self, key: Key) -> list[int]:
        """Rows of the captured graphs, rising."""
        return [rows for rows, _ in self._by_key.get(key, ())]

    def step(self) -> bool:
        """Capture the next one wanted for one of its slabs: who comes meanwhile waits no longer
        than that. Only while nothing is in flight. False: none was left.

        Raises what poisons the device, nothing else.
        """
        if not self._todo:
            return False
        key, rows = self._todo[0]
        name = f"{key.text}/{rows}"
        why = ""
        hopeless = False
        try:
            if not self._capture(key, rows):
                return True
        except Exception as error:
            if is_sticky(error):
                raise
            why = one_line(error, named=not isinstance(error, CannotCapture))
            hopeless = not is_oom(error)
        self._todo.popleft()
        self._begun = []
        if not why:
            self.status[name] = "captured"
            return True
        # Out of the except block: its frames hold the tensors of the attempt.
        self.status[name] = f"eager: {why}"
        _log.warning("%s runs eagerly: %s", name, why)
        if hopeless:
            for other in [o for o in self._todo if o[0] == key]:
                self._todo.remove(other)
                self.status[f"{key.text}/{other[1]}"] = f"eager: {why}"
        torch.cuda.synchronize()
        self._runner.device.trim()
        return True

    def _capture(self, key: Key, rows: int) -> bool:
        """For one more slab. True: that was the last one."""
        runner = self._runner
        needed = runner.profile.cost(key.text, rows)
        free = runner.room_left()
        if needed > free:
            raise CannotCapture(f"takes up to {needed} bytes, {free} are left")
        pool = runner.pool
        slab = pool.lease(key)
        if slab is None:
            raise CannotCapture("its bucket has no slab")
        pool.give_back(slab)
        slabs = pool.slabs(key)
        self._begun.append(self._one(key, rows, slabs[len(self._begun)]))
        if len(self._begun) < len(slabs):
            return False
        bisect.insort(
            self._by_key.setdefault(key, []), (rows, self._begun), key=lambda entry: entry[0]
        )
        return True

    def _one(self, key: Key, rows: int, slab: Slab) -> Captured:
        runner = self._runner
        for whole in slab.device.values():
            whole.zero_()
        slab.dirty = 0
        batch = slab.batch(rows)
        torch.cuda.synchronize()
        stream = self._stream
        with torch.cuda.stream(stream):
            runner.forward(key, batch, ())  # lazy initialisation must not be part of the capture
            returned = runner.forward(key, batch, ())
            expected = outputs_of(returned, rows, runner.names)
            if not all(map(on_gpu, expected.values)):
                raise CannotCapture("an output is not on the device")
            large = [value.nbytes > LARGE for value in expected.values]
            # A graph's own outputs lie in memory that all graphs share: the next one's replay may
            # write there before a slow copy has read it.
            kept = [
                torch.empty_like(value) if big else None
                for value, big in zip(expected.values, large, strict=True)
            ]
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads go on decoding, and may register memory meanwhile.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
        ):
            outputs = outputs_of(runner.forward(key, batch, ()), rows, runner.names)
            for index, place in enumerate(kept):
                if place is not None:
                    place.copy_(outputs.values[index])
                    outputs.values[index] = place
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        _compare(outputs, expected)
        hosts = [
            torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in outputs.values
        ]
        return Captured(graph, rows, outputs, hosts)


def on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _compare(outputs: Outputs, expected: Outputs) -> None:
    """Raises CannotCapture if the replay says something else than the eager run."""
    for name, have, want in zip(expected.names, outputs.values, expected.values, strict=True):
        if not want.numel():
            continue
        if not want.is_floating_point():
            if not torch.equal(have, want):
                raise CannotCapture(f"its replay gives another {name!r}")
            continue
        share = TOLERANCE.get(want.dtype, 1e-3)
        scale = float(torch.nan_to_num(want.float()).abs().max())
        if not torch.allclose(
            have.float(), want.float(), rtol=share, atol=share * max(scale, 1e-3), equal_nan=True
        ):
            worst = float(torch.nan_to_num(have.float() - want.float()).abs().max())
            raise CannotCapture(f"its replay gives {name!r} off by {worst:.3g}")

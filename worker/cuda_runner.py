"""Batches on a CUDA device: copies in, compute and copies out on streams of their own.

Two batches are in flight: while one computes, the next one's rows are copied into the other slab,
straight from the proxy's arena where that is registered with CUDA.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .batcher import Unit
from .compute import Flight, Runner, as_given, fill, one_line, rows_of
from .device import Device
from .graphs import LARGE, Graphs, on_gpu
from .outputs import Outputs, outputs_of
from .pool import Key, Slab, place, zero_rest
from .profile import Profile

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CudaFlight:
    """`keep` is what the device may still be reading."""

    runner: CudaRunner
    slab: Slab | None
    outputs: Outputs | None = None
    end: Any = None
    keep: list[Any] = field(default_factory=list)

    def done(self) -> bool:
        return bool(self.end.query())

    def result(self) -> Outputs:
        self.end.synchronize()
        self.keep.clear()
        assert self.outputs is not None  # set by the launch
        return self.outputs

    def release(self) -> None:
        slab, self.slab = self.slab, None
        if slab is not None:
            self.runner.pool.give_back(slab)


class CudaRunner(Runner):
    depth = 2

    def __init__(
        self,
        model: Any,
        device: Device,
        profile: Profile,
        max_rows: int,
        names: Sequence[str],
        *,
        graphs_off: str,
        compiled: bool,
    ) -> None:
        """`graphs_off`: why no graphs are wanted, or ""."""
        super().__init__(model, device, profile, max_rows, names)
        torch.cuda.synchronize()  # what `load` has begun is there before other streams look
        self.copy = torch.cuda.Stream()
        self.compute = torch.cuda.Stream()
        self.back = torch.cuda.Stream()
        self._last: Any = None  # the end of the last batch launched
        self._compiled: Any = None
        if compiled:
            self._compiled = torch.compile(model.forward, dynamic=False)
        if self._gives_sizes:
            graphs_off = graphs_off or "forward asks for the true sizes"
        self.graphs = Graphs(self, graphs_off)

    # -- what the engine calls ------------------------------------------------------------------

    def launch(self, key: Key, units: Sequence[Unit], rows: int) -> Flight:
        text = key.text
        unknown = self.learning and not self.profile.covers(text, rows)
        before = 0
        if unknown:
            before = self.device.allocated()
            self.device.begin_peak()
        flight = CudaFlight(self, self.pool.lease(key))
        try:
            self._launch(flight, key, units, rows)
            if unknown:
                self.profile.learn(text, rows, self.device.peak() - before)
        except BaseException:
            self._abandon(flight)
            raise
        return flight

    def want_graphs(self, key: Key, rows: Sequence[int]) -> None:
        for count in rows:
            self.graphs.want(key, count)

    def steps(self, key: Key) -> Sequence[int]:
        return self.graphs.sizes(key)

    def idle_step(self) -> bool:
        return self.graphs.step()

    def pending(self) -> bool:
        return self.graphs.pending()

    def room_left(self) -> int:
        """Bytes that may still be allocated for good."""
        memory = self.device.memory()
        return max(0, self.device.room() - memory.allocated)

    def forward(self, key: Key, batch: Any, units: Sequence[Unit]) -> Any:
        if self._compiled is not None and not key.degrade and not self._gives_sizes:
            why = ""
            try:
                return self._compiled(batch)
            except Exception as error:
                if not _from_compiler(error):
                    raise
                why = one_line(error)
            self._compiled = None
            self.status["compile"] = f"eager: {why}"
            _log.warning("torch.compile is off: %s", why)
        return super().forward(key, batch, units)

    # -- inside ---------------------------------------------------------------------------------

    def _launch(self, flight: CudaFlight, key: Key, units: Sequence[Unit], rows: int) -> None:
        slab = flight.slab
        captured = None if slab is None else self.graphs.find(key, rows, slab.slot)
        # Beside a batch that computes, the rows are copied meanwhile. Alone, a second stream would
        # only have to be waited for.
        alone = self._last is None or self._last.query()
        copied = None if alone else torch.cuda.Event()
        with torch.cuda.stream(self.compute if alone else self.copy):
            if slab is None:
                batch = self._loose(flight, key, units, rows)
            else:
                padded = rows if captured is None else captured.rows
                batch = self._into_slab(flight, slab, units, rows, padded)
            if copied is not None:
                copied.record(self.copy)
        flight.end = torch.cuda.Event()
        with torch.cuda.stream(self.compute):
            if copied is not None:
                self.compute.wait_event(copied)
            if captured is not None:
                captured.graph.replay()
                flight.outputs = self._read_back(
                    flight, captured.outputs.cut(0, rows), [host[:rows] for host in captured.hosts]
                )
            else:
                returned = self.forward(key, batch, units)
                outputs = outputs_of(returned, rows, self.names)
                flight.outputs = self._read_back(flight, outputs, None)
                flight.keep += [batch, returned]
        self._last = flight.end

    def _read_back(
        self, flight: CudaFlight, outputs: Outputs, hosts: list[torch.Tensor] | None
    ) -> Outputs:
        """On the compute stream what is small; beside it what would keep the next batch waiting."""
        values: list[Any] = []
        large = sum(value.nbytes for value in outputs.values if on_gpu(value))
        stream = self.back if large > LARGE else self.compute
        if stream is self.back:
            computed = torch.cuda.Event()
            computed.record(self.compute)
            stream.wait_event(computed)
        with torch.cuda.stream(stream):
            for index, value in enumerate(outputs.values):
                if not on_gpu(value):
                    values.append(value)
                    continue
                host = (
                    torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                    if hosts is None
                    else hosts[index]
                )
                host.copy_(value, non_blocking=True)
                values.append(host)
            flight.end.record(stream)
        flight.keep.append(outputs)
        return Outputs(outputs.form, outputs.names, values)

    def _into_slab(
        self,
        flight: CudaFlight,
        slab: Slab,
        units: Sequence[Unit],
        rows: int,
        padded: int,
    ) -> Any:
        direct = all(unit.notes.registered for unit in units)
        dirty, slab.dirty = slab.dirty, max(slab.dirty, rows)
        for name in slab.device:
            items = [rows_of(unit)[name] for unit in units]
            target = slab.device[name]
            zero_rest(target, rows, dirty)
            if direct:
                flight.keep.append(items)
                _copy_each(slab, name, items)
            else:
                assert slab.host is not None
                host = slab.host[name][:rows]
                fill(host, items, units)
                target[:rows].copy_(host, non_blocking=True)
        slab.dirty = rows
        return slab.batch(padded)

    def _loose(self, flight: CudaFlight, key: Key, units: Sequence[Unit], rows: int) -> Any:
        """A batch without a bucket: memory of its own, from the allocators' caches."""
        batch: dict[str, Any] = {}
        for name, shape, _ in key.tensors:
            items = [rows_of(unit)[name] for unit in units]
            if not isinstance(items[0], torch.Tensor):
                batch[name] = np.concatenate(items)
                continue
            if len(items) == 1 and units[0].notes.registered and units[0].notes.fits:
                host = items[0]
            else:
                host = torch.empty((rows, *shape), dtype=items[0].dtype, pin_memory=True)
                fill(host, items, units)
            flight.keep.append(host)
            batch[name] = host.to(self.device.torch, non_blocking=True)
        return as_given(batch)

    def _abandon(self, flight: CudaFlight) -> None:
        """Nothing may write into a slab, or read an arena, that is given back."""
        try:
            torch.cuda.synchronize()
        finally:
            if flight.slab is not None:
                flight.slab.dirty = self.max_rows
            flight.release()


def _copy_each(slab: Slab, name: str, items: Sequence[torch.Tensor]) -> None:
    """Each item from where it lies to its rows on the device."""
    singles = slab.row_views(name)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    at = 0
    for item in items:
        count = item.shape[0]
        target = singles[at] if count == 1 else slab.device[name][at : at + count]
        if target.shape == item.shape:
            targets.append(target)
            sources.append(item)
        else:
            place(target, item)
        at += count
    if targets:
        # One call for all: the interpreter's lock is let go once and not for each item, so that
        # the thread that reads the sockets does not have to be waited for each time.
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _from_compiler(error: Exception) -> bool:
    module = type(error).__module__
    return module.startswith(("torch._dynamo", "torch._inductor")) or "triton" in module


class Arenas:
    """Proxies' arenas, registered with CUDA so that the device reads them by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pointers: dict[int, int] = {}

    def register(self, connection: int, arena: memoryview) -> bool:
        """False if CUDA will not: then copies go through page-locked slabs of our own."""
        try:
            view = torch.frombuffer(arena, dtype=torch.uint8)
            pointer = view.data_ptr()
            code = torch.cuda.cudart().cudaHostRegister(pointer, view.numel(), 0)
            if int(code) != 0:
                _log.warning("the arena of proxy %d can't be registered: %s", connection, code)
                return False
        except Exception as error:
            _log.warning("the arena of proxy %d can't be registered: %s", connection, error)
            return False
        with self._lock:
            self._pointers[connection] = pointer
        return True

    def unregister(self, connection: int) -> None:
        """Only when nothing of the connection is in flight."""
        with self._lock:
            pointer = self._pointers.pop(connection, 0)
        if pointer:
            try:
                torch.cuda.cudart().cudaHostUnregister(pointer)
            except Exception as error:
                _log.warning("the arena of proxy %d stays registered: %s", connection, error)

    def connections(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._pointers)

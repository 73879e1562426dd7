"""From a batch's outputs to answers: cut into items, encoded, put together if they were split."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from . import wire
from .batcher import Unit
from .codec import encoded, sliced_part
from .compute import Failure, failure_of
from .crew import Crew
from .entry import Entry
from .model import Tensor
from .outputs import Outputs, joined

#: A row that takes less is encoded where the batch was computed: handing it over would cost more.
_INLINE_S: Final = 100e-6
#: After so many batches that were handed over, it is tried again.
_TRY_AGAIN: Final = 1000
#: Outputs up to this are copied out of the slab before they are handed over.
_COPY: Final = 8 * 2**20

Pair = tuple[Entry, wire.Answer]


@dataclass(slots=True)
class Whole:
    """An item that was split: its portions' outputs by first row."""

    rows: int
    pieces: dict[int, Outputs] = field(default_factory=dict)
    begun: bool = False

    def add(self, first: int, piece: Outputs) -> Outputs | None:
        """The item's outputs once all its rows are there."""
        self.pieces[first] = piece
        if sum(len(each.values[0]) for each in self.pieces.values()) < self.rows:
            return None
        return joined([self.pieces[at] for at in sorted(self.pieces)])


class Answers:
    def __init__(
        self,
        model: Any,
        outputs: Sequence[Tensor],
        crew: Crew,
        answer: Callable[[Entry, wire.Answer], None],
        answer_all: Callable[[Sequence[Pair]], None],
    ) -> None:
        self._model = model
        self._outputs = outputs
        self._datatypes = {tensor.name: tensor.datatype for tensor in outputs}
        self._crew = crew
        self._answer = answer
        self._answer_all = answer_all
        self._encode_s = 0.0  # of one row, lately, inline
        self._handed_over = 0

    def fail(
        self, entry: Entry, failure: Failure, began: float = 0.0, took: float = 0.0, rows: int = 0
    ) -> None:
        """`began` 0: it never ran."""
        entry.cancelled = True  # a split item's other portions need not be computed
        self._answer(
            entry,
            wire.Answer(
                entry.item.id,
                failure.status,
                text=failure.text,
                queue_s=began - entry.arrived if began else 0.0,
                compute_s=took,
                batch_rows=rows,
                started=bool(began),
                decode_s=entry.decode_s,
            ),
        )

    def empty(self, entry: Entry) -> None:
        """An item without rows: nothing to compute."""
        parts = tuple(
            wire.Part(t.name, b"", t.datatype, (0, *(max(0, side) for side in t.shape)))
            for t in self._outputs
        )
        self._answer(entry, wire.Answer(entry.item.id, "ok", parts, decode_s=entry.decode_s))

    def deliver(
        self,
        units: Sequence[Unit],
        outputs: Outputs,
        began: float,
        took: float,
        batch_rows: int,
        release: Callable[[], None] | None,
    ) -> None:
        """Answer all units. `release` is called when nothing looks into `outputs` any more."""
        first: Any = units[0].what
        if self._crew.size and self._encode_s >= _INLINE_S and first.request is not None:
            self._handed_over += 1
            if self._handed_over >= _TRY_AGAIN:
                self._handed_over = 0
                self._encode_s = 0.0
            if release is not None and outputs.nbytes <= _COPY:
                # A slow encode must not keep the slab from the batches after the next.
                outputs = outputs.copied()
                release()
                release = None
            _Batch(self, outputs, began, took, batch_rows, release).hand_over(units, self._crew)
        else:
            start = time.monotonic()
            _Batch(self, outputs, began, took, batch_rows, release).run(units, 0)
            spent = (time.monotonic() - start) / len(units)
            self._encode_s += 0.2 * (spent - self._encode_s)


@dataclass(slots=True)
class _Batch:
    owner: Answers
    outputs: Outputs
    began: float
    took: float
    rows: int
    release: Callable[[], None] | None
    left: int = 1
    each: list[Any] | None = None
    lock: threading.Lock | None = None
    arrays: list[tuple[str, str, Any]] | None = None

    def hand_over(self, units: Sequence[Unit], crew: Crew) -> None:
        """A share for each thread of the crew."""
        share = -(-len(units) // crew.size)
        shares: list[tuple[Sequence[Unit], int]] = []
        at = 0
        for first in range(0, len(units), share):
            some = units[first : first + share]
            shares.append((some, at))
            at += sum(unit.rows for unit in some)
        self.left = len(shares)
        self.lock = threading.Lock()
        self.each = self.outputs.each_row()
        for some, first in shares:
            crew.put(self.apart, some, first)

    def apart(self, units: Sequence[Unit], at: int) -> None:
        """`run` in a thread of the crew: the mode is a thread's own."""
        with torch.inference_mode():
            self.run(units, at)

    def run(self, units: Sequence[Unit], at: int) -> None:
        """Connection by connection: the first need not wait until the last ones are encoded."""
        by_connection: dict[int, list[tuple[Unit, int]]] = {}
        for unit in units:
            entry: Any = unit.what
            by_connection.setdefault(entry.connection, []).append((unit, at))
            at += unit.rows
        try:
            for some in by_connection.values():
                self._run_some(some)
        finally:
            self._done()

    def _run_some(self, some: Sequence[tuple[Unit, int]]) -> None:
        pairs: list[Pair] = []
        try:
            for unit, at in some:
                answer = self._answer(unit, at)
                if answer is not None:
                    pairs.append(answer)
        finally:
            self.owner._answer_all(pairs)

    def _done(self) -> None:
        if self.lock is None:
            self.left -= 1
        else:
            with self.lock:
                self.left -= 1
                if self.left:
                    return
        if self.release is not None:
            self.release()

    def _answer(self, unit: Unit, at: int) -> Pair | None:
        entry: Any = unit.what
        item = entry.item
        began = time.monotonic()
        parts: tuple[wire.Part, ...] = ()
        status: wire.Status = "ok"
        text = ""
        try:
            outcome = self._parts(unit, entry, at)
            if outcome is None:
                return None
            parts = outcome
        except Exception as error:
            failure = failure_of(error)
            status, text = failure.status, failure.text
        return entry, wire.Answer(
            item.id,
            status,
            parts,
            text,
            degraded=unit.key.degrade,  # type: ignore[attr-defined]
            queue_s=self.began - entry.arrived,
            compute_s=self.took,
            batch_rows=self.rows,
            decode_s=entry.decode_s,
            encode_s=time.monotonic() - began,
        )

    def _parts(self, unit: Unit, entry: Entry, at: int) -> tuple[wire.Part, ...] | None:
        placed = unit.notes
        outputs = self.outputs
        split = unit.rows != placed.rows
        if entry.request is not None and not split and placed.fits:
            if self.each is None:
                self.each = outputs.each_row()
            return (encoded(self.owner._model.encode(self.each[at], entry.request)),)
        if entry.request is None and not split and placed.fits:
            # The whole batch is made ready once; an item is then only a slice of bytes.
            arrays = self.arrays
            if arrays is None:
                arrays = self.arrays = outputs.arrays(self.owner._datatypes)
            last = at + unit.rows
            return tuple([sliced_part(name, kind, array[at:last]) for name, kind, array in arrays])
        piece = outputs.cut(at, unit.rows)
        if not placed.fits:
            key: Any = unit.key
            piece = piece.trimmed(key.tensors[0][1], placed.true_size)
        if split:
            whole: Whole = entry.whole
            ready = whole.add(unit.first, piece.copied())
            if ready is None:
                return None
            piece = ready
        if entry.request is not None:
            rows = piece.each_row()
            return (encoded(self.owner._model.encode(rows[0], entry.request)),)
        return piece.parts(self.owner._datatypes)

"""From a frame's items to rows that the batcher can take: decoded, checked, placed in a bucket.

Decoding runs in the crew where it may take long; all else in the thread of the loop.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from . import wire
from .answers import Answers, Whole
from .batcher import DEFAULT_RANK, Batcher, Unit
from .compute import Failure, Placed, failure_of
from .crew import Crew
from .desk import Desk
from .entry import Entry
from .intake import Intake
from .pool import TooLarge
from .texts import Texts
from .totals import Totals

#: An item may have at most so many batches' worth of rows.
MOST_BATCHES: Final = 32


class Reception:
    """`coming`: items that are being decoded just now. `poisoned(text)`: a decode broke the
    device. `ring` wakes the loop."""

    def __init__(
        self,
        intake: Intake,
        batcher: Batcher,
        *,
        crew: Crew,
        desk: Desk,
        texts: Texts,
        answers: Answers,
        totals: Totals,
        ring: Callable[[], None],
        poisoned: Callable[[str], None],
    ) -> None:
        self.intake = intake
        self.coming = 0
        self._batcher = batcher
        self._crew = crew
        self._desk = desk
        self._texts = texts
        self._answers = answers
        self._totals = totals
        self._ring = ring
        self._poisoned = poisoned
        self._decoded: deque[tuple[Entry, Failure | None]] = deque()

    def receive(self) -> None:
        """All that has come and all that the crew has decoded meanwhile."""
        inbox = self._desk.inbox
        if inbox:
            began = time.monotonic()
            while inbox:
                began = self._admit(inbox.popleft(), began)
        while self._decoded:
            entry, failure = self._decoded.popleft()
            self.coming -= 1
            self._enqueue(entry, failure, time.monotonic())

    def bury(self, units: Sequence[Unit]) -> None:
        """Answer those that must not start any more."""
        for unit in units:
            entry: Any = unit.what
            self._bury_entry(entry)

    def _admit(self, entry: Entry, now: float) -> float:
        """Returns the time by then: that of each step is the beginning of the next."""
        if entry.item.method != "predict":
            self._texts.take(entry)
        elif self._dead(entry, now):
            pass
        elif self._crew.size and self.intake.needs_decode(entry.item):
            self.coming += 1
            self._crew.put(self._decode, entry)
        else:
            failure = self._prepare(entry)
            began, now = now, time.monotonic()
            entry.decode_s = now - began
            self._enqueue(entry, failure, now)
        return now

    def _decode(self, entry: Entry) -> None:
        """In the crew. Whatever happens, the loop hears of it: it counts what is coming."""
        failure: Failure | None = Failure("failed", "not decoded")
        began = time.monotonic()
        try:
            if entry.cancelled:
                failure = None  # found again, and buried, by `_enqueue`
            else:
                with torch.inference_mode():
                    failure = self._prepare(entry)
        finally:
            entry.decode_s = time.monotonic() - began
            self._decoded.append((entry, failure))
            self._ring()

    def _prepare(self, entry: Entry) -> Failure | None:
        try:
            self.intake.prepare(entry)
        except TooLarge as error:
            return Failure("too_large", str(error))
        except Exception as error:
            if isinstance(error, RecursionError):
                return Failure("invalid", "the input is nested too deeply")
            failure = failure_of(error)
            return Failure("failed", failure.text) if failure.kind == "rows" else failure
        return None

    def _enqueue(self, entry: Entry, failure: Failure | None, now: float) -> None:
        if self._dead(entry, now):
            return
        if failure is not None:
            if failure.kind == "failed":
                self._totals.failures += 1
            self._answers.fail(entry, failure)
            if failure.kind == "sticky":
                self._poisoned(failure.text)
            return
        placed: Placed = entry.tensor
        most = self._batcher.most_rows(entry.bucket)
        if not placed.rows:
            self._answers.empty(entry)
        elif placed.rows <= most:
            self._add(entry, 0, placed.rows)
        elif placed.rows > (limit := self._batcher.max_rows * MOST_BATCHES):
            text = f"{placed.rows} rows in one request, the limit is {limit}"
            self._answers.fail(entry, Failure("invalid", text))
        else:
            entry.whole = Whole(placed.rows)
            for first in range(0, placed.rows, most):
                self._add(entry, first, min(most, placed.rows - first))

    def _add(self, entry: Entry, first: int, rows: int) -> None:
        item = entry.item
        self._batcher.add(
            Unit(
                entry,
                entry.bucket,
                rows,
                entry.arrived,
                item.deadline or math.inf,
                item.priority if item.priority > 0 else DEFAULT_RANK,
                first,
                False,
                entry.tensor,
            )
        )

    def _dead(self, entry: Entry, now: float) -> bool:
        """Answers an entry that must not start any more."""
        if not entry.cancelled:
            deadline = entry.item.deadline
            if not deadline or deadline > now:
                return False
        self._bury_entry(entry)
        return True

    def _bury_entry(self, entry: Entry) -> None:
        whole: Whole | None = entry.whole
        status: wire.Status = "cancelled" if entry.cancelled else "expired"
        started = whole is not None and whole.begun
        entry.cancelled = True  # its other portions
        self._desk.cancels |= whole is not None
        self._desk.answer(entry, wire.Answer(entry.item.id, status, started=started))

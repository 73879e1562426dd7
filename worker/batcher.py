"""Which items make up the next batch. Pure: the time is handed in, nothing blocks.

Items wait in one line for each key (bucket, dtype, degrade step), because only those of one key may
share a tensor. A line is ripe when a batch is full, when its oldest item has waited `wait`, or
when the device would otherwise idle; then a lone item never waits.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

#: A request without a priority ranks here; 1 is the highest.
DEFAULT_RANK: Final = 2


class Cancellable(Protocol):
    cancelled: bool


@dataclass(slots=True, eq=False)
class Unit:
    """Rows that must be computed together: a whole item, or a portion of one that was split.

    `first` is the portion's first row within the item. `deadline` is `math.inf` for none.
    """

    what: Cancellable
    key: Hashable
    rows: int
    arrived: float
    deadline: float = math.inf
    rank: int = DEFAULT_RANK
    first: int = 0
    gone: bool = False
    notes: Any = None


@dataclass(slots=True, eq=False)
class _Line:
    """One key's units twice: by urgency, and by arrival. A taken unit stays in the other until it
    comes to its head, marked `gone`."""

    heap: list[tuple[int, float, int, Unit]] = field(default_factory=list)
    fifo: deque[Unit] = field(default_factory=deque)
    rows: int = 0

    def oldest(self) -> Unit | None:
        fifo = self.fifo
        while fifo and fifo[0].gone:
            fifo.popleft()
        return fifo[0] if fifo else None

    def urgent(self) -> tuple[int, float, int, Unit] | None:
        heap = self.heap
        while heap and heap[0][3].gone:
            heapq.heappop(heap)
        return heap[0] if heap else None


class Batcher:
    """`limit` says how many rows of a key the device has memory for, if fewer than `max_rows`."""

    def __init__(
        self,
        *,
        max_rows: int,
        wait: float,
        starvation: float,
        limit: Callable[[Hashable], int] | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.wait = wait
        self.starvation = starvation
        self.rows = 0
        self._limit = limit
        self._lines: dict[Hashable, _Line] = {}
        self._serial = 0
        self._soonest = math.inf
        self._dead: list[Unit] = []

    def most_rows(self, key: Hashable) -> int:
        return self.max_rows if self._limit is None else min(self.max_rows, self._limit(key))

    def add(self, unit: Unit) -> None:
        """Raises ValueError if the unit can't be in any batch: its owner splits it first."""
        if not 0 < unit.rows <= self.max_rows:
            raise ValueError(f"a unit of {unit.rows} rows, a batch takes 1 to {self.max_rows}")
        line = self._lines.get(unit.key)
        if line is None:
            line = self._lines[unit.key] = _Line()
        self._serial += 1
        heapq.heappush(line.heap, (unit.rank, unit.deadline, self._serial, unit))
        line.fifo.append(unit)
        line.rows += unit.rows
        self.rows += unit.rows
        if unit.deadline < self._soonest:
            self._soonest = unit.deadline

    def take(
        self,
        now: float,
        *,
        idle: bool,
        coming: int = 0,
        portion: Callable[[Any, int], int] | None = None,
    ) -> list[Unit]:
        """The units of the next batch, or [].

        `idle`: the device has nothing to do. `coming`: items that are being decoded just now; an
        idle device waits for those, within the window, since they would fill the batch.
        `portion(key, rows)`: how many of the `rows` that could be taken are worth it now.
        """
        if not self.rows:
            return []
        best: _Line | None = None
        best_key: Hashable = None
        best_urgency: tuple[int, float, float, int] | None = None
        for key, line in self._lines.items():
            oldest = line.oldest()
            if oldest is None:
                continue
            ripe = (
                (idle and not coming)
                or line.rows >= self.most_rows(key)
                or now - oldest.arrived >= self.wait
            )
            if not ripe:
                continue
            urgency = self._urgency(line, oldest, now)
            if best_urgency is None or urgency < best_urgency:
                best, best_key, best_urgency = line, key, urgency
        if best is None:
            return []
        most = self.most_rows(best_key)
        if portion is not None:
            most = portion(best_key, min(most, best.rows))
        taken = self._fill(best, most, now)
        if not best.rows:
            del self._lines[best_key]
        return taken

    def sweep(self, now: float) -> list[Unit]:
        """Take out what must not start any more: expired or cancelled. Call it after a cancel and
        when `next_deadline` has come; `take` leaves what it met there too."""
        soonest = math.inf
        for line in self._lines.values():
            for unit in line.fifo:
                if unit.gone:
                    continue
                if unit.what.cancelled or unit.deadline <= now:
                    self._remove(line, unit)
                    self._dead.append(unit)
                elif unit.deadline < soonest:
                    soonest = unit.deadline
        self._soonest = soonest
        for key in [key for key, line in self._lines.items() if not line.rows]:
            del self._lines[key]
        return self.met()

    def met(self) -> list[Unit]:
        """Dead units that `take` came across; each is given out once."""
        if not self._dead:
            return []
        dead, self._dead = self._dead, []
        return dead

    def next_deadline(self) -> float:
        """No unit expires before; `math.inf` if none does."""
        return self._soonest

    def next_window(self) -> float:
        """When the first line is ripe at a busy device; `math.inf` if nothing waits."""
        if not self._lines:
            return math.inf
        ends = (
            oldest.arrived + self.wait
            for line in self._lines.values()
            if (oldest := line.oldest()) is not None
        )
        return min(ends, default=math.inf)

    def oldest(self) -> float:
        """When the oldest waiting unit arrived; `math.inf` if nothing waits."""
        return self.next_window() - self.wait

    def waiting(self) -> list[Unit]:
        return [unit for line in self._lines.values() for unit in line.fifo if not unit.gone]

    def _urgency(self, line: _Line, oldest: Unit, now: float) -> tuple[int, float, float, int]:
        if now - oldest.arrived >= self.starvation:
            return (0, oldest.arrived, 0.0, 0)
        head = line.urgent()
        assert head is not None  # the line has an oldest unit
        rank, deadline, serial, _ = head
        return (1, rank, deadline, serial)

    def _fill(self, line: _Line, most: int, now: float) -> list[Unit]:
        taken: list[Unit] = []
        rows = 0
        while rows < most:
            unit = line.oldest()
            if unit is None:
                break
            if now - unit.arrived < self.starvation:
                head = line.urgent()
                assert head is not None
                unit = head[3]
            if unit.what.cancelled or unit.deadline <= now:
                self._remove(line, unit)
                self._dead.append(unit)
                continue
            # The next one waits for the next batch rather than being overtaken by smaller ones:
            # else many small items would starve a large one.
            if taken and rows + unit.rows > most:
                break
            self._remove(line, unit)
            taken.append(unit)
            rows += unit.rows
        return taken

    def _remove(self, line: _Line, unit: Unit) -> None:
        unit.gone = True
        line.rows -= unit.rows
        self.rows -= unit.rows

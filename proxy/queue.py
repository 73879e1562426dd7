"""Waiting requests in the order they are to be served, and when their waiting ends. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

#: Clients may name any number; beyond this they are all equally unimportant.
LOWEST_PRIORITY: Final = 16
DEFAULT_PRIORITY: Final = 2


class Waits(Protocol):
    priority: int  # 1 is highest
    arrived: float
    waiting: bool  # the queue's mark: in the queue


T = TypeVar("T", bound=Waits)


def rank(priority: int) -> int:
    """A client's number as one of ours; absent or 0 ranks as the default."""
    return min(priority, LOWEST_PRIORITY) if priority > 0 else DEFAULT_PRIORITY


class Queue(Generic[T]):
    """By priority, then arrival; whoever has waited `starvation_s` goes first, oldest first."""

    def __init__(self, starvation_s: float) -> None:
        self.starvation_s = starvation_s
        self._lines: dict[int, deque[T]] = {}
        self._order: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for priority in self._order:
            yield from (entry for entry in self._lines[priority] if entry.waiting)

    def push(self, entry: T, *, front: bool = False) -> None:
        """`front`: it had its turn already and comes back through no fault of its own."""
        line = self._lines.get(entry.priority)
        if line is None:
            line = self._lines[entry.priority] = deque()
            self._order = sorted(self._lines)
        entry.waiting = True
        self._count += 1
        if front:
            line.appendleft(entry)
        else:
            line.append(entry)

    def discard(self, entry: T) -> None:
        """Its client left or its time is over. Its place in the line is swept up later."""
        if entry.waiting:
            entry.waiting = False
            self._count -= 1
            line = self._lines[entry.priority]
            while line and not line[0].waiting:
                line.popleft()
            # In the middle of a long line they would pile up for as long as its head stays.
            if len(line) > 64 and len(line) > 4 * self._count:
                self._lines[entry.priority] = deque(e for e in line if e.waiting)

    def remove(self, entry: T) -> None:
        """`discard` for one that is pushed again, here or elsewhere: its place goes at once, or it
        would be found there too."""
        if entry.waiting:
            entry.waiting = False
            self._count -= 1
            self._lines[entry.priority].remove(entry)

    def head(self, now: float) -> T | None:
        """Who is next. Stays in the queue until taken."""
        if not self._count:
            return None
        oldest: T | None = None
        first: T | None = None
        for priority in self._order:
            line = self._lines[priority]
            while line and not line[0].waiting:
                line.popleft()
            if not line:
                continue
            entry = line[0]
            if first is None:
                first = entry
            if now - entry.arrived >= self.starvation_s and (
                oldest is None or entry.arrived < oldest.arrived
            ):
                oldest = entry
        return oldest or first

    def take(self, entry: T) -> None:
        """`entry` must be what `head` has just said."""
        self._lines[entry.priority].popleft()
        entry.waiting = False
        self._count -= 1


H = TypeVar("H")


class Deadlines(Generic[H]):
    """Who is to be looked at when, in slices of `grain_s`: adding and removing are set operations,
    because nearly all of them are removed long before their time."""

    def __init__(self, grain_s: float = 0.01) -> None:
        self._grain_s = grain_s
        self._slices: dict[int, set[H]] = {}
        self._heap: list[int] = []

    def add(self, who: H, at: float) -> int:
        """Returns the key that `remove` wants."""
        key = int(at / self._grain_s) + 1
        members = self._slices.get(key)
        if members is None:
            members = self._slices[key] = set()
            heappush(self._heap, key)
        members.add(who)
        return key

    def remove(self, who: H, key: int) -> None:
        members = self._slices.get(key)
        if members is not None:
            members.discard(who)

    def next_at(self) -> float | None:
        """When `due` is worth calling; None if never. Forgets slices that were emptied."""
        while self._heap:
            key = self._heap[0]
            if self._slices[key]:
                return key * self._grain_s
            heappop(self._heap)
            del self._slices[key]
        return None

    def due(self, now: float) -> list[H]:
        """Takes out all whose time has come."""
        found: list[H] = []
        while self._heap and self._heap[0] * self._grain_s <= now:
            found.extend(self._slices.pop(heappop(self._heap)))
        return found

"""Where entries come in and answers go out: what is here, how many rows, who was answered.

Thread-safe; nothing here waits. Every entry that was taken gets exactly one last answer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from . import wire
from .batcher import Unit
from .entry import Entry

_log = logging.getLogger(__name__)

Pair = tuple[Entry, wire.Answer]


class Bell:
    """Wakes the loop from any thread; rung twice, it wakes once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # it rings already

    def wait(self, timeout: float) -> None:
        self._lock.acquire(timeout=timeout)


class Desk:
    """`ring` wakes the thread that computes. `budget_rows` is how many rows are taken at once."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.on_relief: Callable[[], None] | None = None
        self.reply_all: Callable[[Sequence[Pair]], None] | None = None
        self.inbox: deque[Entry] = deque()
        self.methods: Collection[str] = ()
        self.budget_rows = 1
        self.rows = 0
        self.closed = False
        self.cancels = False
        self.unsupported = 0
        self._full = False  # somebody may have been told so who hears nothing else from us
        self._ring = ring
        self._lock = threading.Lock()
        self._live: dict[tuple[int, int], Entry] = {}

    def offer(self, entries: Sequence[Entry], now: float) -> None:
        refused: list[Pair] = []
        with self._lock:
            for entry in entries:
                item = entry.item
                if not entry.arrived:
                    entry.arrived = now
                refusal = self._refusal(item)
                if refusal is not None:
                    text = f"the model has no {item.method}" if refusal == "unsupported" else ""
                    refused.append((entry, wire.Answer(item.id, refusal, text=text, started=False)))
                    continue
                self.rows += item.rows
                self._live[entry.connection, item.id] = entry
                entry.credit = entry.credit or item.credit
                self.inbox.append(entry)
            self._full |= self.rows >= self.budget_rows
        self._ring()
        if refused:
            self._send(refused)

    def cancel(self, connection: int, ids: Sequence[int]) -> None:
        with self._lock:
            for number in ids:
                entry = self._live.get((connection, number))
                if entry is not None:
                    entry.cancelled = True
            self.cancels = True

    def recall(self, connection: int, ids: Sequence[int]) -> None:
        """At once, from the caller's thread: the one that computes may be stuck."""
        taken: list[Pair] = []
        with self._lock:
            for number in ids:
                entry = self._live.get((connection, number))
                if entry is not None and not entry.claimed and entry.item.method == "predict":
                    entry.cancelled = True
                    taken.append((entry, wire.Answer(number, "cancelled", started=False)))
            self.cancels = True
        if taken:
            self.answer_all(taken)

    def claim(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """(those whose entries begin now, those that were cancelled in the last moment)."""
        ours: list[Unit] = []
        dead: list[Unit] = []
        with self._lock:
            for unit in units:
                entry: Any = unit.what
                if entry.cancelled:
                    dead.append(unit)
                else:
                    entry.claimed = True
                    ours.append(unit)
        return ours, dead

    def drop(self, connection: int) -> None:
        with self._lock:
            for (owner, _), entry in self._live.items():
                if owner == connection:
                    entry.cancelled = True
            self.cancels = True

    def find(self, connection: int, item: int) -> Entry | None:
        return self._live.get((connection, item))

    def empty(self) -> bool:
        return not self._live

    def connections(self) -> set[int]:
        with self._lock:
            return {connection for connection, _ in self._live}

    def answer(self, entry: Entry, answer: wire.Answer) -> None:
        self.answer_all([(entry, answer)])

    def answer_all(self, pairs: Sequence[Pair]) -> None:
        """Last answers. An entry that has had one already gets no second."""
        fresh: list[Pair] = []
        with self._lock:
            self._full |= self.rows >= self.budget_rows
            for pair in pairs:
                entry = pair[0]
                if self._live.pop((entry.connection, entry.item.id), None) is not None:
                    self.rows -= entry.item.rows
                    fresh.append(pair)
            relieved = self._full and self.rows < self.budget_rows
            self._full &= not relieved
            empty = not self._live
        if fresh:
            self._send(fresh)
        if relieved and self.on_relief is not None:
            self.on_relief()
        if empty and self.closed:
            self._ring()

    def _refusal(self, item: wire.Item) -> wire.Status | None:
        if self.closed:
            return "draining"
        if item.method not in self.methods:
            self.unsupported += 1
            return "unsupported"
        # A single item above the budget is taken when there is nothing else: it will not shrink.
        if self.rows and self.rows + item.rows > self.budget_rows:
            return "busy"
        return None

    def _send(self, pairs: Sequence[Pair]) -> None:
        """No lock of ours is held: who sends asks for the load."""
        try:
            if self.reply_all is not None:
                self.reply_all(pairs)
                return
        except Exception:
            _log.exception("answers could not be sent")
            return
        for entry, answer in pairs:
            try:
                entry.reply(answer)
            except Exception:
                _log.exception("an answer could not be sent")

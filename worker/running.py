"""What executes just now, kept in the progress page (progress.py).

Batches and streams of results run side by side, but the page has room for one start and one
budget: it shows the work that is nearest to its budget, so that a lively stream can't hide a batch
that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from . import progress


@dataclass(slots=True, eq=False)
class Work:
    began: float
    budget: float
    pairs: Sequence[tuple[int, int]]
    request_ids: Sequence[str]
    rows: int


class Running:
    def __init__(self, page: progress.Writer) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self.rows = 0

    def begin(
        self,
        budget: float,
        pairs: Sequence[tuple[int, int]],
        request_ids: Sequence[str] = (),
        rows: int = 0,
    ) -> Work:
        """`pairs`: (connection, item id) of what begins to execute."""
        work = Work(time.monotonic(), budget, pairs, request_ids, rows)
        with self._lock:
            self._works.append(work)
            self.rows += rows
            worst = self._worst()
            self._page.start(worst.budget, self._pairs(), began=worst.began)
        return work

    def again(self, work: Work) -> None:
        """The clock of `work` starts anew: it made progress (a piece of a stream, a retry)."""
        with self._lock:
            work.began = time.monotonic()
            worst = self._worst()
            self._page.again(worst.began, worst.budget)

    def end(self, work: Work) -> None:
        with self._lock:
            self._works.remove(work)
            self.rows -= work.rows
            if self._works:
                worst = self._worst()
                self._page.finish(self._pairs(), began=worst.began, budget_s=worst.budget)
            else:
                self._page.finish()

    def request_ids(self) -> list[str]:
        with self._lock:
            return [name for work in self._works for name in work.request_ids]

    def _worst(self) -> Work:
        works = self._works
        return works[0] if len(works) == 1 else min(works, key=lambda w: w.began + w.budget)

    def _pairs(self) -> Sequence[tuple[int, int]]:
        works = self._works
        if len(works) == 1:
            return works[0].pairs
        return [pair for work in works for pair in work.pairs]

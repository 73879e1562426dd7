"""Threads that decode and encode beside the one that computes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_log = logging.getLogger(__name__)

Job = Callable[..., None]


class Crew:
    """`threads` daemon threads. Jobs answer for their own errors; one that does not is logged."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Job, tuple[Any, ...]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        return len(self._threads)

    def put(self, job: Job, *args: Any) -> None:
        self._queue.put((job, args))

    def stop(self) -> None:
        """What is queued is still done; nothing is waited for."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            job, args = task
            try:
                job(*args)
            except Exception:
                _log.exception("a job of the crew failed")
            # What the last job worked on must not live until the next one comes.
            del task, job, args

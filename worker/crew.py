"""Threads that decode and encode beside the one that computes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from gpusup.conf.precedence import step_back

_log = logging.getLogger(__name__)

Job = Callable[..., None]


def cores_apart(threads: int, place: int, workers: int) -> list[set[int]]:
    """For each of so many threads the cores that only it may use, of those we may use; [] if that
    would be less than two for each. `place`: which of `workers` on this machine asks; 0 workers:
    not known.

    While other programs keep all cores busy, the kernel lets a thread run where it was woken or ran
    before, even if one of ours computes there and far less important ones elsewhere. On an H200
    machine with a hog on each of 16 cores, eight threads waited for each other for a third of the
    time that they wanted to compute.
    """
    cores = sorted(os.sched_getaffinity(0))
    total = threads * workers
    if not total or len(cores) < 2 * total:
        return []
    first = place * threads
    return [set(cores[first + index :: total]) for index in range(threads)]


class Crew:
    """`threads` daemon threads. Jobs answer for their own errors; one that does not is logged.

    `cores`: for each thread where it may run, or nothing.
    """

    def __init__(self, threads: int, name: str, cores: Sequence[set[int]] = ()) -> None:
        self._queue: SimpleQueue[tuple[Job, tuple[Any, ...]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(cores[index] if cores else set(),),
                name=f"{name}-{index}",
                daemon=True,
            )
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

    def _work(self, cores: set[int]) -> None:
        if cores:
            with suppress(OSError):  # they may have been taken from us meanwhile
                os.sched_setaffinity(0, cores)
        step_back()
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

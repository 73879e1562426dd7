"""The page of memory in which a worker shows what it is doing. Written without a system call,
read without asking, and still there when the worker is not.

The supervisor makes it (a memfd) and passes it to the worker; the worker passes it on to each
proxy with DataWelcome. The supervisor judges hangs by it; a proxy whose worker has died reads in
it which of its requests had begun to execute.

Layout (little-endian): the beat; one record guarded by a sequence number that is odd while it is
written; and the table of what executes, guarded likewise.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

SIZE: Final = 64 * 1024
MAX_EXECUTING: Final = 4096

_BEAT = struct.Struct("<d")
_SEQ = struct.Struct("<Q")
_RECORD = struct.Struct("<QQQQddd")
_COUNT = struct.Struct("<QQ")
_RECORD_AT: Final = 64
_TABLE_AT: Final = 256
_ENTRY = struct.Struct("<IQ")


@lru_cache(maxsize=256)
def _entries(count: int) -> struct.Struct:
    return struct.Struct("<" + "IQ" * count)


class Progress(NamedTuple):
    """Times are CLOCK_MONOTONIC seconds, 0 for never."""

    beat: float
    load_bytes: int
    load_steps: int
    batches_started: int
    batches_done: int
    batch_started: float  # 0: nothing is being computed
    batch_budget: float  # seconds
    last_ok: float  # last proof that the device answers: a batch, or the canary


def create(name: str) -> int:
    """A descriptor of a zeroed page, close-on-exec."""
    fd = os.memfd_create(f"gpusup-progress-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return fd


class Writer:
    """The worker's side. `beat` has its own thread; the rest belongs to whoever computes.

    A lock, because loading and computing may be stamped from different threads.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, SIZE)
        self._lock = threading.Lock()
        self._seq = 0
        self._table_seq = 0
        self._load_bytes = 0
        self._load_steps = 0
        self._started = 0
        self._done = 0
        self._batch_started = 0.0
        self._budget = 0.0
        self._last_ok = 0.0

    def beat(self) -> None:
        _BEAT.pack_into(self._page, 0, time.monotonic())

    def load_moved(self, more_bytes: int = 0) -> None:
        with self._lock:
            self._load_bytes += more_bytes
            self._load_steps += 1
            self._write()

    def start(
        self, budget_s: float, executing: Sequence[tuple[int, int]], *, began: float = 0.0
    ) -> None:
        """A batch begins; `executing` is all that runs now, as (connection, item id).

        `began`: if an older one still runs and is nearer to its budget, when that one began.
        """
        with self._lock:
            self._table(executing)
            self._started += 1
            self._batch_started = began or time.monotonic()
            self._budget = budget_s
            self._write()

    def finish(
        self,
        executing: Sequence[tuple[int, int]] = (),
        *,
        began: float = 0.0,
        budget_s: float = 0.0,
    ) -> None:
        """A batch is through, with or without success; `executing` still runs, since `began`
        and within `budget_s` (both 0: since now, and within what the last one had)."""
        with self._lock:
            self._done += 1
            now = time.monotonic()
            # With a second batch in the pipeline the clock starts again for that one.
            self._batch_started = began or (now if executing else 0.0)
            self._budget = budget_s or self._budget
            self._last_ok = now
            self._write()
            self._table(executing)

    def again(self, began: float, budget_s: float) -> None:
        """The clock starts anew; what executes is the same."""
        with self._lock:
            self._batch_started = began
            self._budget = budget_s
            self._write()

    def _table(self, executing: Sequence[tuple[int, int]]) -> None:
        count = min(len(executing), MAX_EXECUTING)
        self._table_seq += 2
        _COUNT.pack_into(self._page, _TABLE_AT, self._table_seq - 1, count)
        if count:
            flat = [number for pair in executing[:count] for number in pair]
            _entries(count).pack_into(self._page, _TABLE_AT + _COUNT.size, *flat)
        _COUNT.pack_into(self._page, _TABLE_AT, self._table_seq, len(executing))

    def _write(self) -> None:
        self._seq += 2
        _SEQ.pack_into(self._page, _RECORD_AT, self._seq - 1)
        _RECORD.pack_into(
            self._page,
            _RECORD_AT + _SEQ.size,
            self._load_bytes,
            self._load_steps,
            self._started,
            self._done,
            self._batch_started,
            self._budget,
            self._last_ok,
        )
        _SEQ.pack_into(self._page, _RECORD_AT, self._seq)


class Reader:
    def __init__(self, fd: int) -> None:
        """Takes over `fd` and closes it: the mapping lives on by itself."""
        self._page = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
        os.close(fd)

    def read(self) -> Progress:
        record: tuple[int, int, int, int, float, float, float] = (0, 0, 0, 0, 0.0, 0.0, 0.0)
        for _ in range(8):
            (before,) = _SEQ.unpack_from(self._page, _RECORD_AT)
            record = _RECORD.unpack_from(self._page, _RECORD_AT + _SEQ.size)
            (after,) = _SEQ.unpack_from(self._page, _RECORD_AT)
            if before == after and before % 2 == 0:
                break
        # A writer that died inside a write leaves an odd number: its last values will have to do.
        return Progress(_BEAT.unpack_from(self._page, 0)[0], *record)

    def executing(self, connection: int) -> frozenset[int] | None:
        """Items of `connection` that had begun; None if that can't be told (assume all had)."""
        seq, count = _COUNT.unpack_from(self._page, _TABLE_AT)
        if seq % 2 or count > MAX_EXECUTING:
            return None
        at = _TABLE_AT + _COUNT.size
        pairs = (_ENTRY.unpack_from(self._page, at + i * _ENTRY.size) for i in range(count))
        return frozenset(item for conn, item in pairs if conn == connection)

    def close(self) -> None:
        self._page.close()

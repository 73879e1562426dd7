"""The proxy's own memory for bulk bodies: a memfd that every worker maps, cut into leased blocks.

`Allocator` is the arithmetic alone. `Arena` adds the memory and the waiting: when it is full,
those who want a block wait in order of arrival, and so do not read their clients' bytes either.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from bisect import bisect_left
from collections import deque
from typing import Final

from .errors import ArenaFull, InputTooLarge

#: Bodies up to this size travel in frames.
INLINE_BYTES: Final = 64 * 1024
GRAIN: Final = 4096


class Allocator:
    """First fit over a sorted list of free extents; neighbours are joined when they come back."""

    def __init__(self, total: int) -> None:
        self.total = total - total % GRAIN
        self.free = self.total
        self._starts: list[int] = [0] if self.total else []
        self._sizes: list[int] = [self.total] if self.total else []

    def take(self, size: int) -> int | None:
        """Offset of a block of at least `size` bytes (rounded up to GRAIN), or None."""
        size = -(-max(size, 1) // GRAIN) * GRAIN
        for at, room in enumerate(self._sizes):
            if room >= size:
                offset = self._starts[at]
                if room == size:
                    del self._starts[at], self._sizes[at]
                else:
                    self._starts[at] += size
                    self._sizes[at] -= size
                self.free -= size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Take back what `take(size)` gave. Raises ValueError for what is free already."""
        size = -(-max(size, 1) // GRAIN) * GRAIN
        at = bisect_left(self._starts, offset)
        before = at > 0 and self._starts[at - 1] + self._sizes[at - 1]
        if offset < 0 or offset + size > self.total or (at > 0 and before > offset):
            raise ValueError(f"block {offset}+{size} is not leased")
        if at < len(self._starts) and offset + size > self._starts[at]:
            raise ValueError(f"block {offset}+{size} is not leased")
        self.free += size
        joins_after = at < len(self._starts) and self._starts[at] == offset + size
        if at > 0 and before == offset:
            self._sizes[at - 1] += size
            if joins_after:
                self._sizes[at - 1] += self._sizes[at]
                del self._starts[at], self._sizes[at]
        elif joins_after:
            self._starts[at] = offset
            self._sizes[at] += size
        else:
            self._starts.insert(at, offset)
            self._sizes.insert(at, size)

    def extents(self) -> list[tuple[int, int]]:
        """Free (offset, size), in order."""
        return list(zip(self._starts, self._sizes, strict=True))


class Lease:
    """A block in use. Free again when everyone who holds it has let go: its reader, and each
    connection it was sent over, because a worker may still read what a client left behind."""

    __slots__ = ("_arena", "_holds", "length", "offset", "size")

    def __init__(self, arena: Arena, offset: int, size: int) -> None:
        self._arena = arena
        self._holds = 1
        self.offset = offset
        self.size = size
        self.length = size  # how much of it is filled; the reader sets it

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self._arena._back(self)

    @property
    def view(self) -> memoryview:
        return self._arena.memory[self.offset : self.offset + self.length]


class Arena:
    """`total` bytes; 0 makes one that has no room for anything, and no memory."""

    def __init__(self, total: int) -> None:
        self._allocator = Allocator(total)
        self._waiting: deque[tuple[int, asyncio.Future[Lease]]] = deque()
        self.fd = -1
        self.map: mmap.mmap | None = None
        self.memory = memoryview(b"")
        if self.total:
            self.fd = os.memfd_create("gpusup-arena", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.total)
            self.map = mmap.mmap(self.fd, self.total)
            self.memory = memoryview(self.map)

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def free(self) -> int:
        return self._allocator.free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def try_lease(self, size: int) -> Lease | None:
        """At once or not at all. Never overtakes those who wait."""
        if self._waiting:
            return None
        offset = self._allocator.take(size)
        return None if offset is None else Lease(self, offset, size)

    async def lease(self, size: int, wait_s: float) -> Lease:
        """Waits for room. Raises InputTooLarge if it can never fit, ArenaFull after `wait_s`."""
        if size > self.total:
            raise InputTooLarge(
                f"a body of {size} bytes is over the {self.total} bytes of server.arena"
            )
        if (at_once := self.try_lease(size)) is not None:
            return at_once
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            async with asyncio.timeout(wait_s):
                return await future
        except (TimeoutError, asyncio.CancelledError) as gone:
            if future.done() and not future.cancelled():
                future.result().release()  # it came in the same moment
            else:
                future.cancel()
                self._serve()  # a big one that gave up may have stood in front of small ones
            if isinstance(gone, TimeoutError):
                raise ArenaFull(
                    f"{self.total - self.free} of {self.total} bytes for bodies are in use, "
                    f"{size} more were not free within {wait_s:.1f} s",
                    retry_after_s=1,
                ) from None
            raise

    def _back(self, lease: Lease) -> None:
        self._allocator.give(lease.offset, lease.size)
        if self._waiting:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.done():
                offset = self._allocator.take(size)
                if offset is None:
                    return
                future.set_result(Lease(self, offset, size))
            self._waiting.popleft()

    def close(self) -> None:
        """Only when nothing is leased any more."""
        if self.map is not None:
            self.memory.release()
            self.map.close()
            os.close(self.fd)
            self.map = None

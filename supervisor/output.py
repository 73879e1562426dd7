"""What workers print: read so that no worker ever waits for us, cut, and kept for the operator.

A worker that floods its pipe must neither block (it would look hung) nor make us busy: beyond a
budget per second its bytes are read and thrown away, and the log says how many.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

LINE_LIMIT: Final = 4096
_READ: Final = 64 * 1024
_BUDGET_PER_S: Final = 1024 * 1024
_LOGGED_PER_S: Final = 200
_TAIL: Final = 8 * 1024


class SlotLog:
    """The last lines of a slot, across generations, each with a number that never comes again."""

    def __init__(self, limit: int, on_line: Callable[[str], None] | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=limit)
        self.count = 0  # lines ever added
        self._on_line = on_line

    def add(self, line: str, *, quiet: bool = False) -> None:
        self._lines.append(line)
        self.count += 1
        if self._on_line and not quiet:
            self._on_line(line)

    def last(self, lines: int | None = None) -> list[str]:
        kept = list(self._lines)
        return kept if lines is None else kept[max(0, len(kept) - lines) :] if lines > 0 else []

    def since(self, number: int) -> list[str]:
        """Lines added after the first `number` ones, as far as they are still kept."""
        return self.last(min(len(self._lines), max(0, self.count - number)))

    def export(self) -> dict[str, Any]:
        return {"lines": list(self._lines), "count": self.count}

    def restore(self, exported: dict[str, Any]) -> None:
        self._lines.extend(exported["lines"])
        self.count = exported["count"]


class LineCutter:
    """Bytes in, lines out. Junk is replaced, endless lines are cut, floods are left out."""

    def __init__(self, log: SlotLog) -> None:
        self._log = log
        self._rest = bytearray()
        self._skipping = False  # inside a line that was cut already
        self._window = -1.0
        self._taken = 0
        self._logged = 0
        self._left_out = 0
        self._tail = b""

    def feed(self, data: bytes, now: float) -> None:
        if now - self._window >= 1.0 or now < self._window:
            self._end_flood()
            self._window = now
            self._taken = 0
            self._logged = 0
        if self._taken >= _BUDGET_PER_S:
            self._left_out += len(data)
            self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
            return
        self._taken += len(data)
        self._cut(data)

    def calm(self, now: float) -> bool:
        """Say what was left out, if the flood is over. Whether there was a flood."""
        if self._left_out and now - self._window >= 1.0:
            self._end_flood()
        return self._left_out > 0

    def end(self) -> None:
        """There is nothing more: the unfinished line counts as one."""
        self._end_flood()
        if self._rest:
            self._emit(bytes(self._rest))
            self._rest.clear()

    def _end_flood(self) -> None:
        if not self._left_out:
            return
        left_out = self._left_out - len(self._tail)
        tail, self._tail, self._left_out = self._tail, b"", 0
        if self._rest:
            self._emit(bytes(self._rest))
            self._rest.clear()
        self._skipping = False
        if left_out > 0:
            self._log.add(f"[{left_out} bytes of output left out]")
        self._logged = 0
        self._cut(tail)

    def _cut(self, data: bytes) -> None:
        pieces = data.split(b"\n")
        for piece in pieces[:-1]:
            self._add(piece)
            if not self._skipping:
                self._emit(bytes(self._rest))
            self._rest.clear()
            self._skipping = False
        self._add(pieces[-1])

    def _add(self, piece: bytes) -> None:
        if self._skipping:
            return
        room = LINE_LIMIT - len(self._rest)
        self._rest += piece[:room]
        if len(piece) > room:
            self._emit(bytes(self._rest) + b" [cut]")
            self._rest.clear()
            self._skipping = True

    def _emit(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        # Control characters could repaint the operator's terminal.
        text = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)
        self._logged += 1
        if self._logged == _LOGGED_PER_S + 1:
            self._log.add("[more lines than can be logged; see `gpusupctl logs`]")
        self._log.add(text, quiet=self._logged > _LOGGED_PER_S)


class OutputReader:
    """Reads a worker's pipe until it ends. Takes over `fd`."""

    def __init__(self, fd: int, log: SlotLog) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._cutter = LineCutter(log)
        self._loop = asyncio.get_running_loop()
        self._calming: asyncio.TimerHandle | None = None
        self._loop.add_reader(fd, self._readable)

    def finish(self) -> None:
        """The worker is dead: take what is still in the pipe and let go.

        What the worker started may hold the pipe open for ever, so its end is not waited for.
        """
        for _ in range(32):  # a pipe holds at most 1 MiB
            if self._fd < 0 or not self._readable():
                break
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._cutter.end()

    def export(self) -> int:
        """Let go of the descriptor and return it."""
        if self._fd < 0:  # a worker may close its output and live on: hand on one that has ended
            fd, write_fd = os.pipe2(os.O_CLOEXEC)
            os.close(write_fd)
            return fd
        self._loop.remove_reader(self._fd)
        self._cutter.end()
        fd, self._fd = self._fd, -1
        return fd

    def _calm_later(self) -> None:
        """The end of a flood is said also when nothing follows it."""
        if self._calming is None and self._fd >= 0 and self._cutter.calm(self._loop.time()):
            self._calming = self._loop.call_later(1.0, self._calm)

    def _calm(self) -> None:
        self._calming = None
        self._calm_later()

    def _readable(self) -> bool:
        with suppress(BlockingIOError, InterruptedError):
            data = os.read(self._fd, _READ)
            if data:
                self._cutter.feed(data, self._loop.time())
                self._calm_later()
                return True
            self.close()
        return False

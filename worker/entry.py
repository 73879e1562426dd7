"""One request inside the worker, and the seam between the sockets and the engine.

The socket side makes entries and hands them to `EngineLike.offer`; the engine answers each through
`Entry.reply`, from whatever thread it likes, at least once and with exactly one last answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import wire
from .model import Request


@dataclass(slots=True, eq=False)
class Entry:
    """`arena` maps the sending proxy's memory; `Block`s of the item point into it."""

    item: wire.Item
    connection: int
    reply: Callable[[wire.Answer], None]
    arena: memoryview | None = None
    arrived: float = 0.0
    cancelled: bool = False
    claimed: bool = False  # it is in a batch, or has been; guarded by the desk
    request: Request | None = None
    tensor: Any = None  # decoded: a torch tensor, or a dict of them by name
    bucket: Any = None
    credit: int = 0
    whole: Any = None  # answers.Whole, of an item that was split
    decode_s: float = 0.0

    def data(self, part: wire.Part) -> memoryview:
        """The part's bytes, wherever they lie. Raises ValueError if they lie outside the arena."""
        if isinstance(part.data, bytes):
            return memoryview(part.data)
        block = part.data
        if self.arena is None or block.offset < 0 or block.offset + block.length > len(self.arena):
            size = 0 if self.arena is None else len(self.arena)
            raise ValueError(
                f"block {block.offset}+{block.length} lies outside the arena of {size} bytes"
            )
        return self.arena[block.offset : block.offset + block.length]


class LoadProblem(Exception):
    """The model can't be served. `cause` and text go to the supervisor as `LoadFailed`."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class EngineLike(Protocol):
    """What the socket side needs of an engine. All but `load` and `run` may be called from any
    thread and return at once.

    `reply` and `on_relief` never call back into the engine, so a lock may be held around them;
    `reply_all` asks `load_now`, so a lock that `load_now` takes must not be held around it.
    """

    #: Set by the socket side before `load`; callable from any thread, never blocks. To be called
    #: when `free_rows` goes from 0 to more while there is no answer to carry it.
    on_relief: Callable[[], None]
    #: Set likewise. Answers many entries with one frame and one write a connection, sent from the
    #: calling thread: for the end of a batch. The same as each entry's `reply`, only cheaper.
    reply_all: Callable[[Sequence[tuple[Entry, wire.Answer]]], None]

    def load(
        self, tell: Callable[[wire.FromWorkerControl], None], wait_go: Callable[[], None]
    ) -> wire.WorkerReady:
        """Import the handler, load, warm up, compare the golden example. Main thread.

        `tell` sends Loading and Prepared; `wait_go` blocks a held worker until Go.
        Raises LoadProblem.
        """
        ...

    def run(self) -> None:
        """Compute batches in the calling (main) thread until `stop`."""
        ...

    def offer(self, entries: Sequence[Entry]) -> None:
        """Take entries, or answer those beyond the row budget with `busy`."""
        ...

    def cancel(self, connection: int, ids: Sequence[int]) -> None: ...

    def recall(self, connection: int, ids: Sequence[int]) -> None:
        """Answer those that have not begun; they will not begin here any more."""
        ...

    def credit(self, connection: int, item: int, count: int) -> None: ...

    def drop(self, connection: int) -> None:
        """The connection is gone: nothing of it that has not begun is computed."""
        ...

    def map_arena(self, connection: int, arena: memoryview) -> None:
        """A proxy's arena, to be registered with the device once; undone by `drop`."""
        ...

    def drain(self, when_empty: Callable[[], None]) -> None: ...

    def stop(self) -> None: ...

    def trim(self) -> None: ...

    def load_now(self) -> wire.Load: ...

    def pong(self, serial: int) -> wire.Pong: ...

    def report(self, kind: str) -> str: ...


#: Called by the engine when its context is poisoned; tells the supervisor and exits with 70.
Fence = Callable[[str], None]

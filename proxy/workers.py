"""The workers this proxy is connected to, and what is in flight at each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gpusup.supervisor.wire import FromProxy, InputDied, Notice, Route
from gpusup.worker import wire

from .arena import Arena
from .door import Call
from .errors import ProxyError
from .routes import Place
from .upstream import BrokenWorker, Connection, greet

#: A worker that said busy although it seemed to have room is left alone for this long.
BUSY_WAIT_S = 0.005
_RETRY_FROM_S = 0.02
_RETRY_MOST_S = 1.0
#: Answers of a stream that a worker may send before its client has taken any.
STREAM_CREDIT = 16


class Waits(Protocol):
    """Who waits for an entry's answer without a task of its own; told once, either way."""

    def answered(self, answer: wire.Answer) -> None: ...

    def failed(self, error: ProxyError) -> None: ...


@dataclass(slots=True, eq=False)
class Entry:
    """One request between admission and answer. In the queue while `waiting`; at a worker while
    `worker` is set, even when its client is gone (`over`), because its blocks are in use there."""

    call: Call
    version: str  # it is bound to; "": to none
    rows: int
    cost: int
    priority: int
    arrived: float
    deadline: float
    future: asyncio.Future[wire.Answer] | None = None
    waits: Waits | None = None
    events: asyncio.Queue[wire.Answer | ProxyError] | None = None  # of a stream
    waiting: bool = False
    over: bool = False
    recalled: bool = False  # where it is, it is not to begin any more
    begun: bool = False  # a stream's first event is out: it can't be repeated
    degrade: str = ""
    held_until: float = 0.0  # waits without any worker until then; 0: there is one
    timer: int = 0
    worker: Worker | None = None
    id: int = 0
    sent_at: float = 0.0

    def finish(self, answer: wire.Answer) -> None:
        if self.waits is not None:
            self.waits.answered(answer)
        elif self.events is not None:
            self.events.put_nowait(answer)
        elif self.future is not None and not self.future.done():
            self.future.set_result(answer)

    def fail(self, error: ProxyError) -> None:
        if self.waits is not None:
            self.waits.failed(error)
        elif self.events is not None:
            self.events.put_nowait(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)


class Owner(Protocol):
    """Who sends entries; told what became of them."""

    def settled(self, entry: Entry, worker: Worker) -> None:
        """It is at `worker` no longer. Called once for each entry sent, before what follows."""

    def answered(self, entry: Entry, worker: Worker, answer: wire.Answer) -> None: ...

    def again(self, entry: Entry, why: str) -> None:
        """It did not run there; it is to go elsewhere."""

    def died(self, entry: Entry, worker: Worker, input_hash: str) -> None:
        """It was executing when its worker ended."""

    def room(self) -> None:
        """A worker may take more."""


Tell = Callable[[FromProxy], None]


class Worker(Place):
    __slots__ = ("connection", "ended", "gone", "in_flight", "key", "task")

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self.key = f"{route.slot}.{route.generation}"
        self.connection: Connection | None = None
        self.in_flight: dict[int, Entry] = {}
        self.gone = False  # the supervisor no longer names it
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


def _same(connection: Connection) -> Connection:
    return connection


class Workers:
    def __init__(self, name: str, arena: Arena, owner: Owner, tell: Tell) -> None:
        self._name = name
        self._arena = arena
        self._owner = owner
        self._tell = tell
        self._workers: dict[tuple[str, int], Worker] = {}
        self._leaving: set[Worker] = set()  # out of the table, but with work in flight
        self._unflushed: set[Worker] = set()
        self.proxies = 1

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def update(self, routes: Iterable[Route]) -> None:
        """Connect to the new ones; leave the old ones when their last answer is there."""
        named: dict[tuple[str, int], Worker] = {}
        for route in routes:
            key = (route.slot, route.generation)
            worker = self._workers.pop(key, None)
            if worker is None:
                worker = Worker(route)
                worker.task = asyncio.get_running_loop().create_task(self._serve(worker))
            worker.route = route
            worker.open = route.state == "open"
            named[key] = worker
        for worker in self._workers.values():
            worker.gone = True
            worker.open = False
            if worker.in_flight:
                self._leaving.add(worker)
            else:
                self._leave(worker)
        self._workers = named

    def _leave(self, worker: Worker) -> None:
        self._leaving.discard(worker)
        if worker.connection is not None:
            worker.connection.close()
        elif worker.task is not None:
            worker.task.cancel()

    async def _serve(self, worker: Worker) -> None:
        """Keep one connection to it for as long as the supervisor names it."""
        delay = _RETRY_FROM_S
        told = ""
        loop = asyncio.get_running_loop()
        while not worker.gone:
            try:
                greeted = await greet(worker.route, self._name, self._arena.fd, self._arena.total)
            except (OSError, TimeoutError, BrokenWorker) as error:
                text = str(error) or type(error).__name__
                if text != told:
                    told = text
                    self._notice("worker-unreachable", worker, text)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _RETRY_MOST_S)
                continue
            worker.ended.clear()
            connection = Connection(
                greeted,
                answered=partial(self._answers, worker),
                lost=partial(self._lost, worker),
                paused=partial(self._paused, worker),
                refused=partial(self._refused, worker),
            )
            worker.connection = connection
            worker.connected = True
            told = ""  # the next trouble is a new one
            worker.loaded(greeted.welcome.load, self.proxies)
            await loop.create_unix_connection(partial(_same, connection), sock=greeted.sock)
            if not self._named(worker) and not worker.in_flight:
                connection.close()
            self._owner.room()
            await worker.ended.wait()
            # A connection that lasted shows that the next attempt need not wait.
            delay = _RETRY_FROM_S
            await asyncio.sleep(delay)

    def _named(self, worker: Worker) -> bool:
        return self._workers.get((worker.slot, worker.generation)) is worker

    def _notice(self, kind: str, worker: Worker, text: str) -> None:
        self._tell(
            Notice(kind, {"slot": worker.slot, "generation": worker.generation, "text": text})
        )

    def _paused(self, worker: Worker, paused: bool) -> None:
        worker.paused = paused
        if not paused:
            self._owner.room()

    # -- there ---------------------------------------------------------------------------------

    def send(self, worker: Worker, entry: Entry, now: float) -> None:
        """Goes out with the next `flush`."""
        connection = worker.connection
        assert connection is not None
        call = entry.call
        entry.worker = worker
        entry.id = connection.next_id()
        entry.sent_at = now
        worker.in_flight[entry.id] = entry
        worker.sent(entry.rows)
        for lease in call.leases:
            lease.hold()
        call.served_version = worker.route.version
        connection.add(
            wire.Item(
                entry.id,
                call.parts,
                call.method,
                entry.rows,
                entry.deadline,
                call.priority,
                entry.degrade,
                call.params,
                call.request_id,
                STREAM_CREDIT if entry.events is not None else 0,
                entry.events is not None,
                call.received or entry.arrived,
            )
        )
        self._unflushed.add(worker)

    def flush(self) -> None:
        for worker in self._unflushed:
            if worker.connection is not None:
                worker.connection.flush()
        self._unflushed.clear()

    def cancel(self, entry: Entry) -> None:
        """Nobody waits for it any more. It is still answered once."""
        worker = entry.worker
        if worker is not None and worker.connection is not None:
            worker.connection.cancel([entry.id])

    def recall(self, worker: Worker, has_others: Callable[[Entry], bool]) -> None:
        """Ask back what has not begun at a worker that does not get on, if others can take it."""
        connection = worker.connection
        if connection is None:
            return
        executing = connection.progress.executing(connection.welcome.connection) or ()
        ids = []
        for entry in worker.in_flight.values():
            if not (entry.recalled or entry.over or entry.begun or entry.degrade) and (
                entry.id not in executing and entry.call.method == "predict" and has_others(entry)
            ):
                entry.recalled = True
                ids.append(entry.id)
        if ids:
            connection.cancel(ids, recall=True)

    def credit(self, entry: Entry, count: int) -> None:
        worker = entry.worker
        if worker is not None and worker.connection is not None:
            worker.connection.credit(entry.id, count)

    # -- and back ------------------------------------------------------------------------------

    def _settle(self, worker: Worker, entry: Entry) -> None:
        worker.settled(entry.rows)
        entry.worker = None
        for lease in entry.call.leases:
            lease.release()
        self._owner.settled(entry, worker)

    def _answers(self, worker: Worker, frame: wire.Answers) -> None:
        owner = self._owner
        in_flight = worker.in_flight
        refused: list[tuple[Entry, str]] = []
        for answer in frame.answers:
            if answer.more:
                streaming = in_flight.get(answer.id)
                if streaming is not None:
                    owner.answered(streaming, worker, answer)
                continue
            entry = in_flight.pop(answer.id, None)
            if entry is None:
                continue  # an id of nobody: late, or never ours
            self._settle(worker, entry)
            if answer.status == "busy" or answer.status == "draining":
                refused.append((entry, answer.status))
            elif entry.recalled and answer.status == "cancelled":
                entry.recalled = False
                refused.append((entry, "suspect"))
            else:
                owner.answered(entry, worker, answer)
        worker.loaded(frame.load, self.proxies)
        if refused:
            if any(why == "draining" for _, why in refused):
                worker.open = False  # until the supervisor says otherwise
            worker.blocked_until = time.monotonic() + BUSY_WAIT_S
            asyncio.get_running_loop().call_later(BUSY_WAIT_S, owner.room)
            for entry, why in reversed(refused):
                owner.again(entry, why)
        if worker.gone and not in_flight:
            self._leave(worker)
        owner.room()

    def _refused(self, worker: Worker, id: int, text: str) -> None:
        """It is too large to be sent. The client hears of it; the worker never does."""
        entry = worker.in_flight.pop(id, None)
        if entry is None:
            return  # the connection ended in between
        self._settle(worker, entry)
        self._owner.answered(entry, worker, wire.Answer(id, "too_large", text=text, started=False))
        if worker.gone and not worker.in_flight:
            self._leave(worker)
        self._owner.room()

    def _lost(self, worker: Worker) -> None:
        """The worker's end: what had begun there, and what had not."""
        connection = worker.connection
        worker.connection = None
        worker.connected = False
        worker.paused = False
        worker.ended.set()
        self._leaving.discard(worker)
        if connection is None:
            return
        if connection.problem:
            self._notice("worker-broken", worker, connection.problem)
        if not worker.in_flight:
            return
        executing = connection.progress.executing(connection.welcome.connection)
        entries = list(worker.in_flight.values())
        worker.in_flight.clear()
        unstarted: list[Entry] = []
        for entry in entries:
            if executing is not None and entry.id not in executing and not entry.begun:
                self._settle(worker, entry)
                unstarted.append(entry)
                continue
            # Before its blocks go: the hash is over what they hold.
            input_hash = entry.call.input_hash(self._arena.memory)
            self._tell(
                InputDied(
                    input_hash, entry.call.model, worker.slot, worker.generation,
                    entry.sent_at, time.monotonic(),
                )
            )  # fmt: skip
            self._settle(worker, entry)
            self._owner.died(entry, worker, input_hash)
        for entry in reversed(unstarted):
            self._owner.again(entry, "died")
        self._owner.room()

    def in_flight(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for worker in (*self._workers.values(), *self._leaving):
            if worker.in_flight:
                counts[worker.slot] = counts.get(worker.slot, 0) + len(worker.in_flight)
        return counts

    async def close(self) -> None:
        workers = [*self._workers.values(), *self._leaving]
        self._workers = {}
        for worker in workers:
            worker.gone = True
            if worker.task is not None:
                worker.task.cancel()
            if worker.connection is not None:
                worker.connection.abort()
        await asyncio.gather(
            *(worker.task for worker in workers if worker.task is not None),
            return_exceptions=True,
        )

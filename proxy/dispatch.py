"""Admission, and the wait for an answer."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator

from gpusup.worker import wire

from .door import Call, Outcome
from .errors import (
    DeadlineExceeded,
    Draining,
    InputRefused,
    ModelNotFound,
    NoWorker,
    ProxyError,
    QueueFull,
)
from .lanes import WAITING_LEAST, Lane, Served
from .lines import Lines
from .queue import rank
from .refusals import refusal
from .routes import bind_version
from .suspects import REFUSED
from .workers import STREAM_CREDIT, Entry, Waits


class Dispatcher(Lines):
    """The one door to all workers. See Door for what `infer` and `stream` promise."""

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, call: Call, *, stream: bool = False, waits: Waits | None = None) -> Entry:
        """Queue it, or raise the reason why not. Nothing is held by it yet but a place in line."""
        served = self._served.get(call.model)
        if served is None or call.model not in self.models:
            raise ModelNotFound(f"unknown model {call.model!r}")
        info = served.info
        if call.version is not None and not self.knows_version(info, call.version):
            raise ModelNotFound(f"model {call.model!r} has no version {call.version!r}")
        if self.snapshot.draining:
            raise Draining("the server is draining", retry_after_s=served.soon(self._rng))
        refused = self._suspects.refused
        if refused and call.is_one_of(refused, self._arena.memory):
            self._counts.add("gpusup_refused_total", ("poisoned",))
            raise InputRefused(REFUSED)
        now = time.monotonic()
        self.used.add(call.model)
        if not call.deadline:
            call.deadline = now + (info.request_timeout_s or self._config.server.request_timeout)
        if call.deadline <= now:
            raise DeadlineExceeded("the deadline had passed when the request was read")
        point = zlib.crc32(call.session.encode()) / 2**32 if call.session else None
        version = bind_version(info, call.version, point, self._rng)
        lane = self._lane(call.model, version)
        cost = self._cost(served, call)
        entry = Entry(call, version, call.rows, cost, rank(call.priority), now, call.deadline)
        if waits is not None:
            entry.waits = waits
        elif stream:
            entry.events = asyncio.Queue()
        else:
            entry.future = asyncio.get_running_loop().create_future()
        if not lane.present:
            self._admit_held(lane, entry, now)
        elif not self._memory.easy(cost) and (step := self._judge(lane, entry)) is not None:
            self._send_degraded(lane, entry, step, now)
            return entry
        elif served.waiting >= WAITING_LEAST and self._is_full(lane, lane.most_waiting()):
            raise QueueFull(
                f"{served.waiting} requests wait for {call.model!r} already",
                retry_after_s=served.soon(self._rng),
            )
        self._queue(lane, entry)
        entry.timer = self._deadlines.add(entry, min(entry.deadline, entry.held_until or 1e300))
        self._arm()
        return entry

    def _is_full(self, lane: Lane, most: int) -> bool:
        """Those who came in this very turn of the loop and can go at once do not count."""
        if lane.served.waiting >= most:
            self._pump()
        return lane.served.waiting >= most

    def _admit_held(self, lane: Lane, entry: Entry, now: float) -> None:
        served = lane.served
        info = served.info
        on_demand = info.on_demand and info.state in ("unloaded", "loading")
        if not (info.holding or on_demand):
            raise served.no_worker(self._rng)
        if served.waiting >= info.hold_requests:
            raise NoWorker(
                f"no worker is ready for model {info.name!r} and {served.waiting} requests wait "
                "for one already",
                retry_after_s=served.soon(self._rng),
            )
        if on_demand:
            if info.state == "unloaded":
                self._want(served, now)
        else:
            entry.held_until = now + info.hold_s

    def _cost(self, served: Served, call: Call) -> int:
        costs = served.costs
        if not costs.batch:
            return 0
        if len(call.parts) != 1 or not call.parts[0].datatype:
            return costs.of(None, "", call.rows)
        part = call.parts[0]
        return costs.of(part.shape[1:], part.datatype, call.rows)

    def _judge(self, lane: Lane, entry: Entry) -> str | None:
        """None: queue it. A degrade step: serve it so, now. Raises the refusal."""
        served = lane.served
        devices = {w.route.device for w in lane.workers}
        if not devices:
            return None  # suspect workers only: wait for them
        band = self._memory.best(devices, entry.cost)
        if band == "normal":
            return None
        name = served.info.name
        if band == "shed" and (step := self._step_down(lane, entry)) is not None:
            return step
        if band == "queue" or self._memory.eases(devices, entry.cost):
            most = self._config.watermark.queue_per_slot * len(lane.workers)
            if not self._is_full(lane, max(1, most // self._workers.proxies)):
                return None
            raise QueueFull(
                f"memory is short and {served.waiting} requests wait for {name!r}",
                retry_after_s=served.soon(self._rng),
            )
        raise self._memory.shed(name, entry, sorted(devices), served.soon(self._rng))

    def _step_down(self, lane: Lane, entry: Entry) -> str | None:
        """The step of the degrade ladder that has room for it."""
        now = time.monotonic()
        served = lane.served
        for step, limit in served.info.degrade:
            if served.degraded.get(step, 0) < limit and self._choose(
                lane.degraded(step), entry, None, now
            ):
                return step
        return None

    def _spill(self, lane: Lane, now: float) -> None:
        """The device went into the shed band with these in line. While something computes, its end
        may make room; when nothing does, waiting would change nothing."""
        if not lane.workers or not all(worker.idle for worker in lane.workers):
            return
        devices = {worker.route.device for worker in lane.workers}
        served = lane.served
        for entry in list(lane.queue):
            if entry.degrade:
                continue  # it has its place on the ladder, and is back in line for that
            refusal: ProxyError | None = None
            try:
                if self._memory.best(devices, entry.cost) != "shed":
                    continue
                step = self._step_down(lane, entry)
                if step is None:
                    if self._memory.eases(devices, entry.cost):
                        continue
                    soon = served.soon(self._rng)
                    refusal = self._memory.shed(served.info.name, entry, sorted(devices), soon)
            except ProxyError as error:  # it could never fit there
                step, refusal = None, error
            self._move_out(lane, entry)  # a worker may send it back
            if step is not None:
                self._deadlines.remove(entry, entry.timer)
                self._send_degraded(lane, entry, step, now)
            elif refusal is not None:
                self._fail(entry, refusal)

    def _send_degraded(self, lane: Lane, entry: Entry, step: str, now: float) -> None:
        """At once or not at all: what is short now would not become less so by waiting."""
        worker = self._choose(lane.degraded(step), entry, None, now)
        assert worker is not None
        served = lane.served
        served.degraded[step] = served.degraded.get(step, 0) + 1
        entry.degrade = step
        entry.timer = self._deadlines.add(entry, entry.deadline)
        self._arm()
        self.in_flight += 1
        self._memory.tell_shed(served.info.name, entry, lane.workers[0].route.device)
        # A fallback slot is another kind of device, for which nothing was measured.
        if worker.fallback or not self._memory.take(worker, entry, served.costs.batch):
            entry.cost = 0
        self._counts.add("gpusup_degraded_total", (served.info.name, step))
        self._workers.send(worker, entry, now)
        self.room()

    # -- who waits -----------------------------------------------------------------------------

    def begin(self, call: Call, waits: Waits) -> Entry:
        """`infer` for callbacks: `waits` is told of the answer (see `ended`) or of the failure,
        unless `left` is called before. Raises the ProxyError of an admission refused."""
        try:
            return self._admit(call, waits=waits)
        except ProxyError as error:
            self.count_failure(call, error, time.monotonic())
            raise

    def ended(self, entry: Entry, answer: wire.Answer) -> None:
        """Count an answer; raises what it means if it is none of "ok"."""
        call = entry.call
        if answer.status != "ok":
            error = refusal(answer, self._soon(call.model))
            self.count_failure(call, error, entry.arrived)
            raise error
        self._succeeded(entry, answer)

    def _succeeded(self, entry: Entry, answer: wire.Answer) -> None:
        call = entry.call
        began = entry.arrived
        self._counts.done(
            call.model,
            call.served_version,
            entry.rows,
            entry.sent_at - began,
            time.monotonic() - (call.received or began),
            answer,
        )

    async def infer(self, call: Call) -> Outcome:
        begun = time.monotonic()
        try:
            entry = self._admit(call)
            assert entry.future is not None
            try:
                answer = await entry.future
            except asyncio.CancelledError:
                self.left(entry)
                raise
            if answer.status != "ok":
                raise refusal(answer, self._soon(call.model))
        except ProxyError as error:
            self.count_failure(call, error, begun)
            raise
        self._succeeded(entry, answer)
        return Outcome(answer, call.served_version)

    async def stream(self, call: Call) -> AsyncGenerator[wire.Answer, None]:
        begun = time.monotonic()
        entry: Entry | None = None
        try:
            entry = self._admit(call, stream=True)
            assert entry.events is not None
            taken = 0
            while True:
                event = await entry.events.get()
                if isinstance(event, ProxyError):
                    raise event
                if event.status != "ok":
                    raise refusal(event, self._soon(call.model))
                if not event.more:
                    self._succeeded(entry, event)
                yield event
                if not event.more:
                    return
                taken += 1
                if taken % (STREAM_CREDIT // 2) == 0:
                    self._workers.credit(entry, STREAM_CREDIT // 2)
        except ProxyError as error:
            self.count_failure(call, error, begun)
            raise
        finally:
            if entry is not None and not entry.over:
                self.left(entry)

    def count_failure(self, call: Call, error: ProxyError, begun: float) -> None:
        """An unknown model's name is the client's word and no label."""
        if call.model in self.models:
            version = call.served_version or call.version or self.models[call.model].version
            seconds = time.monotonic() - (call.received or begun)
            self._counts.failed(call.model, version, error.code, seconds)

    def left(self, entry: Entry) -> None:
        """Its client is gone. What a worker has of it stays leased until that is through."""
        if entry.future is not None and entry.future.done() and not entry.future.cancelled():
            entry.future.exception()  # the answer came in the same moment
        if entry.over:
            return
        when = "running"
        self._over(entry)
        if entry.waiting:
            when = "queued"
            self._unqueue(self._lanes[entry.call.model, entry.version], entry)
        else:
            self._workers.cancel(entry)
        self._counts.add("gpusup_client_disconnects_total", (entry.call.model, when))
        self._counts.add("gpusup_requests_total", (entry.call.model, "client_left"))

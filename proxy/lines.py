"""From the line to a worker and back: the pump, the deadlines, and what workers' ends mean.

All requests that can go in one turn of the loop go together: handlers push and wake, one pump
sends, each worker gets one frame.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from gpusup.conf.schema import Config
from gpusup.supervisor.wire import (
    Band,
    DeviceUpdate,
    FromProxy,
    InputSurvived,
    ModelInfo,
    Snapshot,
    WantModel,
)
from gpusup.worker import wire

from .arena import Arena
from .counts import Counts
from .errors import DeadlineExceeded, InputRefused, NoWorker, ProxyError, WorkerLost
from .lanes import Lane, Served, hopeless
from .memory import Memory
from .queue import Deadlines
from .routes import choose
from .suspects import REFUSED, Suspects
from .workers import Entry, Worker, Workers

#: Who was the only one here for so long is alone.
_ALONE_S: Final = 0.02


class Lines:
    """Requests in line, and the workers they go to. What is admitted is decided elsewhere."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        arena: Arena,
        counts: Counts,
        tell: Callable[[FromProxy], None],
        rng: random.Random,
    ) -> None:
        self._config = config
        self._arena = arena
        self._counts = counts
        self._tell = tell
        self._rng = rng
        self._memory = Memory(config.watermark, name, counts, tell, lambda: self.in_flight)
        self._workers = Workers(name, arena, self, tell)
        self._served: dict[str, Served] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._active: dict[Lane, None] = {}  # with someone waiting; an ordered set
        self._deadlines: Deadlines[Entry] = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._woken = False
        self._suspects = Suspects()
        self.models: dict[str, ModelInfo] = {}
        self.used: set[str] = set()
        self.in_flight = 0  # requests from admission to answer
        self._crowded_at = 0.0  # when the last one came that was not the only one
        self.snapshot = Snapshot(
            serial=0, routes=(), models=(), devices=(), ready=False, draining=False,
            reason="the supervisor has not said anything yet",
        )  # fmt: skip

    # -- what the supervisor says --------------------------------------------------------------

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._suspects.update(snapshot.poisoned, snapshot.suspects, time.monotonic())
        self.models = {model.name: model for model in snapshot.models}
        for name, info in self.models.items():
            served = self._served.get(name)
            if served is None:
                section = self._config.models.get(name)
                self._served[name] = Served(info, section.starvation if section else 5.0)
            else:
                served.update(info)
        self._workers.proxies = max(1, snapshot.proxies)
        self._workers.update(snapshot.routes)
        self._memory.on_devices(snapshot.devices)
        for key, lane in list(self._lanes.items()):
            lane.refresh(self._workers.all())
            self._strand(lane)
            model = self.models.get(key[0])
            if not lane.queue and (model is None or not self.knows_version(model, key[1])):
                del self._lanes[key]
        for name in [name for name in self._served if name not in self.models]:
            if not self._served[name].waiting:
                del self._served[name]
        for worker in self._workers.all():
            if worker.route.state == "suspect" and worker.in_flight:
                self._workers.recall(worker, self._has_others)
        self.room()

    def on_devices(self, update: DeviceUpdate) -> None:
        self._memory.on_devices(update.devices)
        self.room()

    def knows_version(self, model: ModelInfo, version: str) -> bool:
        """Whether a request can be bound to it; "" is none in particular."""
        return (
            version in ("", model.version, model.canary_version)
            or version in model.versions
            or any(
                worker.route.version == version and worker.route.model == model.name
                for worker in self._workers.all()
            )
        )

    def _lane(self, name: str, version: str) -> Lane:
        lane = self._lanes.get((name, version))
        if lane is None:
            lane = self._lanes[name, version] = Lane(self._served[name], version)
            lane.refresh(self._workers.all())
        return lane

    def _has_others(self, entry: Entry) -> bool:
        """Whether an open worker could take it instead of the one that has it."""
        lane = self._lanes.get((entry.call.model, entry.version))
        return lane is not None and bool(lane.workers)

    def _strand(self, lane: Lane) -> None:
        """Those who wait where no worker is: rebind, hold, or answer them."""
        if lane.present or not lane.queue:
            for entry in lane.queue:
                entry.held_until = 0.0
            return
        info = lane.served.info
        removed = info.name not in self.models
        given_up = removed or hopeless(info)
        now = time.monotonic()
        if info.on_demand and info.state == "unloaded" and not removed:
            self._want(lane.served, now)  # it left just when they came
        for entry in list(lane.queue):
            if lane.version and entry.call.version is None and not removed:
                self._move_out(lane, entry)  # bound by the canary, which is gone
                entry.version = ""
                self._queue(self._lane(info.name, ""), entry)
            elif given_up:
                self._unqueue(lane, entry)
                self._fail(entry, lane.served.no_worker(self._rng))
            elif not entry.held_until and not info.on_demand:
                self._hold(entry, now + info.hold_s)

    def _want(self, served: Served, now: float) -> None:
        """Have it loaded; the first of those who wait says so for all."""
        if now - served.wanted_at > 1.0:
            served.wanted_at = now
            self._tell(WantModel(served.info.name))

    # -- queues --------------------------------------------------------------------------------

    def _queue(self, lane: Lane, entry: Entry, *, front: bool = False) -> None:
        lane.queue.push(entry, front=front)
        lane.served.waiting += 1
        self._active[lane] = None
        self.room()
        self.in_flight += 1
        if self.in_flight > 1:
            self._crowded_at = entry.arrived

    def _unqueue(self, lane: Lane, entry: Entry) -> None:
        lane.queue.discard(entry)
        lane.served.waiting -= 1
        self.in_flight -= 1

    def _move_out(self, lane: Lane, entry: Entry) -> None:
        """`_unqueue` for one that may stand in a line again."""
        lane.queue.remove(entry)
        lane.served.waiting -= 1
        self.in_flight -= 1

    def room(self) -> None:
        """Something changed for the better: look again, in the next turn of the loop but one.

        In between the loop looks at its sockets once more. What lies there already goes along:
        fewer and larger frames, and a worker that is woken on our core disturbs nothing.
        """
        if not self._woken:
            self._woken = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._pump)

    def hurry(self) -> None:
        """After an admission: if nobody else is here, there is nothing that could go along.

        Nobody else has been for a while: clients who were answered in one frame are back within
        moments of each other, and the first of them is not alone.
        """
        alone = time.monotonic() - self._crowded_at > _ALONE_S
        if alone and self.in_flight == 1 and self._woken:
            self._pump()

    def _pump(self) -> None:
        self._woken = False
        now = time.monotonic()
        for lane in list(self._active):
            self._pump_lane(lane, now)
            if not lane.queue:
                del self._active[lane]
        self._workers.flush()

    def _pump_lane(self, lane: Lane, now: float) -> None:
        queue = lane.queue
        while (entry := queue.head(now)) is not None:
            workers = lane.workers
            band: Callable[[Worker], Band] | None = None
            if entry.degrade:
                workers = lane.degraded(entry.degrade)
            elif not self._memory.easy(entry.cost):
                band = partial(self._memory.band, entry.cost)
            worker = self._choose(workers, entry, band, now)
            if worker is None:
                if band is not None:
                    self._spill(lane, now)
                return
            if not self._memory.take(worker, entry, lane.served.costs.batch):
                return
            queue.take(entry)
            lane.served.waiting -= 1
            self._workers.send(worker, entry, now)

    def _spill(self, lane: Lane, now: float) -> None:
        """What was admitted in a better band, and would now wait for its deadline."""

    def _choose(
        self,
        workers: Sequence[Worker],
        entry: Entry,
        band: Callable[[Worker], Band] | None,
        now: float,
    ) -> Worker | None:
        return choose(
            workers, entry.rows, now, band=band, headroom=self._memory.headroom, rng=self._rng
        )

    # -- times ---------------------------------------------------------------------------------

    def _hold(self, entry: Entry, until: float) -> None:
        self._deadlines.remove(entry, entry.timer)
        entry.held_until = until
        entry.timer = self._deadlines.add(entry, min(until, entry.deadline))
        self._arm()

    def _arm(self) -> None:
        at = self._deadlines.next_at()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        delay = max(0.0, at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._due)

    def _due(self) -> None:
        self._timer = None
        now = time.monotonic()
        for entry in self._deadlines.due(now):
            if entry.over:
                continue
            if now < entry.deadline:
                lane = self._lanes.get((entry.call.model, entry.version))
                if entry.waiting and lane is not None and entry.held_until and not lane.present:
                    self._unqueue(lane, entry)
                    self._fail(entry, lane.served.no_worker(self._rng))
                else:
                    entry.timer = self._deadlines.add(entry, entry.deadline)
            else:
                self._expire(entry, now)
        self._arm()

    def _expire(self, entry: Entry, now: float) -> None:
        where = "at a worker"
        if entry.waiting:
            where = "in the queue"
            self._unqueue(self._lanes[entry.call.model, entry.version], entry)
        else:
            self._workers.cancel(entry)
        self._fail(
            entry,
            DeadlineExceeded(
                f"the deadline passed {now - entry.arrived:.3f} s after arrival, {where}",
                headers={"x-should-retry": "false"},
            ),
        )

    def _fail(self, entry: Entry, error: ProxyError) -> None:
        self._over(entry)
        entry.fail(error)

    def _over(self, entry: Entry) -> None:
        entry.over = True
        self._deadlines.remove(entry, entry.timer)
        if entry.degrade and entry.worker is None:  # else its place is in use until that is through
            self._undegrade(entry)

    # -- what workers say ----------------------------------------------------------------------

    def settled(self, entry: Entry, worker: Worker) -> None:
        self.in_flight -= 1
        self._memory.give(worker, entry)

    def answered(self, entry: Entry, worker: Worker, answer: wire.Answer) -> None:
        if not answer.more and self._suspects.once and answer.status == "ok":
            self._clear(entry)
        if entry.over:
            if not answer.more:
                self._undegrade(entry)
            return
        if answer.more:
            entry.begun = True
        else:
            self._over(entry)
            served = self._served.get(entry.call.model)
            if served is not None:
                served.done += 1
        entry.finish(answer)

    def again(self, entry: Entry, why: str) -> None:
        if entry.over:
            self._undegrade(entry)
            return
        self._counts.add("gpusup_retries_total", (entry.call.model, why))
        served = self._served.get(entry.call.model)
        if served is None:
            self._fail(entry, NoWorker(f"model {entry.call.model!r} is gone", retry_after_s=1))
            return
        lane = self._lane(entry.call.model, entry.version)
        self._queue(lane, entry, front=True)
        self._strand(lane)

    def _clear(self, entry: Entry) -> None:
        """It has been computed: if it was there when a worker died, it was not the reason."""
        once = self._suspects.once
        # Its blocks were released in this very turn: they still hold what they held.
        if entry.call.is_one_of(once, self._arena.memory):
            input_hash = entry.call.input_hash(self._arena.memory)
            if self._suspects.survived(input_hash):
                self._tell(InputSurvived(input_hash))

    def died(self, entry: Entry, worker: Worker, input_hash: str) -> None:
        refused = self._suspects.died(input_hash, entry.sent_at, time.monotonic())
        if entry.over:
            self._undegrade(entry)
            return
        model = self.models.get(entry.call.model)
        safe = model is not None and model.retry == "safe" and not entry.begun
        if safe and not refused:
            self.again(entry, "died")
            return
        if safe:
            self._fail(entry, InputRefused(REFUSED))
            return
        self._fail(
            entry,
            WorkerLost(
                f"the worker on {worker.slot} ended while it computed this request",
                headers={"x-should-retry": "false"},
            ),
        )

    def _undegrade(self, entry: Entry) -> None:
        if entry.degrade and (served := self._served.get(entry.call.model)) is not None:
            served.undegrade(entry)

    # -- reports -------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        """Now and then: the rates behind Retry-After."""
        for served in self._served.values():
            served.tick(seconds)

    def _soon(self, model: str) -> int:
        served = self._served.get(model)
        return served.soon(self._rng) if served is not None else 1

    def queued(self) -> dict[str, int]:
        return {name: served.waiting for name, served in self._served.items() if served.waiting}

    def flights(self) -> dict[str, int]:
        return self._workers.in_flight()

    def leased(self) -> dict[str, int]:
        return self._memory.leased()

    def bands(self) -> dict[str, Band]:
        return self._memory.bands()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._workers.close()

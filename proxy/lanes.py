"""Models as this proxy knows them, and the lines of requests that wait for their workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from gpusup.supervisor.wire import ModelInfo

from .admission import Costs
from .errors import NoWorker
from .queue import Queue
from .routes import candidates
from .workers import Entry, Worker

#: At least this many may wait for busy workers in the normal band, and this many turns of them.
WAITING_LEAST = 256
_WAITING_TURNS = 8
_SOON_MOST_S = 30.0


class Served:
    """A model, and what this proxy knows of its traffic."""

    def __init__(self, info: ModelInfo, starvation_s: float) -> None:
        self.info = info
        self.costs = Costs(info.peaks)
        self.starvation_s = starvation_s
        self.waiting = 0
        self.done = 0
        self.rate = 0.0  # answers a second, smoothed
        self.degraded: dict[str, int] = {}  # step -> in flight
        self.wanted_at = 0.0

    def update(self, info: ModelInfo) -> None:
        if info.peaks != self.info.peaks:
            self.costs = Costs(info.peaks)
        self.info = info

    def tick(self, seconds: float) -> None:
        share = min(1.0, seconds)
        self.rate += share * (self.done / seconds - self.rate)
        self.done = 0

    def soon(self, rng: Random) -> int:
        """Retry-After: when the line should be gone at the present rate, and some jitter."""
        wait = (self.waiting + 1) / self.rate if self.rate > 0 else 1.0
        return max(1, round(min(wait, _SOON_MOST_S) * rng.uniform(1.0, 1.5)))

    def no_worker(self, rng: Random) -> NoWorker:
        why = f": {self.info.reason}" if self.info.reason else ""
        return NoWorker(
            f"no worker is ready for model {self.info.name!r}{why}", retry_after_s=self.soon(rng)
        )

    def undegrade(self, entry: Entry) -> None:
        """A degraded request is over; another may take its place."""
        if entry.degrade and self.degraded.get(entry.degrade, 0) > 0:
            self.degraded[entry.degrade] -= 1
            entry.degrade = ""


class Lane:
    """The waiting requests of a model that may go to the same workers."""

    def __init__(self, served: Served, version: str) -> None:
        self.served = served
        self.version = version
        self.queue: Queue[Entry] = Queue(served.starvation_s)
        self.workers: list[Worker] = []
        self.fallback: list[Worker] = []
        self.present = False  # some worker could take work soon, if not now

    def refresh(self, workers: Iterable[Worker]) -> None:
        """After any change of routes or of the model."""
        info = self.served.info
        mine = [w for w in workers if w.route.model == info.name]
        self.workers = candidates(mine, info, self.version)
        self.fallback = [w for w in mine if w.open and w.fallback]
        self.present = bool(self.workers) or any(
            w.route.state == "suspect" and not w.fallback and self.version in ("", w.route.version)
            for w in mine
        )

    def most_waiting(self) -> int:
        turns = _WAITING_TURNS * sum(w.capacity for w in self.workers)
        return max(WAITING_LEAST, self.served.info.hold_requests, turns)

    def degraded(self, step: str) -> list[Worker]:
        """Workers that can serve with this step of the ladder."""
        if step == "cpu_fallback":
            return self.fallback
        return [w for w in self.workers if step in w.route.degrade]


def hopeless(info: ModelInfo) -> bool:
    """No worker is to be expected by itself."""
    if info.holding:
        return False
    return info.state == "failed" or (info.state == "unloaded" and not info.on_demand)

"""Which worker gets the next request. Pure: routes, loads and bands are all it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TypeVar

from gpusup.supervisor.wire import Band, ModelInfo, Route
from gpusup.worker.wire import Load


class Place:
    """A worker as this proxy sees it: what it said it has to do, and what we sent it since."""

    __slots__ = (
        "allowance",
        "blocked_until",
        "busy_rows",
        "capacity",
        "connected",
        "fallback",
        "generation",
        "open",
        "outstanding",
        "paused",
        "route",
        "sent_since",
        "slot",
    )

    def __init__(self, route: Route) -> None:
        self.route = route
        self.slot = route.slot
        self.generation = route.generation
        self.fallback = route.fallback
        self.open = route.state == "open"
        self.connected = False
        self.paused = False  # its socket takes no more bytes for now
        self.blocked_until = 0.0  # it said busy although it seemed to have room
        self.outstanding = 0  # our rows there
        self.capacity = 0  # rows it would hold in all
        self.busy_rows = 0  # rows it said it had
        self.sent_since = 0  # our rows since it said so
        self.allowance = 0  # rows of ours that it may have at once

    def loaded(self, load: Load, proxies: int) -> None:
        """What the worker says of itself. Call it after our answered rows are taken off.

        Our rows on the way to it are not in its numbers yet; what it has beyond ours belongs to
        other proxies. Its free room is shared among them; each hears of the rest with its answers.
        """
        busy = load.queued_rows + load.running_rows
        others = max(0, busy - self.outstanding)
        self.capacity = busy + load.free_rows
        room = max(0, self.capacity - others - self.outstanding)
        self.allowance = self.outstanding + -(-room // max(1, proxies))
        self.busy_rows = busy
        self.sent_since = 0

    def sent(self, rows: int) -> None:
        self.outstanding += rows
        self.sent_since += rows

    def settled(self, rows: int) -> None:
        self.outstanding -= rows

    @property
    def idle(self) -> bool:
        return not self.outstanding and not self.busy_rows

    def takes(self, rows: int, now: float) -> bool:
        """One larger than all the room goes to a worker that has nothing else to do."""
        if not (self.open and self.connected) or self.paused or now < self.blocked_until:
            return False
        room = self.allowance - self.outstanding
        return room >= rows or (room > 0 and not self.outstanding)

    def work(self) -> int:
        """Rows before a new one there."""
        return max(self.outstanding, self.busy_rows + self.sent_since)


P = TypeVar("P", bound=Place)


def choose(
    places: Iterable[P],
    rows: int,
    now: float,
    *,
    band: Callable[[P], Band] | None,
    headroom: Callable[[P], float],
    rng: Random,
) -> P | None:
    """The least queued work among the workers with room whose device admits the cost; then the most
    headroom; then chance. In the queue band a worker gets one request at a time, so that a device
    whose resting use lies in that band still serves. `band` None: no device asks for care."""
    best: list[P] = []
    least = 0
    for place in places:
        if not place.takes(rows, now):
            continue
        if band is not None:
            match band(place):
                case "shed":
                    continue
                case "queue" if not place.idle:
                    continue
        work = place.work()
        if not best or work < least:
            best = [place]
            least = work
        elif work == least:
            best.append(place)
    if len(best) <= 1:
        return best[0] if best else None
    most = max(headroom(place) for place in best)
    best = [place for place in best if headroom(place) >= most]
    return best[0] if len(best) == 1 else rng.choice(best)


def candidates(places: Sequence[P], model: ModelInfo, version: str) -> list[P]:
    """Open places that may serve a request bound to `version` ("": to none).

    Unbound requests go to the default version. While versions change they go to either, and if the
    default has no worker at all to any that is not the canary: an answer says who gave it.
    """
    usable = [p for p in places if p.open and not p.fallback]
    if version:
        return [p for p in usable if p.route.version == version]
    if model.canary_version and model.canary_version != model.version:
        usable = [p for p in usable if p.route.version != model.canary_version]
    if model.state == "swapping" or model.mixed:
        return usable
    return [p for p in usable if p.route.version == model.version] or usable


def bind_version(model: ModelInfo, named: str | None, point: float | None, rng: Random) -> str:
    """The version a request is bound to at admission, "" for none.

    `point`: where its session lies in [0, 1), or None: then chance decides about the canary.
    """
    if named is not None:
        return named
    if not model.canary_version or model.canary_version not in model.versions:
        return ""  # also while its worker is not there yet, or no more
    if point is None:
        point = rng.random()
    return model.canary_version if point < model.canary_share else model.version

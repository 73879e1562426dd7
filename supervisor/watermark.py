"""How full a device really is, and which band that puts it in. Pure.

PyTorch keeps what it once took, so the driver's "used" stays at the high mark of the biggest batch
ever. What a worker has reserved but not allocated can be had back by asking; it counts as free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from gpusup.worker.wire import Memory

from .wire import Band

#: More than any device has: a driver that says so is not telling anything.
MOST_BYTES: Final = 2**50

_ORDER: Final = {"normal": 0, "queue": 1, "shed": 2}


def plausible(total: int | None, free: int | None) -> bool:
    """Whether the driver's figures can be figures of a device at all."""
    return total is not None and free is not None and 0 < total <= MOST_BYTES and 0 <= free <= total


def reclaimable(workers: Iterable[Memory]) -> int:
    """Bytes our workers would give back when trimmed."""
    return sum(max(0, memory.reserved - memory.allocated) for memory in workers)


def watermark(total: int | None, free: int | None, reclaim: int = 0) -> float | None:
    """Effective use, 0 to 1; None where it can't be told.

    From *free*, not from "used": the two versions of the driver's call disagree about used.
    """
    if total is None or free is None or not plausible(total, free):
        return None
    # Read at different moments: right after a trim the same bytes are free and still reserved.
    return min(1.0, max(0.0, 1 - (free + max(0, reclaim)) / total))


def projected(mark: float | None, total: int, promised: int, cost: int = 0) -> float | None:
    """Use with what is leased but not yet allocated (`promised`) and one more request of `cost`."""
    if mark is None or total <= 0:
        return None
    return mark + (max(0, promised) + max(0, cost)) / total


@dataclass(frozen=True, slots=True)
class Bands:
    """Where the bands begin. A band is left only `hysteresis` below where it was entered."""

    queue: float = 0.85
    shed: float = 0.92
    hysteresis: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.queue < self.shed <= 1:
            raise ValueError(
                f"watermark.queue must be below watermark.shed, "
                f"got {self.queue:g} and {self.shed:g}"
            )
        if not 0 <= self.hysteresis < self.queue:
            raise ValueError(
                f"watermark.hysteresis must be below watermark.queue, "
                f"got {self.hysteresis:g} and {self.queue:g}"
            )

    def plain(self, use: float) -> Literal["normal", "queue", "shed"]:
        """The band of a use, without regard to where the device comes from."""
        return "shed" if use >= self.shed else "queue" if use >= self.queue else "normal"

    def next(self, before: Band, use: float | None) -> Band:
        """The band after `before` at this use; `unknown` where the use is None.

        From unknown there is no memory of a band, so the plain one holds.
        """
        if use is None:
            return "unknown"
        now = self.plain(use)
        if before == "unknown" or _ORDER[now] >= _ORDER[before]:
            return now
        # Falling: each mark on the way down counts only once the use is clear of it.
        lowered = self.plain(use + self.hysteresis)
        return lowered if _ORDER[lowered] < _ORDER[before] else before

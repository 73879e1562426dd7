"""How full a device really is, and the worst band that a proxy sees it in. Pure.

PyTorch keeps what it once took, so the driver's "used" stays at the high mark of the biggest batch
ever. What a worker has reserved but not allocated can be had back by asking; it counts as free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpusup.worker.wire import Memory

from .wire import Band, ProxyReport

#: More than any device has: a driver that says so is not telling anything.
MOST_BYTES: Final = 2**50


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


def worst_band(device: str, reports: Iterable[ProxyReport]) -> Band:
    """As the proxies see it, leases included; "unknown" before the first report."""
    seen = [report.bands[device] for report in reports if device in report.bands]
    order: tuple[Band, ...] = ("shed", "queue", "normal")
    return next((band for band in order if band in seen), "unknown")

"""How fast batches end: when the next one is to be launched, and how many rows are to wait for it.

A batch that is launched earlier than need be is smaller than it could be; later, the device idles.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Final

from .pool import Key

#: A launch takes about this long to reach the device, as long as none was seen.
_LEAD_S: Final = 300e-6
#: Batches vary; idling costs more than a smaller batch.
_CAUTION: Final = 0.85
_MOST_KEYS: Final = 1024
#: A batch takes at most this share of all rows that are here. Simulated with the times measured for
#: ResNet-50 and 8 to 256 clients: without a limit up to 6 % is lost, with less than 0.4 the same.
_SHARE: Final = 0.48
#: Smaller batches than this cost hardly less, so that dividing them gains nothing.
_WHOLE: Final = 16
#: While a batch computes, this often it is looked at; longer steps where it should take long.
_LOOK_S: Final = 100e-6
_LONG_LOOK_S: Final = 500e-6
#: The same for one that takes far longer than was thought.
_LATE_LOOK_S: Final = 5e-3
#: A batch that ends within this time is simply waited for, if nothing else is there to do.
_SOON_S: Final = 2e-3
#: From an answer to the same client's next request, under load: through the proxy and back.
_AWAY_S: Final = 10e-3
#: So many batches are taken at most for those that are away.
_MOST_AWAY: Final = 3


def padded(sizes: Sequence[int], rows: int) -> int:
    """Rows that are computed for so many: the next of `sizes`, which rise, or as many."""
    at = bisect.bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else rows


class Pace:
    """`next_due`: launch the next batch at this time (monotonic seconds), if there is one.

    A size is the rows that are computed, those that a batch was padded by included.
    """

    def __init__(self) -> None:
        self.next_due = 0.0
        self._idle_at = 0.0
        self._lead = _LEAD_S
        self._took: dict[tuple[Key, int], float] = {}

    def launched(self, key: Key, size: int, now: float, spent: float = _LEAD_S) -> None:
        """At `now`; the device had it `spent` seconds later."""
        self._lead += 0.1 * (spent - self._lead)
        took = self._took.get((key, size), 0.0)
        self._idle_at = max(self._idle_at, now) + took
        self.next_due = max(now, self._idle_at - (1 - _CAUTION) * took - self._lead)

    def landed(self, key: Key, size: int, took: float) -> None:
        known = self._took.get((key, size))
        if known is None:
            if len(self._took) >= _MOST_KEYS:
                self._took.clear()
            self._took[key, size] = took
        else:
            # Down at once, up slowly: one hiccup must not make all later ones late.
            self._took[key, size] = took if took < known else known + 0.1 * (took - known)

    def gather(self, now: float, window: float, *, answered: bool) -> float:
        """For how long to let rows come, before the batch that computes is looked at again; 0:
        there is nothing but its end to wait for. `window`: when what waits is ripe, `math.inf` if
        nothing waits; `answered`: somebody was since the launch, and may be back before the end.

        Without that, and with the end near, whoever comes could not compute earlier either. With
        it, who comes can be launched, and the device goes on without a gap.
        """
        pause = min(self.next_due, window) - now
        nothing_waits = window == math.inf
        if (not nothing_waits and pause <= 0) or (
            nothing_waits and not answered and pause <= _SOON_S
        ):
            return 0.0
        # In steps: how long it takes is a guess, and after a slow first batch a bad one.
        if pause <= 0:
            return max(_LOOK_S, min(-pause / 8, _LATE_LOOK_S))
        return min(pause, max(_LOOK_S, min(pause / 8, _LONG_LOOK_S)))

    def portion(self, key: Key, rows: int, present: int, sizes: Sequence[int]) -> int:
        """How many of `rows` that wait are worth a batch behind the one that computes. `present`:
        all rows that are here, in flight or not; `sizes`: what a batch may be padded to.

        Clients that wait for their answers fall into step with the batches: what is answered
        together comes back together. A batch that takes all that waits leaves nothing for the next
        one, and while the device is through with that, the rest is still on its way. With about
        half of what is here in each, there is always another half. And what is only a little more
        than a size is better that size now and a rest later.
        """
        share = max(_WHOLE, math.ceil(_SHARE * present))
        rows = min(rows, min(sizes, key=lambda size: abs(size - share), default=share))
        at = bisect.bisect_left(sizes, rows)
        if 0 < at < len(sizes) and sizes[at] != rows:
            lower, upper = sizes[at - 1], sizes[at]
            quick, slow = self._took.get((key, lower)), self._took.get((key, upper))
            if quick and slow and lower / quick > rows / slow:
                rows = lower
        return max(1, rows)


class Room:
    """How many rows are taken at once: those in flight, a whole batch that gathers meanwhile, and
    as many as end while a client's next request is on its way.

    Without the last, a fast device gets batches that are never quite full, since what is answered
    is back only after the next launch. A slow one has nothing of them: they wait with the proxies,
    which may send them elsewhere.
    """

    def __init__(self, max_rows: int, depth: int) -> None:
        self.rows = self._least = (depth + 1) * max_rows
        self._most_away = _MOST_AWAY * max_rows
        self._per_s = 0.0

    def landed(self, rows: int, took: float) -> int:
        """`rows` in `took` seconds. Returns what `rows` is from now on."""
        per_s = rows / max(took, 1e-6)
        self._per_s += 0.1 * (per_s - self._per_s)
        self.rows = self._least + min(self._most_away, int(self._per_s * _AWAY_S))
        return self.rows

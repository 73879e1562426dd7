"""How fast batches end: when the next one is to be launched, and how many rows are to wait for it.

A batch that is launched earlier than need be is smaller than it could be; later, the device idles.
"""

from __future__ import annotations

from typing import Final

from .pool import Key

#: A launch takes about this long to reach the device, as long as none was seen.
_LEAD_S: Final = 300e-6
#: Batches vary; idling costs more than a smaller batch.
_CAUTION: Final = 0.85
_MOST_KEYS: Final = 1024
#: From an answer to the same client's next request, under load: through the proxy and back.
_AWAY_S: Final = 10e-3
#: So many batches are taken at most for those that are away.
_MOST_AWAY: Final = 3


class Pace:
    """`next_due`: launch the next batch at this time (monotonic seconds), if there is one."""

    def __init__(self) -> None:
        self.next_due = 0.0
        self._idle_at = 0.0
        self._lead = _LEAD_S
        self._took: dict[tuple[Key, int], float] = {}

    def launched(self, key: Key, rows: int, now: float, spent: float = _LEAD_S) -> None:
        """At `now`; the device had it `spent` seconds later."""
        self._lead += 0.1 * (spent - self._lead)
        took = self._took.get((key, rows), 0.0)
        self._idle_at = max(self._idle_at, now) + took
        self.next_due = max(now, self._idle_at - (1 - _CAUTION) * took - self._lead)

    def landed(self, key: Key, rows: int, took: float) -> None:
        known = self._took.get((key, rows))
        if known is None:
            if len(self._took) >= _MOST_KEYS:
                self._took.clear()
            self._took[key, rows] = took
        else:
            # Down at once, up slowly: one hiccup must not make all later ones late.
            self._took[key, rows] = took if took < known else known + 0.1 * (took - known)


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

"""When the device will have nothing left to do: so that the next batch is launched just before.

Earlier, the batch would be smaller than need be; later, the device would idle.
"""

from __future__ import annotations

from typing import Final

from .pool import Key

#: A launch takes about this long to reach the device.
_LEAD_S: Final = 300e-6
#: Batches vary; idling costs more than a smaller batch.
_CAUTION: Final = 0.85
_MOST_KEYS: Final = 1024


class Pace:
    """`next_due`: launch the next batch at this time (monotonic seconds), if there is one."""

    def __init__(self) -> None:
        self.next_due = 0.0
        self._idle_at = 0.0
        self._took: dict[tuple[Key, int], float] = {}

    def launched(self, key: Key, rows: int, now: float) -> None:
        took = self._took.get((key, rows), 0.0)
        self._idle_at = max(self._idle_at, now) + took
        self.next_due = max(now, self._idle_at - (1 - _CAUTION) * took - _LEAD_S)

    def landed(self, key: Key, rows: int, took: float) -> None:
        known = self._took.get((key, rows))
        if known is None:
            if len(self._took) >= _MOST_KEYS:
                self._took.clear()
            self._took[key, rows] = took
        else:
            # Down at once, up slowly: one hiccup must not make all later ones late.
            self._took[key, rows] = took if took < known else known + 0.1 * (took - known)

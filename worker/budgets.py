"""How long a batch may take, from how long the latest ones of its shape took."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Final

#: Batches of a shape until its own figure counts, and from then on between two reckonings.
FEWEST: Final = 100
#: The latest ones, of which the figure is made.
LATEST: Final = 500
#: Seconds below which nothing is called a hang: a busy machine may hold up anybody for so long.
LEAST_S: Final = 2.0
#: The slowest batch seen lately may take so many times as long once more.
_SLOWEST: Final = 2.0
#: Shapes that are kept apart; all further ones have the whole budget.
_SHAPES: Final = 256


class Budgets:
    """`most`: seconds that any batch may take, and all that is known of a shape that is seldom.

    `times`: how many times the 99th percentile of its shape a batch may take. 0: always `most`.
    """

    def __init__(self, most: float, times: float) -> None:
        self.most = most
        self._times = times
        self._took: dict[Hashable, deque[float]] = {}
        self._fresh: dict[Hashable, int] = {}
        self._found: dict[Hashable, float] = {}

    def of(self, shape: Hashable) -> float:
        """Seconds."""
        return self._found.get(shape, self.most)

    def note(self, shape: Hashable, took_s: float) -> None:
        """A batch came to a good end after `took_s` seconds."""
        if not self._times:
            return
        took = self._took.get(shape)
        if took is None:
            if len(self._took) >= _SHAPES:
                return
            took = self._took[shape] = deque(maxlen=LATEST)
        took.append(took_s)
        self._fresh[shape] = fresh = self._fresh.get(shape, 0) + 1
        if fresh >= FEWEST:
            self._fresh[shape] = 0
            p99 = sorted(took)[math.ceil(0.99 * len(took)) - 1]
            found = max(LEAST_S, self._times * p99, _SLOWEST * max(took))
            self._found[shape] = min(self.most, found)

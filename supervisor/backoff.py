"""How long to wait before trying again, and when to stop trying. Pure."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from gpusup.conf.schema import BackoffConfig

PAUSE_S: Final = 5.0
PAUSE_LIMIT_S: Final = 300.0


class Cause(StrEnum):
    """Why a worker ended. Each has its own give-up rule."""

    REQUESTED = "requested"
    CRASH = "crash"
    HANG = "hang"
    FENCED = "fenced"
    CONFIG = "config"
    LOAD_OOM = "load-oom"
    LOAD_FAILED = "load-failed"
    GPU = "gpu"
    HOST_OOM = "host-oom"


#: Causes that count towards the same limit: the model does not run reliably here.
COUNTED = frozenset({Cause.CRASH, Cause.HANG, Cause.FENCED, Cause.HOST_OOM, Cause.LOAD_FAILED})


@dataclass(slots=True)
class Pause:
    """Until when something that can be done without is not tried again: longer at each failure."""

    until: float = 0.0
    why: str = ""
    failures: int = 0

    def fail(self, why: str, now: float) -> float:
        """Returns for how many seconds."""
        seconds = min(PAUSE_LIMIT_S, PAUSE_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.until, self.why = now + seconds, why
        return seconds


class Backoff:
    """The first failure after good health is retried at once: a killed worker must be back in a
    fraction of a second. From the second on the wait is initial * factor^n, with jitter."""

    def __init__(self, config: BackoffConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._deaths: deque[float] = deque(maxlen=config.crashes)
        self._load_ooms = 0
        self.strikes = 0

    def strike(self, cause: Cause, now: float) -> tuple[float, str]:
        """Count one failure. Returns (seconds to wait, why to give up or "")."""
        c = self._config
        if cause is Cause.CONFIG:
            return 0.0, "it can't work as configured"
        if cause is Cause.LOAD_OOM:
            self._load_ooms += 1
            if self._load_ooms > 1:
                return 0.0, "it did not fit into the device's memory, twice"
        elif cause in COUNTED:
            self._deaths.append(now)
            if len(self._deaths) == c.crashes and now - self._deaths[0] <= c.window:
                return 0.0, f"{c.crashes} failures within {c.window:g} s, the last one: {cause}"
        delay = 0.0
        if self.strikes:
            delay = c.initial
            # A float power overflows long before anybody has waited it out.
            for _ in range(self.strikes - 1):
                delay = min(delay * c.factor, c.limit)
        self.strikes += 1
        return delay * (1 + c.jitter * self._rng.random()), ""

    def healthy_for(self, seconds: float) -> None:
        if seconds >= self._config.reset_after:
            self.strikes = 0
            self._load_ooms = 0

    def forgive(self) -> None:
        self.strikes = 0
        self._load_ooms = 0
        self._deaths.clear()

    def tally(self) -> list[float]:
        return list(self._deaths)

    def restore(self, deaths: list[float], strikes: int) -> None:
        self._deaths.extend(deaths)
        self.strikes = strikes

    def export(self) -> list[Any]:
        return [self.tally(), self.strikes, self._load_ooms]

    def take_over(self, exported: list[Any]) -> None:
        """From the same process before an upgrade: to the letter."""
        deaths, self.strikes, self._load_ooms = exported
        self._deaths.extend(deaths)

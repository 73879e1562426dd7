"""Time, as something that is handed in. asyncio's in production, a fake one in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back (CLOCK_MONOTONIC, shared by all processes)."""
        ...

    def call_later(self, after_s: float, callback: Callable[[], None]) -> None: ...


class LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, after_s: float, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(after_s, callback)

"""Inputs that were executing at a worker's death, as one proxy knows them. Pure.

The supervisor keeps the whole list (its poison.py) and sends it with each table; what this proxy
has just seen itself counts at once, so that not even the next request gets through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: After so long the supervisor's list has what we told it, or it was forgiven.
_TOLD_S: Final = 1.0
_MOST: Final = 1024

REFUSED: Final = "this input was running when two workers died; it is not run again"


class Suspects:
    def __init__(self) -> None:
        self.refused: dict[str, float] = {}
        self.once: dict[str, float] = {}

    def update(
        self, refused: Sequence[str], suspects: Sequence[tuple[str, float]], now: float
    ) -> None:
        """What the supervisor says, and what of ours it can't know yet."""
        ours = {key: at for key, at in self.refused.items() if now - at < _TOLD_S}
        self.refused = {**dict.fromkeys(refused, 0.0), **ours}
        fresh = {key: at for key, at in self.once.items() if now - at < _TOLD_S}
        self.once = {**dict(suspects), **fresh}

    def died(self, input_hash: str, sent_at: float, now: float) -> bool:
        """Whether this was its second death: then it is not to run again."""
        before = self.once.get(input_hash)
        if before is not None and sent_at > before:
            del self.once[input_hash]
            self.refused[input_hash] = now
        elif before is None and len(self.once) < _MOST:
            self.once[input_hash] = now
        return input_hash in self.refused

    def survived(self, input_hash: str) -> bool:
        return self.once.pop(input_hash, None) is not None

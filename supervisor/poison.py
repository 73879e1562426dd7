"""Inputs that were executing when workers died. At the second death an input is refused. Pure.

Most of them are innocent: they were in the same batch, or the worker was killed from outside. So
one that has been computed since is forgiven, and deaths that overlap count as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

KEPT: Final = 1024


class Poison:
    def __init__(self, refused: Iterable[str] = ()) -> None:
        self._died_at: OrderedDict[str, float] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict.fromkeys(refused)

    def died(self, input_hash: str, sent_at: float, at: float) -> bool:
        """A worker died `at` with this input inside, which had been sent to it at `sent_at`.

        True when it is refused from now on.
        """
        if input_hash in self._refused:
            return False
        before = self._died_at.get(input_hash)
        if before is None:
            self._died_at[input_hash] = at
            while len(self._died_at) > KEPT:
                self._died_at.popitem(last=False)
            return False
        if sent_at <= before:
            return False  # it was there already when the first one died
        del self._died_at[input_hash]
        self._refused[input_hash] = None
        while len(self._refused) > KEPT:
            self._refused.popitem(last=False)
        return True

    def survived(self, input_hash: str) -> bool:
        """It has been computed after all. Whether it was under suspicion."""
        return self._died_at.pop(input_hash, None) is not None

    def refused(self) -> tuple[str, ...]:
        return tuple(self._refused)

    def suspects(self) -> tuple[tuple[str, float], ...]:
        """Those that were there at one death, and when that was."""
        return tuple(self._died_at.items())

    def export(self) -> list[Any]:
        return [list(self._died_at.items()), list(self._refused)]

    @classmethod
    def restore(cls, exported: list[Any]) -> Poison:
        poison = cls(exported[1])
        poison._died_at.update((key, at) for key, at in exported[0])
        return poison

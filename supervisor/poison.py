"""Inputs that were executing when workers died. At the second death an input is refused. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

DEATHS: Final = 2
KEPT: Final = 1024


class Poison:
    def __init__(self, refused: Iterable[str] = ()) -> None:
        self._deaths: OrderedDict[str, set[tuple[str, int]]] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict.fromkeys(refused)

    def died(self, input_hash: str, slot: str, generation: int) -> bool:
        """One more death with this input inside. True when it is refused from now on."""
        if input_hash in self._refused:
            return False
        # By worker: several proxies or copies of the input tell of the same death.
        deaths = self._deaths.setdefault(input_hash, set())
        deaths.add((slot, generation))
        self._deaths.move_to_end(input_hash)
        while len(self._deaths) > KEPT:
            self._deaths.popitem(last=False)
        if len(deaths) < DEATHS:
            return False
        del self._deaths[input_hash]
        self._refused[input_hash] = None
        while len(self._refused) > KEPT:
            self._refused.popitem(last=False)
        return True

    def export(self) -> list[Any]:
        deaths = [[key, [list(worker) for worker in at]] for key, at in self._deaths.items()]
        return [deaths, list(self._refused)]

    @classmethod
    def restore(cls, exported: list[Any]) -> Poison:
        poison = cls(exported[1])
        for key, at in exported[0]:
            poison._deaths[key] = {(slot, generation) for slot, generation in at}
        return poison

    def refused(self) -> tuple[str, ...]:
        return tuple(self._refused)

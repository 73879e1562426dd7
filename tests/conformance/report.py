"""What the conformance scripts share: named checks, a table of results. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class Skip(Exception):
    """This check does not apply to this server or model; says why."""


def need(condition: object, *why: object) -> None:
    """An assert that stays with -O and shows what was got."""
    if not condition:
        raise AssertionError(" ".join(map(str, why)) or "not so")


class Checks(Generic[S]):
    """Checks by name, each a function of the thing under test. It may raise Skip."""

    def __init__(self) -> None:
        self.table: dict[str, Callable[[S], Any]] = {}

    def __call__(self, name: str) -> Callable[[Callable[[S], Any]], Callable[[S], Any]]:
        def keep(function: Callable[[S], Any]) -> Callable[[S], Any]:
            self.add(name, function)
            return function

        return keep

    def add(self, name: str, function: Callable[[S], Any]) -> None:
        if name in self.table:
            raise ValueError(f"two checks are called {name!r}")
        self.table[name] = function

    def run(self, title: str, subject: S) -> int:
        """Print each result and the sum; 1 if any failed."""
        passed = failed = skipped = 0
        for name, function in self.table.items():
            try:
                function(subject)
            except Skip as skip:
                skipped += 1
                say(f"SKIP  {name}   [{skip}]")
            except Exception as error:
                failed += 1
                say(f"FAIL  {name}   [{type(error).__name__}: {str(error)[:300]}]")
            else:
                passed += 1
                say(f"PASS  {name}")
        say(f"{title}: {passed} passed, {failed} failed, {skipped} skipped")
        return 1 if failed else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

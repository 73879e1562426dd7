"""What a test found: checks with their verdicts, figures, and what the plots are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .certify_math import Sample

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One criterion. `text`: what was found and what the limit is, or why it was skipped."""

    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened, for the time axis. `at`: time.monotonic."""

    at: float
    text: str


@dataclass(slots=True)
class Result:
    """Of one test. It is skipped as a whole only where nothing of it could run here."""

    name: str
    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)  # of the ramp
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    began: float = 0.0
    took_s: float = 0.0
    skipped: str = ""  # why, if nothing ran

    @property
    def verdict(self) -> Verdict:
        if any(check.verdict == "failed" for check in self.checks):
            return "failed"
        if self.skipped or not any(check.verdict == "passed" for check in self.checks):
            return "skipped"
        return "passed"

    def check(self, name: str, holds: bool, text: str) -> bool:
        self.checks.append(Check(name, "passed" if holds else "failed", text))
        return holds

    def skip(self, name: str, why: str) -> None:
        self.checks.append(Check(name, "skipped", why))


def counted(results: list[Result]) -> dict[Verdict, int]:
    found: dict[Verdict, int] = {"passed": 0, "failed": 0, "skipped": 0}
    for result in results:
        found[result.verdict] += 1
    return found

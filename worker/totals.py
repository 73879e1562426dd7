"""What a worker has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    batches: int = 0
    rows: int = 0
    failures: int = 0
    busy_s: float = 0.0

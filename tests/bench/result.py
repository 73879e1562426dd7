"""What a run found, as a table for people and as one JSON object for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Result:
    """`goals`: key of a figure or ratio -> (">=" or "<=", number)."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, float | None] = field(default_factory=dict)
    goals: dict[str, tuple[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def judged(self) -> dict[str, dict[str, Any]]:
        """Each goal with what was measured and whether that reaches it (None: not measured)."""
        return {
            key: {
                "goal": f"{sign} {number:g}",
                "measured": value,
                "reached": _reaches(value, sign, number),
            }
            for key, (sign, number) in self.goals.items()
            for value in [self.ratios.get(key, self.figures.get(key))]
        }

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "figures": _rounded(self.figures),
                "ratios": _rounded(self.ratios),
                "goals": _rounded(self.judged()),
                "machine": machine(),
                "notes": self.notes,
            }
        )

    def to_text(self) -> str:
        lines = [f"{self.name} on {machine_line()}", "", *table(self.columns, self.rows), ""]
        for key, value in _rounded(self.figures | self.ratios).items():
            if not isinstance(value, dict) or key in self.goals or len(str(value)) < 100:
                lines.append(f"{key} = {'not measured' if value is None else value}")
        for key, goal in _rounded(self.judged()).items():
            word = {True: "reached", False: "MISSED", None: "not measured"}[goal["reached"]]
            lines.append(f"goal {key} {goal['goal']}: {word}")
        return "\n".join([*lines, *self.notes])


def _reaches(value: Any, sign: str, number: float) -> bool | None:
    if isinstance(value, dict):
        judged = [_reaches(part, sign, number) for part in value.values()]
        return None if None in judged or not judged else all(judged)
    if value is None:
        return None
    return bool(value >= number if sign == ">=" else value <= number)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain text: the first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [columns, *rows]
    ]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """ "median (least-most)"."""
    if not values:
        return "-"
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def machine() -> dict[str, Any]:
    """What the numbers depend on; None for what can't be read."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "aiohttp": _version("aiohttp"),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def machine_line() -> str:
    facts = machine()
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    return (
        f"{facts['cores']} cores of {facts['cpu']}{gpu}, {facts['memory_gib']} GiB, Python "
        f"{facts['python']}, torch {facts['torch']}, load {facts['load'][0]}"
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip().replace("\n", " + ") or None

"""Sizes, times and shares as people write them: "24GiB", "250ms", "85%".

A bare number is refused where a unit belongs: `timeout = 30` has been read as seconds by one
person and as milliseconds by the next. Zero is zero in every unit and needs none.
"""

from __future__ import annotations

import math
import re
from typing import Final

_NUMBER: Final = re.compile(
    r"^\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ%]*)\s*$"
)

SIZES: Final = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
TIMES: Final = {
    "us": 1e-6, "µs": 1e-6, "ms": 1e-3,
    "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip

#: Frames and page records carry signed 64-bit numbers; a larger size is a slip of the pen anyway.
MOST_BYTES: Final = 2**63 - 1


def _split(text: str) -> tuple[float, str] | None:
    found = _NUMBER.match(text)
    if not found:
        return None
    number = float(found.group(1).replace("_", ""))
    return (number, found.group(2)) if math.isfinite(number) else None


def _quantity(value: object, wanted: str) -> tuple[float, str]:
    """Number and unit. Raises ValueError."""
    if value == 0 and isinstance(value, int | float) and not isinstance(value, bool):
        return 0.0, ""
    parts = _split(value) if isinstance(value, str) else None
    if parts is None:
        raise ValueError(f"expected {wanted}, got {show(value)}")
    return parts


def parse_size(value: object) -> int:
    """Bytes. Raises ValueError with what was expected and what was found."""
    wanted = 'a size with its unit, such as "24GiB" or "500MB"'
    number, unit = _quantity(value, wanted)
    if number == 0:
        return 0
    if unit.upper() in {"K", "M", "G", "T"}:
        big = unit.upper()
        raise ValueError(
            f"{show(value)} has two readings: write {big}iB (powers of 1024) or {big}B (of 1000)"
        )
    if unit.upper() not in SIZES:
        raise ValueError(f"expected {wanted}, got {show(value)}")
    size = number * SIZES[unit.upper()]
    if size < 0:
        raise ValueError(f"a size can't be negative, got {show(value)}")
    if size > MOST_BYTES:
        raise ValueError(f"{show(value)} is more than any machine has")
    return round(size)


def parse_time(value: object) -> float:
    """Seconds. Raises ValueError with what was expected and what was found."""
    wanted = 'a time with its unit, such as "250ms", "10s", "5m" or "2h"'
    number, unit = _quantity(value, wanted)
    if number == 0:
        return 0.0
    if unit not in TIMES:
        raise ValueError(f"expected {wanted}, got {show(value)}")
    if number < 0:
        raise ValueError(f"a time can't be negative, got {show(value)}")
    return number * TIMES[unit]


def parse_share(value: object) -> float:
    """0 to 1, from 0.85 or "85%". Raises ValueError with what was expected and what was found."""
    wanted = 'a share between 0 and 1, such as 0.85 or "85%"'
    share = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    elif isinstance(value, str):
        parts = _split(value)
        if parts is not None and parts[1] in ("", "%"):
            share = parts[0] / 100 if parts[1] else parts[0]
    if not 0 <= share <= 1:
        raise ValueError(f"expected {wanted}, got {show(value)}")
    return share


def format_size(count: int) -> str:
    """The shortest exact-looking form: 25769803776 -> "24GiB", 8190 -> "8190B"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            number = count / size
            return f"{number:.0f}{unit}" if number == int(number) else f"{number:.2f}{unit}"
    return f"{count}B"


def format_time(seconds: float) -> str:
    """0.25 -> "250ms", 90 -> "90s", 7200 -> "2h"."""
    if seconds == 0:
        return "0s"
    if abs(seconds) < 1:
        return f"{seconds * 1000:g}ms"
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


def show(value: object) -> str:
    """A value as the file had it, short enough for one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = '"' + value.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    elif isinstance(value, dict):
        return "a table"
    elif isinstance(value, list | tuple):
        return f"a list of {len(value)}" if len(value) != 1 else f"[{show(value[0])}]"
    else:
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."

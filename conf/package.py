"""Versions of installed packages, for status and metrics."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version(name: str = "gpusup") -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"

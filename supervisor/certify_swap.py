from __future__ import annotations

from typing import Any, Final

from .certify_bench import Bench
from .certify_result import Result

TITLE: Final = "swap"
EXTRA_MODELS: Final[dict[str, dict[str, Any]]] = {}
SHORT_LIMITS: Final[dict[str, Any]] = {}


async def run(bench: Bench, result: Result) -> None:
    result.skipped = "not yet"


def build_wall() -> Any:
    return None

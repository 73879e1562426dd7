"""Small rules of HTTP that are about heads only: deadlines, priorities, traces, CORS. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from .errors import InvalidInput

#: What a browser's script may read beside the plain headers.
EXPOSED: Final = (
    "Inference-Header-Content-Length, X-Request-Id, Retry-After, Gpusup-Model-Version, "
    "Gpusup-Degraded"
)
_PREFLIGHT_S: Final = 600
_TRACE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_URGENCY: Final = re.compile(r"(?:^|[,\s])u\s*=\s*([^,;\s]*)")
_TRACESTATE_LIMIT: Final = 512


def read_timeout(headers: Mapping[str, str]) -> float | None:
    """Seconds the client gives us: `X-Request-Timeout`, or `Prefer: wait=N`. None: it didn't say.

    Raises InvalidInput for what is no positive number.
    """
    text = headers.get("X-Request-Timeout")
    if text is None:
        prefer = headers.get("Prefer")
        if prefer is None or "wait" not in prefer:
            return None
        found = re.search(r"(?:^|[,\s])wait\s*=\s*(\d{1,9})(?![\d.])", prefer)
        return float(found[1]) if found and int(found[1]) > 0 else None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf) or "_" in text:
        raise InvalidInput(f"X-Request-Timeout is {text[:40]!r} and not a number of seconds")
    return seconds


def header_priority(headers: Mapping[str, str]) -> int:
    """The `Priority` header's urgency (0 to 7, 3 the default) as ours (1 highest, 0 default).

    Raises InvalidInput.
    """
    text = headers.get("Priority")
    if text is None:
        return 0
    found = _URGENCY.search(text)
    if found is None:
        return 0
    if found[1] not in ("0", "1", "2", "3", "4", "5", "6", "7"):
        raise InvalidInput(f"Priority is {text[:40]!r}; its urgency u is 0 to 7")
    return (1, 1, 1, 0, 3, 4, 5, 6)[int(found[1])]


def trace(headers: Mapping[str, str]) -> tuple[str, str]:
    """(traceparent, tracestate) as given, ("", "") where the first is missing or broken."""
    parent = headers.get("traceparent")
    if parent is None:
        return "", ""
    found = _TRACE.fullmatch(parent.strip())
    if (
        found is None
        or found[1] == "ff"
        or (found[1] == "00" and found[5])
        or not found[2].strip("0")
        or not found[3].strip("0")
    ):
        return "", ""  # a broken trace is started anew, and no reason to fail
    state = headers.get("tracestate", "")
    return parent.strip(), state if len(state) <= _TRACESTATE_LIMIT else ""


def trace_params(headers: Mapping[str, str]) -> dict[str, str]:
    """What of the trace goes to the model, under names of ours."""
    parent, state = trace(headers)
    if not parent:
        return {}
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


class Cors:
    """Cross-origin rules: nothing is said unless an origin is configured ("*" for any)."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str) -> bool:
        return bool(urlsplit(origin).netloc) and (self._any or origin.lower() in self._origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """For an answer to a request with that Origin."""
        if not self._origins:
            return {}
        if origin is None or not self.allows(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: Mapping[str, str], allow: str) -> dict[str, str]:
        """For OPTIONS: plain ones learn `allow`, a preflight of an allowed origin also the rest.

        `allow` is the methods of the path, as the Allow header lists them.
        """
        answer = {"Allow": allow, **self.headers(request.get("Origin"))}
        if "Access-Control-Allow-Origin" in answer and "Access-Control-Request-Method" in request:
            answer["Access-Control-Allow-Methods"] = allow
            answer["Access-Control-Max-Age"] = str(_PREFLIGHT_S)
            wanted = request.get("Access-Control-Request-Headers", "")
            if wanted and re.fullmatch(r"[A-Za-z0-9_,\s-]{1,1024}", wanted):
                answer["Access-Control-Allow-Headers"] = wanted
        return answer

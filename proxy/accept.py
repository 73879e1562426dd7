"""Which of the forms an answer can take a client wants: Accept, with its q-values. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .compression import quality
from .errors import NotAcceptable

_LIMIT = 64


@lru_cache(maxsize=256)
def ranges(header: str) -> tuple[tuple[float, str, str], ...]:
    """(q, type, subtype) as listed. What is malformed is left out."""
    found = []
    for item in header.split(",")[:_LIMIT]:
        name, _, parameters = item.partition(";")
        kind, slash, sub = name.strip().lower().partition("/")
        if slash and kind and sub:
            found.append((quality(parameters), kind, sub))
    return tuple(found)


def rank(header: str, media_type: str) -> float:
    """The q of `media_type` by the most specific range that covers it; 0: not acceptable."""
    kind, _, sub = media_type.partition(";")[0].strip().lower().partition("/")
    best, specific = 0.0, -1
    for q, wanted, wanted_sub in ranges(header):
        if wanted == kind and wanted_sub == sub:
            level = 2
        elif wanted == kind and wanted_sub == "*":
            level = 1
        elif wanted == "*" and wanted_sub == "*":
            level = 0
        else:
            continue
        if level > specific:
            best, specific = q, level
    return best


def choose(header: str | None, forms: Sequence[str]) -> str:
    """The form to answer in; of equals the first. Raises NotAcceptable."""
    if header is None or not header.strip() or header.strip() == "*/*":
        return forms[0]
    if not ranges(header):
        return forms[0]
    best = max(forms, key=lambda form: rank(header, form))  # max takes the first of equals
    if rank(header, best) <= 0:
        raise NotAcceptable(f"the answer can be {', '.join(forms)}; Accept is {header[:100]!r}")
    return best


def wants_events(header: str | None) -> bool:
    """Whether a stream is asked for by name; `*/*` is no such wish."""
    return header is not None and any(
        q > 0 and (kind, sub) == ("text", "event-stream") for q, kind, sub in ranges(header)
    )

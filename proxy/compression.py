"""Content codings: requests are inflated within a bound, answers are compressed where it pays.

aiohttp's own decompression is off: it takes unknown codings for identity and any number of members.
"""

from __future__ import annotations

import zlib
from typing import Final

from .errors import InputTooLarge, InvalidInput

#: Below this an answer is not worth the work.
SMALLEST: Final = 1024
_LEVEL: Final = 1
_STEP: Final = 1024 * 1024

_COMPRESSIBLE: Final = ("application/json", "text/", "application/x-ndjson")


def inflate(data: bytes | memoryview, coding: str, limit: int) -> bytes:
    """One gzip or deflate (zlib) stream of at most `limit` decoded bytes.

    Raises InputTooLarge beyond the limit, InvalidInput for what is broken, cut short, or more than
    one member.
    """
    gzip = coding.endswith("gzip")
    wanted = 31 if gzip else 15
    if not gzip and len(data) >= 2 and (data[0] & 15 != 8 or (data[0] << 8 | data[1]) % 31):
        wanted = -15  # no zlib header: some clients mean the bare stream
    machine = zlib.decompressobj(wanted)
    pieces: list[bytes] = []
    count = 0
    rest: bytes | memoryview = data
    try:
        while not machine.eof:
            piece = machine.decompress(rest, min(_STEP, limit + 1 - count))
            count += len(piece)
            if count > limit:
                raise InputTooLarge(
                    f"the decoded body is over the limit of {limit} bytes "
                    f"({len(data)} bytes were sent)"
                )
            pieces.append(piece)
            rest = machine.unconsumed_tail
            if not piece and not rest:
                break
    except zlib.error as error:
        raise InvalidInput(f"broken {coding} body: {error}") from None
    if not machine.eof:
        raise InvalidInput(f"broken {coding} body: it ends too soon")
    if machine.unused_data:
        raise InvalidInput(f"broken {coding} body: there is more after its end")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def accepted(header: str) -> tuple[str, ...]:
    """The codings of ours that an Accept-Encoding takes, the best first."""
    ranks: dict[str, float] = {}
    for item in header.lower().split(",")[:32]:
        name, _, parameters = item.partition(";")
        ranks[name.strip()] = quality(parameters)
    default = ranks.get("*", 0.0)
    found = [(ranks.get(coding, default), coding) for coding in ("gzip", "deflate")]
    return tuple(coding for rank, coding in sorted(found, key=lambda f: -f[0]) if rank > 0)


def quality(parameters: str) -> float:
    """The q of ";q=0.5", 1 where there is none or it is nonsense."""
    for parameter in parameters.split(";"):
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 1.0
    return 1.0


def choose(header: str | None, content_type: str, length: int) -> str:
    """The coding to answer in, "" for none.

    Most clients say that they take gzip without caring; for tensors it costs more than it saves,
    so binary answers are compressed only for those that name one coding and nothing else.
    """
    if header is None or length < SMALLEST:
        return ""
    codings = accepted(header)
    if not codings:
        return ""
    if content_type.startswith(_COMPRESSIBLE) or header.strip().lower() in ("gzip", "deflate"):
        return codings[0]
    return ""


def deflate(data: bytes, coding: str) -> bytes:
    """`data` as gzip or deflate (zlib format)."""
    machine = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return machine.compress(data) + machine.flush()

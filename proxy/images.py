"""How many pixels an image claims to have, from its header alone, before anybody decodes it.

A PNG of 140 KB may unfold into 144 million pixels. Content types lie, so the first bytes decide
what is an image; what is none here is not our business.
"""

from __future__ import annotations

from typing import Final

from .errors import InputTooLarge

_Bytes = bytes | memoryview

#: JPEG segments looked at before the frame header must have come.
_JPEG_SEGMENTS: Final = 512
_LONGEST_HEADER: Final = 32


def size(data: _Bytes) -> tuple[int, int] | None:
    """(width, height) as a PNG, JPEG, GIF, BMP or WebP header says; None for anything else."""
    head = bytes(data[:_LONGEST_HEADER])
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return (_big(head[16:20]), _big(head[20:24])) if len(head) >= 24 else None
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _gif(data)
    if head.startswith(b"BM") and len(head) >= 26:
        if _little(head[14:18]) == 12:  # the oldest header has 16-bit sizes
            return _little(head[18:20]), _little(head[20:22])
        return _signed(head[18:22]), _signed(head[22:26])
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    return None


def check(data: _Bytes, limit: int, name: str = "") -> None:
    """Raises InputTooLarge if `data` is an image of more than `limit` pixels."""
    found = size(data)
    if found is not None and (pixels := found[0] * found[1]) > limit:
        which = f" {name!r}" if name else ""
        raise InputTooLarge(
            f"image{which} of {found[0]}x{found[1]} has {pixels} pixels, {limit} are allowed"
        )


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _signed(data: bytes) -> int:
    return abs(int.from_bytes(data, "little", signed=True))  # negative: stored top down


def _jpeg(data: _Bytes) -> tuple[int, int] | None:
    at, end = 2, len(data)
    for _ in range(_JPEG_SEGMENTS):
        while at < end and data[at] != 0xFF:
            at += 1
            if at > end - 9 or at > 2**20:
                return None
        while at < end and data[at] == 0xFF:
            at += 1
        if at + 8 > end:
            return None
        marker = data[at]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return _big(bytes(data[at + 6 : at + 8])), _big(bytes(data[at + 4 : at + 6]))
        if marker == 0xDA or marker == 0xD9:
            return None
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            at += 1
        else:
            at += 1 + _big(bytes(data[at + 1 : at + 3]))
    return None


def _gif(data: _Bytes) -> tuple[int, int] | None:
    """The larger of the screen and the first frame: decoders grow the screen to fit."""
    if len(data) < 13:
        return None
    width, height = _little(bytes(data[6:8])), _little(bytes(data[8:10]))
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    while at + 9 < len(data) and data[at] == 0x21:  # extensions before the first frame
        at += 2
        while at < len(data) and data[at]:
            at += 1 + data[at]
            if at > 2**16:
                return width, height
        at += 1
    if at + 9 < len(data) and data[at] == 0x2C:
        left, top = _little(bytes(data[at + 1 : at + 3])), _little(bytes(data[at + 3 : at + 5]))
        width = max(width, left + _little(bytes(data[at + 5 : at + 7])))
        height = max(height, top + _little(bytes(data[at + 7 : at + 9])))
    return width, height


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return _little(head[24:27]) + 1, _little(head[27:30]) + 1
    if kind == b"VP8L":
        bits = _little(head[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
    return None

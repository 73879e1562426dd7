"""Images made in code: real ones, and ones whose header claims more than they are."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image


def png(width: int, height: int, *, depth: int = 8, real: bool = True) -> bytes:
    """A grey PNG; not `real`: the header alone makes the claim, the data is a stub."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    row = b"\0" + bytes((width * depth + 7) // 8)
    rows = zlib.compress(row * height if real else row[:64])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def encoded(
    kind: str, width: int = 4, height: int = 2, mode: str = "RGB", **options: object
) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height)).save(out, kind, **options)
    return out.getvalue()

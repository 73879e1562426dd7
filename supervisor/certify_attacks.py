"""The hostile requests themselves, byte by byte. Nothing here is large until it is sent."""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from gpusup.conf.schema import ServerConfig

from .certify_load import Body

_PIECE: Final = 256 * 1024
_DRIP_S: Final = 0.4
_BLOCK: Final = 2**22
#: Any of these says "your request": which one is a matter of taste for most of what is sent here.
ANY_4XX: Final = frozenset({400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 431})
SIZE: Final = frozenset({413})


@dataclass(slots=True)
class Attack:
    """`wanted`: statuses that refuse it. `may_close`: to be cut off without an answer is as good.

    `due`: bytes that must have been sent before the service can know; `endless`: never stops.
    """

    name: str
    head: bytes
    body: bytes = b""
    wanted: frozenset[int] = ANY_4XX
    slow: bool = False
    may_close: bool = False
    named: bool = True  # the service can read its id
    chunked: bool = False
    endless: bool = False
    due: int = 0
    id: str = ""

    async def pieces(self) -> AsyncIterator[bytes]:
        data = self.head + self.body
        if self.slow:
            for at in range(len(data)):
                yield data[at : at + 1]
                if at >= len(self.head) - 8:
                    await asyncio.sleep(_DRIP_S)
        elif self.endless:
            yield self.head
            filler = b"A" * _PIECE
            piece = b"%x\r\n%s\r\n" % (len(filler), filler) if self.chunked else filler
            while True:
                yield piece
        else:
            for at in range(0, len(data), _PIECE):
                yield data[at : at + _PIECE]


def attacks(host: str, model: str, path: str, good: Body, server: ServerConfig) -> list[Attack]:
    """All that apply to this model. `path`, `good`: what the load test sends, and where to."""
    prefix = secrets.token_hex(4)
    raw, v2 = f"/predictions/{model}", f"/v2/models/{model}/infer"
    found: list[Attack] = []

    def add(
        name: str, where: str, body: bytes, headers: Mapping[str, str] | None = None,
        *, length: int | None = None, wanted: frozenset[int] = ANY_4XX, endless: bool = False,
        due: int = 0, chunked: bool = False, slow: bool = False,
    ) -> Attack:  # fmt: skip
        key = f"certify-{prefix}-{len(found)}"
        lines = {"Host": host, "X-Request-Id": key, "Content-Type": "application/json"}
        lines |= headers or {}
        if chunked:
            lines["Transfer-Encoding"] = "chunked"
        else:
            lines["Content-Length"] = str(len(body) if length is None else length)
        head = f"POST {where} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        attack = Attack(
            name=name, head=head.encode() + b"\r\n", body=body, wanted=wanted, endless=endless,
            due=due, chunked=chunked, slow=slow, id=key,
        )  # fmt: skip
        found.append(attack)
        return attack

    png = {"Content-Type": "image/png"}
    wide = server.pixels // 99_999_999 + 1
    add("image of 99,999,999 x 1 without its pixels", raw, png_head(99_999_999, 1), png)
    add(f"image of 99,999,999 x {wide}, a bomb", raw, png_bomb(99_999_999, wide), png, wanted=SIZE)
    add("image of 2^31-1 x 2^31-1", raw, png_head(2**31 - 1, 2**31 - 1), png, wanted=SIZE)
    add("1 GiB of base64, declared", raw, b'{"image": {"b64": "', length=1_431_655_800, wanted=SIZE,
        endless=True)  # fmt: skip
    add("1 GiB of base64, in chunks", raw, b"", wanted=SIZE, chunked=True, endless=True,
        due=server.body_limit + _PIECE)  # fmt: skip
    add("1,000 nested arrays", v2, b"[" * 1000 + b"]" * 1000)
    add("1,000 nested arrays as data", v2, json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": "@"}]}
    ).replace('"@"', "[" * 1000 + "1" + "]" * 1000).encode())  # fmt: skip
    for coding, bomb in (("gzip", gzip_bomb(2**30)), ("deflate", zlib_bomb(2**30))):
        add(f"1 GiB of zeros as {coding}", raw, bomb, {"Content-Encoding": coding}, wanted=SIZE)
    add("a shape of 99,999,999 x 99,999,999", v2, _v2([99_999_999, 99_999_999], [1.0]))
    add("a shape beyond 64 bits", v2, _v2([2**31, 2**31, 2**31, 2**31], [1.0]))
    add("a negative shape", v2, _v2([-1, -4], [1.0]))
    add("fewer bytes than the shape says", v2, *_binary([1, 8, 8], 16, 16))
    add("more bytes than there are", v2, *_binary([1, 4], 1_000_000, 16))
    add("a JSON part longer than the body", v2, b"{}", {"Inference-Header-Content-Length": "99999"})
    add("not JSON", v2, b"\xff\xfe{" + b"\x00" * 100)
    if good.headers.get("Content-Type", "").startswith("image/"):
        half = good.data[: max(40, len(good.data) // 2)]
        add("half an image", path, half, dict(good.headers))
        add("noise that says it is an image", path, bytes(range(256)) * 40, dict(good.headers))
    found += _broken_heads(host, raw)
    slow_body = add("a body of a byte now and then", raw, b"{" + b" " * 500, length=501, slow=True,
                    wanted=frozenset({408}))  # fmt: skip
    slow_body.may_close = False
    slow_head = f"POST {raw} HTTP/1.1\r\nHost: {host}\r\nX-Slow: ".encode()
    found.append(Attack(
        name="a head of a byte now and then", head=slow_head, body=b"a" * 5000, slow=True,
        may_close=True, named=False, wanted=frozenset({400, 408, 431}),
    ))  # fmt: skip
    return found


def _broken_heads(host: str, path: str) -> list[Attack]:
    line = f"POST {path} HTTP/1.1\r\nHost: {host}\r\n".encode()
    told = (
        ("a negative length", line + b"Content-Length: -5\r\n\r\n"),
        ("two lengths", line + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345"),
        (
            "length and chunks",
            line + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        ("a chunk of no number", line + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n"),
        ("a header of 1 MiB", line + b"X-Long: " + b"a" * 2**20 + b"\r\n\r\n"),
    )
    return [
        Attack(name=name, head=data, named=False, may_close=True, wanted=ANY_4XX)
        for name, data in told
    ]


def png_head(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    return b"\x89PNG\r\n\x1a\n" + _chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    )


def png_bomb(width: int, height: int) -> bytes:
    """The same with pixels: zeros, a thousandth of what they unfold to."""
    data = zlib_bomb((width + 1) * height)
    return png_head(width, height) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def gzip_bomb(size: int) -> bytes:
    crc, block = 0, bytes(_BLOCK)
    for at in range(0, size, _BLOCK):
        crc = zlib.crc32(block[: size - at], crc)
    head = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"
    return head + _zeros(size) + struct.pack("<II", crc, size % 2**32)


@cache
def zlib_bomb(size: int) -> bytes:
    # Adler-32 of zeros: the first sum stays 1 and the second counts them.
    return b"\x78\xda" + _zeros(size) + struct.pack(">I", (size % 65521) << 16 | 1)


def _zeros(size: int) -> bytes:
    """So many zeros, deflated.

    A block that ends in a full flush knows nothing of what was before it, so one is compressed and
    repeated: a gigabyte in no time.
    """
    whole, rest = divmod(size, _BLOCK)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(bytes(_BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packed * whole + last.compress(bytes(rest)) + last.flush()


def _v2(shape: list[int], data: list[float]) -> bytes:
    tensor = {"name": "image", "datatype": "FP32", "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def _binary(shape: list[int], claimed: int, sent: int) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "image", "datatype": "FP32", "shape": shape,
              "parameters": {"binary_data_size": claimed}}  # fmt: skip
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + bytes(sent), {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }

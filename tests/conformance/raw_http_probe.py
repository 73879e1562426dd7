"""HTTP/1.1 at its edges, by raw sockets: framing, smuggling, sizes, Expect, codings, slow clients.

    python tests/conformance/raw_http_probe.py http://127.0.0.1:8000 --post /predictions/MODEL \
        [--get /v2/health/live] [--max-body BYTES] [--slow SECONDS]

For loopback only. Each case says what may be answered: statuses, CLOSE (closed without an answer)
or SILENCE. `shut`: the connection must be closed after it, so that nothing behind a faulty request
is taken for another one. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

if __package__:
    from .report import Checks, Skip, need
else:
    sys.path.insert(0, str(Path(__file__).parent))
    from report import Checks, Skip, need  # type: ignore[import-not-found,no-redef]

CLOSE, SILENCE = -1, -2
OK = frozenset(range(200, 300))
BAD = frozenset(range(400, 500))
BAD_OR_CLOSE = BAD | {CLOSE}
ANY = OK | BAD

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
Send = bytes | Sequence[bytes | float]


@dataclass(frozen=True)
class Heard:
    statuses: list[int]
    closed: bool
    raw: bytes
    seconds: float

    @property
    def first(self) -> int:
        if self.statuses:
            return self.statuses[0]
        return CLOSE if self.closed else SILENCE

    @property
    def final(self) -> list[int]:
        return [status for status in self.statuses if status >= 200]


@dataclass(frozen=True)
class Target:
    """`get` answers 200 to GET, `post` takes a body. 0: not known, and those cases are skipped."""

    url: str
    get: str = "/v2/health/live"
    post: str = "/"
    max_body: int = 0
    slow_s: float = 0.0
    patience_s: float = 3.0
    host: str = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError("this probe is for loopback only")
        object.__setattr__(self, "host", parts.hostname)
        object.__setattr__(self, "port", parts.port or 80)

    @property
    def host_line(self) -> bytes:
        return f"Host: {self.host}:{self.port}\r\n".encode()

    def talk(self, send: Send, *, patience_s: float = 0.0, half_close: bool = False) -> Heard:
        """Send bytes (numbers are pauses), then listen until it is quiet."""
        begun = time.monotonic()
        patience = patience_s or self.patience_s
        raw, closed = b"", False
        with socket.create_connection((self.host, self.port)) as link:
            link.settimeout(patience)
            try:
                for piece in [send] if isinstance(send, bytes) else send:
                    if isinstance(piece, bytes):
                        link.sendall(piece)
                    else:
                        time.sleep(piece)
                if half_close:
                    link.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has hung up in the middle: what it said before counts
            end = time.monotonic() + patience
            try:
                while (left := end - time.monotonic()) > 0:
                    link.settimeout(min(left, 0.35) if raw else left)
                    data = link.recv(65536)
                    if not data:
                        closed = True
                        break
                    raw += data
            except TimeoutError:
                pass
            except OSError:
                closed = True
        statuses = [int(found[1]) for found in _STATUS.finditer(raw)]
        return Heard(statuses, closed, raw, time.monotonic() - begun)

    def request(self, line: bytes, fields: bytes = b"", body: bytes = b"") -> bytes:
        return line + b" HTTP/1.1\r\n" + self.host_line + fields + b"\r\n" + body

    def getting(self, fields: bytes = b"", body: bytes = b"") -> bytes:
        return self.request(b"GET " + self.get.encode(), fields, body)

    def posting(self, fields: bytes = b"", body: bytes = b"") -> bytes:
        return self.request(b"POST " + self.post.encode(), fields, body)

    @property
    def smuggled(self) -> bytes:
        """What must never be taken for a request of its own."""
        return self.request(b"GET /smuggled")


def judge(
    target: Target,
    send: Callable[[Target], Send],
    want: Collection[int] | None,
    *,
    shut: bool = False,
    answers: Collection[int] = (0, 1),
    also: Callable[[Heard], bool] | None = None,
    patience_s: float = 0.0,
    half_close: bool = False,
) -> None:
    heard = target.talk(send(target), patience_s=patience_s, half_close=half_close)
    shown = f"{heard.statuses or heard.first}{' closed' if heard.closed else ''}"
    if want is not None:
        need(heard.first in want, shown)
    if heard.statuses:
        need(len(heard.final) in answers, f"{len(heard.final)} answers:", shown)
        need(not shut or heard.closed, "not closed:", shown)
    if also is not None:
        need(also(heard), shown, heard.raw[:200])


check: Checks[Target] = Checks()


def case(
    name: str, send: Callable[[Target], Send], want: Collection[int] | None, **options: object
) -> None:
    check.add(name, partial(judge, send=send, want=want, **options))  # type: ignore[arg-type]


# -- framing: refused, and closed, so that the rest is never read as a second request --------------

CHUNKED = b"Transfer-Encoding: chunked\r\n"

case(
    "Content-Length and chunked",
    lambda t: t.posting(b"Content-Length: 6\r\n" + CHUNKED, b"0\r\n\r\n" + t.smuggled),
    BAD,
    shut=True,
)
case(
    "chunked and Content-Length",
    lambda t: t.posting(CHUNKED + b"Content-Length: 6\r\n", b"0\r\n\r\n" + t.smuggled),
    BAD,
    shut=True,
)
case(
    "two lengths that differ",
    lambda t: t.posting(b"Content-Length: 0\r\nContent-Length: 44\r\n", t.smuggled),
    BAD_OR_CLOSE,
    shut=True,
)
case(
    "two lengths that agree",
    lambda t: t.posting(b"Content-Length: 2\r\nContent-Length: 2\r\n", b"{}"),
    ANY | {CLOSE},
)
case(
    "a list of lengths",
    lambda t: t.posting(b"Content-Length: 2, 2\r\n", b"{}"),
    BAD_OR_CLOSE,
    shut=True,
)


def _length(value: bytes, target: Target) -> bytes:
    return target.posting(b"Content-Length: " + value + b"\r\n", b"{}")


def _coding(value: bytes, target: Target) -> bytes:
    fields = b"Transfer-Encoding: " + value + b"\r\n"
    return target.posting(fields, b"0\r\n\r\n" + target.smuggled)


for _value in (b"+2", b"-2", b"0x2", b"2_0", b"2 2", b"", b"\xb2", b"9" * 23):
    case(f"Content-Length {_value!r}", partial(_length, _value), BAD_OR_CLOSE, shut=True)
for _value in (
    b"xchunked",
    b"chunked, identity",
    b"chunked, chunked",
    b"identity, chunked, identity",
    b"\x0bchunked",
    b"chunked\x00",
    b"ch\xc3\xbcnked",
    b"gzip, chunked",
):
    case(f"Transfer-Encoding {_value!r}", partial(_coding, _value), BAD_OR_CLOSE | {501}, shut=True)
case(
    "two Transfer-Encodings",
    lambda t: t.posting(CHUNKED + b"Transfer-Encoding: identity\r\n", b"0\r\n\r\n" + t.smuggled),
    BAD_OR_CLOSE | {501},
    shut=True,
)
case(
    "a blank before the colon",
    lambda t: t.posting(b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n" + t.smuggled),
    BAD_OR_CLOSE,
    shut=True,
)
case(
    "a folded Transfer-Encoding",
    lambda t: t.posting(b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n" + t.smuggled),
    BAD_OR_CLOSE,
    shut=True,
)
case(
    "lines that end with LF alone",
    lambda t: t.getting().replace(b"\r\n", b"\n"),
    BAD_OR_CLOSE,
    shut=True,
)
for _name, _fields in {
    "a folded field": b"X-A: b\r\n c\r\n",
    "a CR in a value": b"X-A: b\rX-B: c\r\n",
    "a NUL in a value": b"X-A: b\x00c\r\n",
    "a name that is no token": b"X(A): b\r\n",
    "an empty name": b": b\r\n",
    "a field without a colon": b"XA\r\n",
}.items():
    case(_name, partial(lambda f, t: t.getting(f), _fields), BAD_OR_CLOSE, shut=True)
case("bytes beyond ASCII in a value", lambda t: t.getting(b"X-A: caf\xe9\r\n"), ANY)

# -- chunked bodies --------------------------------------------------------------------------------

for _name, _body in {
    "a negative chunk size": b"-1\r\n{}\r\n0\r\n\r\n",
    "a chunk size 0x2": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk size that overflows": b"1" + b"0" * 20 + b"\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than its size": b"1\r\n{}\r\n0\r\n\r\n",
    "a chunk size that ends with LF alone": b"2\n{}\r\n0\r\n\r\n",
    "a chunk extension with LF alone": b"2;a\nb\r\n{}\r\n0\r\n\r\n",
}.items():
    case(_name, partial(lambda b, t: t.posting(CHUNKED, b), _body), BAD_OR_CLOSE, shut=True)
case(
    "a chunk extension is ignored",
    lambda t: t.posting(CHUNKED, b'2;a="b";c\r\n{}\r\n0\r\n\r\n'),
    ANY,
)
case(
    "trailers are not taken for fields",
    lambda t: t.posting(
        CHUNKED + b"Trailer: X-T\r\n", b"2\r\n{}\r\n0\r\nX-T: 1\r\nContent-Length: 99\r\n\r\n"
    ),
    ANY,
)
case(
    "chunked in HTTP/1.0",
    lambda t: t.posting(CHUNKED, b"0\r\n\r\n" + t.smuggled).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    BAD_OR_CLOSE,
    shut=True,
)

# -- request line and host -------------------------------------------------------------------------

case(
    "no Host",
    lambda t: b"GET " + t.get.encode() + b" HTTP/1.1\r\n\r\n",
    BAD,
    shut=True,
)
case("two Hosts", lambda t: t.getting(b"Host: other\r\n"), BAD, shut=True)
case(
    "a whole URL as the target",
    lambda t: t.request(f"GET http://{t.host}:{t.port}{t.get}".encode()),
    OK,
)
case("CONNECT", lambda t: t.request(b"CONNECT example:443"), BAD | {501})
case("OPTIONS *", lambda t: t.request(b"OPTIONS *"), ANY)
case("TRACE", lambda t: t.request(b"TRACE " + t.get.encode()), BAD | {501})
case(
    "an HTTP/2 preface",
    lambda t: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    BAD_OR_CLOSE | {505},
    shut=True,
)
case("HTTP/0.9", lambda t: b"GET /\r\n", BAD_OR_CLOSE | {SILENCE})
case(
    "a TLS hello on a plain port",
    lambda t: bytes.fromhex("16030100a5010000a10303") + bytes(40),
    BAD_OR_CLOSE,
    shut=True,
)
case("a path that climbs", lambda t: t.request(b"GET /x/..%2f..%2fetc/passwd"), BAD)

# -- sizes -----------------------------------------------------------------------------------------

LONG = b"a" * 16384

case("a target of 16 KiB", lambda t: t.request(b"GET /" + LONG), {400, 414, 431, CLOSE})
case("a field of 16 KiB", lambda t: t.getting(b"X-A: " + LONG + b"\r\n"), {400, 431, CLOSE})
case(
    "300 fields",
    lambda t: t.getting(b"".join(b"X-%d: y\r\n" % i for i in range(300))),
    {400, 431, CLOSE},
)
case(
    "a token of 4000 bytes is taken",
    lambda t: t.getting(b"Authorization: Bearer " + b"a" * 4000 + b"\r\n"),
    OK,
)

# -- connections -----------------------------------------------------------------------------------

case("one request after the other", lambda t: [t.getting(), 0.2, t.getting()], OK, answers={2})
case("three requests at once, in order", lambda t: t.getting() * 3, OK, answers={3})
case("Connection: close", lambda t: t.getting(b"Connection: close\r\n"), OK, shut=True)
case(
    "HTTP/1.0 closes",
    lambda t: t.getting().replace(b"HTTP/1.1", b"HTTP/1.0"),
    OK,
    shut=True,
)
case(
    "HTTP/1.0 keeps alive if it says so",
    lambda t: t.getting(b"Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    OK,
    also=lambda h: h.closed != (b"keep-alive" in h.raw.lower()),
)
case("blank lines before a request", lambda t: b"\r\n\r\n" + t.getting(), ANY)
case(
    "a head byte by byte",
    lambda t: [x for b in t.getting() for x in (bytes([b]), 0.002)],
    OK,
)

# -- methods ---------------------------------------------------------------------------------------

case(
    "HEAD has no body",
    lambda t: t.request(b"HEAD " + t.get.encode()),
    None,
    also=lambda h: h.first == 405 or h.raw.endswith(b"\r\n\r\n"),
)
case(
    "HEAD, then GET",
    lambda t: [t.request(b"HEAD " + t.get.encode()), 0.2, t.getting()],
    None,
    answers={2},
)
case("an unknown method", lambda t: t.request(b"BREW " + t.get.encode()), {400, 405, 501})
case(
    "a wrong method is told the right ones",
    lambda t: t.request(b"DELETE " + t.get.encode()),
    {405},
    also=lambda h: b"\nallow:" in h.raw.lower(),
)
case(
    "GET with a body keeps the framing",
    lambda t: t.getting(b"Content-Length: 2\r\n", b"{}") + t.getting(),
    ANY,
    answers={0, 1, 2},
)

# -- Expect, Upgrade -------------------------------------------------------------------------------

EXPECT = b"Expect: 100-continue\r\nContent-Length: 2\r\n"

case("100-continue", lambda t: [t.posting(EXPECT), 0.4, b"{}"], ANY | {100})
case("100 comes before the body", lambda t: t.posting(EXPECT), BAD | {100})
case(
    "another expectation",
    lambda t: t.posting(b"Expect: magic\r\nContent-Length: 2\r\n", b"{}"),
    {417} | OK,
)
case(
    "no 100 for HTTP/1.0",
    lambda t: t.posting(EXPECT, b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"),
    None,
    also=lambda h: h.first not in (100, CLOSE, SILENCE),
)
case(
    "h2c is not taken up",
    lambda t: t.getting(
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    ),
    OK,
)
case(
    "a websocket is not taken up",
    lambda t: t.getting(
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n"
    ),
    ANY,
)

# -- content codings -------------------------------------------------------------------------------

case(
    "an unknown coding",
    lambda t: t.posting(b"Content-Encoding: rot13\r\nContent-Length: 2\r\n", b"{}"),
    {415},
    also=lambda h: b"\naccept-encoding:" in h.raw.lower(),
)
case(
    "a gzip body that is none",
    lambda t: t.posting(b"Content-Encoding: gzip\r\nContent-Length: 2\r\n", b"{}"),
    BAD,
)


def _gzipped(body: bytes) -> bytes:
    return b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(body)


def _bomb(target: Target) -> bytes:
    machine = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = machine.compress(bytes(64 << 20)) + machine.flush()
    return target.posting(_gzipped(body), body)


def _two_members(target: Target) -> bytes:
    machine = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = (machine.compress(b"{}") + machine.flush()) * 2
    return target.posting(_gzipped(body), body)


@check("a gzip bomb of 64 MiB")
def _(target: Target) -> None:
    if not 0 < target.max_body < 64 << 20:
        raise Skip("the limit is not known, or above what the bomb holds")
    judge(target, _bomb, {400, 413}, patience_s=20)


case("a second gzip member", _two_members, BAD)
case(
    "a body that ends too soon",
    lambda t: t.posting(b"Content-Length: 100\r\n", b"{}"),
    None,
    half_close=True,
    also=lambda h: not h.statuses or h.statuses[-1] >= 400,
)

# -- limits, where they are known ------------------------------------------------------------------


def _limited(
    name: str, send: Callable[[Target], Send], want: Collection[int], patience_s: float = 0.0
) -> None:
    def function(target: Target) -> None:
        if not target.max_body:
            raise Skip("no --max-body given")
        judge(target, send, want, patience_s=patience_s)

    check.add(name, function)


_limited(
    "a length over the limit is refused before the body",
    lambda t: t.posting(b"Content-Length: %d\r\n" % (t.max_body + 1)),
    {413},
)
_limited(
    "a length over the limit brings no 100",
    lambda t: t.posting(b"Expect: 100-continue\r\nContent-Length: %d\r\n" % (t.max_body + 1)),
    {413},
)
_limited(
    "chunks over the limit",
    lambda t: [
        t.posting(CHUNKED),
        *[b"10000\r\n" + bytes(65536) + b"\r\n"] * (t.max_body // 65536 + 2),
        b"0\r\n\r\n",
    ],
    {413, CLOSE},
    patience_s=20,
)


def _slow(name: str, send: Callable[[Target], Send]) -> None:
    def function(target: Target) -> None:
        if not target.slow_s:
            raise Skip("no --slow given")
        heard = target.talk(send(target), patience_s=target.slow_s + 2)
        need(heard.closed or 408 in heard.statuses, f"open after {heard.seconds:.1f} s")

    check.add(name, function)


_slow("a connection that says nothing is closed", lambda t: b"")
_slow(
    "a head that stalls is cut off",
    lambda t: t.getting()[:-2] + b"X-A: ",
)
_slow(
    "a body that stalls is cut off",
    lambda t: t.posting(b"Content-Length: 100\r\n", b"x"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Probe a server's HTTP/1.1.")
    parser.add_argument("url")
    parser.add_argument("--get", default="/v2/health/live")
    parser.add_argument("--post", default="/")
    parser.add_argument("--max-body", type=int, default=0, help="the server's limit, in bytes")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds given to who stalls")
    given = parser.parse_args()
    target = Target(given.url, given.get, given.post, given.max_body, given.slow)
    return check.run("raw HTTP probe", target)


if __name__ == "__main__":
    raise SystemExit(main())

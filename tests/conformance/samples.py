"""Requests as well-known clients really send them, byte by byte, and what must come back.

The heads keep each client's habits: no Content-Type from tritonclient, the type of a form from
curl, PUT with Expect from `curl -T`, file parts without a type from requests, a gzip head alone in
its chunk from aiohttp. They speak to a model `m` that gives back tensors (the input X as the
output O), and answers opaque parts with a JSON object; it also generates, chats and embeds.

    python tests/conformance/samples.py http://127.0.0.1:8000
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __package__:
    from .report import Checks, need
else:
    sys.path.insert(0, str(Path(__file__).parent))
    from report import Checks, need  # type: ignore[import-not-found,no-redef]

TRITON = "python/gevent-http-client-2.6.1"
INFER = "/v2/models/m/infer"
ALL_BINARY = {"binary_data_output": True}


def png(width: int = 4, height: int = 2) -> bytes:
    """A small RGB picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        tail = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + tail

    row = b"\0" + bytes(range(3 * width))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(row * height))
        + chunk(b"IEND", b"")
    )


PICTURE = png()


def head(line: str, fields: dict[str, str]) -> bytes:
    lines = [line, *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def triton(document: dict[str, Any], tail: bytes | None = None) -> bytes:
    """As tritonclient: compact JSON, no Content-Type, the header length only with binary data."""
    text = json.dumps(document, separators=(",", ":")).encode()
    fields = {"User-Agent": TRITON}
    if tail is not None:
        fields["Inference-Header-Content-Length"] = str(len(text))
    fields["Host"] = "127.0.0.1:8000"
    fields["Content-Length"] = str(len(text) + len(tail or b""))
    return head(f"POST {INFER} HTTP/1.1", fields) + text + (tail or b"")


def tensor(name: str, shape: list[int], datatype: str, size: int | None = None, **more: Any) -> Any:
    found: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
    if size is not None:
        found["parameters"] = {"binary_data_size": size}
    return {**found, **more}


def curl(method: str, body: bytes, version: str = "1.1", **fields: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    fixed = {"Host": "127.0.0.1:8000", "User-Agent": "curl/7.88.1"}
    return head(f"{method} /infer HTTP/{version}", {**fixed, **named}) + body


def requests(body: bytes, **fields: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    fixed = {
        "Host": "127.0.0.1:8000",
        "User-Agent": "python-requests/2.34.2",
        "Accept-Encoding": "gzip, deflate, br",
        "Accept": "*/*",
        "Connection": "keep-alive",
    }
    return head("POST /infer HTTP/1.1", {**fixed, **named}) + body


def openai(path: str, document: dict[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    fields = {
        "Host": "127.0.0.1:8000",
        "Accept-Encoding": "gzip, deflate, br",
        "Connection": "keep-alive",
        "authorization": "Bearer test-key",
        "accept": "application/json",
        "content-type": "application/json",
        "user-agent": "OpenAI/Python 3.57.0",
        "x-stainless-lang": "python",
        "x-stainless-retry-count": "0",
        "x-stainless-read-timeout": "600",
        "Content-Length": str(len(body)),
    }
    return head(f"POST {path} HTTP/1.1", fields) + body


def form(boundary: str, *parts: tuple[str, bytes]) -> bytes:
    """Each part: its head's lines, and its data."""
    pieces = [f"--{boundary}\r\n{lines}\r\n\r\n".encode() + data + b"\r\n" for lines, data in parts]
    return b"".join(pieces) + f"--{boundary}--\r\n".encode()


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


@dataclass(frozen=True)
class Heard:
    status: int
    fields: dict[str, str]
    body: bytes
    continued: bool  # a 100 came first
    version: str

    def json(self) -> Any:
        return json.loads(self.body)

    def tensors(self) -> tuple[Any, bytes]:
        split = int(self.fields["inference-header-content-length"])
        return json.loads(self.body[:split])["outputs"], self.body[split:]


def exchange(url: str, raw: bytes, patience_s: float = 10.0) -> Heard:
    """Send it on a connection of its own and read one answer."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), patience_s) as link:
        link.sendall(raw)
        stream = link.makefile("rb")
        status_line = stream.readline().decode()
        continued = " 100 " in status_line
        if continued:
            stream.readline()
            status_line = stream.readline().decode()
        version, status, _ = status_line.split(" ", 2)
        fields: dict[str, str] = {}
        while (line := stream.readline().decode().strip()) != "":
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        if fields.get("transfer-encoding") == "chunked":
            body = b""
            while (size := int(stream.readline(), 16)) > 0:
                body += stream.read(size)
                stream.readline()
            stream.readline()
        elif "content-length" in fields:
            body = stream.read(int(fields["content-length"]))
        else:
            body = stream.read()
    if fields.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    return Heard(int(status), fields, body, continued, version)


@dataclass(frozen=True)
class Sample:
    raw: bytes
    right: Callable[[Heard], object]


def echoes(data: bytes, heard: Heard) -> None:
    need(heard.status == 200, heard)
    need(heard.tensors()[1] == data, heard.body)


def says(status: int, *words: str) -> Callable[[Heard], None]:
    def right(heard: Heard) -> None:
        need(heard.status == status, heard)
        need(all(word in heard.body.decode("utf-8", "replace") for word in words), heard.body)

    return right


def _shape_kept_or_refused(heard: Heard) -> None:
    if heard.status == 200:
        text = heard.body[: int(heard.fields.get("inference-header-content-length", 10**9))]
        need(json.loads(text)["outputs"][0]["shape"] == [0, 3], heard.body)
    else:
        says(400, "error")(heard)


def _binary_or_told(heard: Heard) -> None:
    if heard.status != 200:
        says(400, "binary")(heard)


def _put(heard: Heard) -> None:
    need(heard.continued, "no 100 Continue")
    says(200)(heard)


def _old(heard: Heard) -> None:
    says(200)(heard)
    need("transfer-encoding" not in heard.fields, heard.fields)


def _stream(heard: Heard) -> None:
    says(200)(heard)
    need(heard.fields["content-type"].startswith("text/event-stream"), heard.fields)
    events = re.findall(r"^data: (.*)$", heard.body.decode(), re.MULTILINE)
    need(events[-1] == "[DONE]", events[-1])
    need(json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant", events[0])
    need(json.loads(events[-2])["choices"][0]["finish_reason"] == "stop", events[-2])


def _embedding(heard: Heard) -> None:
    says(200)(heard)
    text = heard.json()["data"][0]["embedding"]
    need(isinstance(text, str) and len(base64.b64decode(text)) % 4 == 0, text)


FP32 = struct.pack("<4f", 0, 1, 2, 3)
STRINGS = b"\x05\0\0\0\x00\xff ab" + b"\x03\0\0\0h\xc3\xa9"
HALVES = b"\x00\x3e\xff\x7b"  # 1.5 and the largest
PACKED = gzip.compress(b'{"x":1}', mtime=0)
NAN = (
    b'{"inputs":[{"name":"X","shape":[3],"datatype":"FP32",'
    b'"data":[NaN,Infinity,1.401298464324817e-45]}],"parameters":{"binary_data_output":true}}'
)
CURL_MARK = "-" * 24 + "ba7b1a9b69a45ce8"
REQUESTS_MARK = "45e4a424c1196eb4051afea46d89d9da"
CURL_FORM = form(
    CURL_MARK,
    (
        'Content-Disposition: form-data; name="image"; filename="img.png"\r\n'
        "Content-Type: image/png",
        PICTURE,
    ),
    ('Content-Disposition: form-data; name="k"', b"5"),
)
FILES_FORM = form(
    REQUESTS_MARK,
    ('Content-Disposition: form-data; name="k"', b"5"),
    ('Content-Disposition: form-data; name="image"; filename="img.png"', PICTURE),
)
UTF8_FORM = form(
    REQUESTS_MARK,
    (
        'Content-Disposition: form-data; name="imáge"; filename="föto %221%22.png"\r\n'
        "Content-Type: image/png",
        PICTURE,
    ),
)

SAMPLES = {
    "tritonclient, FP32, binary both ways": Sample(
        triton({"inputs": [tensor("X", [2, 2], "FP32", 16)], "parameters": ALL_BINARY}, FP32),
        partial(echoes, FP32),
    ),
    "tritonclient, JSON, priority and timeout": Sample(
        triton(
            {
                "id": "r1",
                "inputs": [tensor("X", [2, 2], "FP32", data=[0.0, 1.0, 2.0, 3.0])],
                "outputs": [{"name": "O", "parameters": {"binary_data": False}}],
                "parameters": {"priority": 2, "timeout": 500000},
            }
        ),
        says(200, '"id":"r1"', "[0.0,1.0,2.0,3.0]"),
    ),
    "tritonclient, BYTES, binary": Sample(
        triton({"inputs": [tensor("S", [2], "BYTES", 16)], "parameters": ALL_BINARY}, STRINGS),
        partial(echoes, STRINGS),
    ),
    "tritonclient, an empty tensor": Sample(
        triton({"inputs": [tensor("X", [0, 3], "FP32", 0)], "parameters": ALL_BINARY}, b""),
        _shape_kept_or_refused,
    ),
    "tritonclient, NaN and Infinity as tokens": Sample(
        head(
            f"POST {INFER} HTTP/1.1",
            {"User-Agent": TRITON, "Host": "127.0.0.1:8000", "Content-Length": str(len(NAN))},
        )
        + NAN,
        _binary_or_told,
    ),
    "tritonclient, FP16, binary": Sample(
        triton({"inputs": [tensor("X", [2], "FP16", 4)], "parameters": ALL_BINARY}, HALVES),
        partial(echoes, HALVES),
    ),
    "tritonclient, the largest UINT64 as JSON": Sample(
        triton(
            {"inputs": [tensor("X", [1], "UINT64", data=[2**64 - 1])], "parameters": ALL_BINARY}
        ),
        partial(echoes, b"\xff" * 8),
    ),
    "tritonclient, two inputs": Sample(
        triton(
            {
                "inputs": [tensor("A", [2, 2], "FP32", 16), tensor("B", [2], "BOOL", 2)],
                "parameters": ALL_BINARY,
            },
            FP32 + b"\1\0",
        ),
        partial(echoes, FP32 + b"\1\0"),
    ),
    "KServe's SDK, an empty tensor with data null": Sample(
        triton(
            {
                "id": "0f8fad5b-d9cb-469f-a165-70867728950e",
                "model_name": "m",
                "inputs": [tensor("X", [0, 3], "FP32", 0, data=None)],
            },
            b"",
        ),
        _shape_kept_or_refused,
    ),
    "curl, a form": Sample(
        curl(
            "POST",
            CURL_FORM,
            Accept="*/*",
            Content_Length=str(len(CURL_FORM)),
            Content_Type=f"multipart/form-data; boundary={CURL_MARK}",
        ),
        says(200, "image"),
    ),
    "curl --data-binary, a picture called a form": Sample(
        curl(
            "POST",
            PICTURE,
            Accept="*/*",
            Content_Length=str(len(PICTURE)),
            Content_Type="application/x-www-form-urlencoded",
        ),
        says(200),
    ),
    "curl -T -, chunked PUT with Expect": Sample(
        curl(
            "PUT",
            chunks(PICTURE),
            Accept="*/*",
            Transfer_Encoding="chunked",
            Expect="100-continue",
        ),
        _put,
    ),
    "curl -0, HTTP/1.0": Sample(
        curl(
            "POST",
            b'{"x":1}',
            "1.0",
            Content_Type="application/json",
            Accept="application/json",
            Content_Length="7",
        ),
        _old,
    ),
    "requests, a file without a type": Sample(
        requests(
            FILES_FORM,
            Content_Length=str(len(FILES_FORM)),
            Content_Type=f"multipart/form-data; boundary={REQUESTS_MARK}",
        ),
        says(200, "image", "k"),
    ),
    "requests, names beyond ASCII": Sample(
        requests(
            UTF8_FORM,
            Content_Length=str(len(UTF8_FORM.decode("latin-1"))),
            Content_Type=f"multipart/form-data; boundary={REQUESTS_MARK}",
        ),
        says(200),
    ),
    "requests, JSON in chunks": Sample(
        requests(
            chunks(b'{"x":', b"1}"),
            Content_Type="application/json",
            Transfer_Encoding="chunked",
        ),
        says(200),
    ),
    "aiohttp, gzip in chunks": Sample(
        head(
            "POST /infer HTTP/1.1",
            {
                "Host": "127.0.0.1:8000",
                "Content-Type": "application/json",
                "Accept": "*/*",
                "Accept-Encoding": "gzip, deflate, br",
                "User-Agent": "Python/3.11 aiohttp/3.14.5",
                "Content-Encoding": "gzip",
                "Transfer-Encoding": "chunked",
            },
        )
        + chunks(PACKED[:10], PACKED[10:]),
        says(200),
    ),
    "openai, a streamed chat": Sample(
        openai(
            "/v1/chat/completions",
            {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]},
        ),
        _stream,
    ),
    "openai, embeddings as base64": Sample(
        openai("/v1/embeddings", {"model": "m", "input": "abc", "encoding_format": "base64"}),
        _embedding,
    ),
}


def check_sample(name: str, url: str) -> None:
    sample = SAMPLES[name]
    sample.right(exchange(url, sample.raw))


check: Checks[str] = Checks()
for _name in SAMPLES:
    check.add(_name, partial(check_sample, _name))


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: samples.py URL\n")
        return 2
    return check.run("samples", sys.argv[1])


if __name__ == "__main__":
    raise SystemExit(main())

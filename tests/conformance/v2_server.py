"""A server of the v2 protocol as the checks see it: requests made from a model's own metadata, and
answers compared with them. Standard library only."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import struct
import sys
import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

if __package__:
    from .report import Skip, need
else:
    sys.path.insert(0, str(Path(__file__).parent))
    from report import Skip, need  # type: ignore[import-not-found,no-redef]

LENGTH = "Inference-Header-Content-Length"
JSON = {"Content-Type": "application/json"}
SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2,
    "INT32": 4, "INT64": 8, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
FORMATS = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b",
    "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip

Body = bytes | Iterable[bytes] | None
Reply = tuple[int, dict[str, str], bytes]
Headers = dict[str, str]


class Server:
    """A server and one model of it. `rows` and `dim` stand for variable dimensions."""

    def __init__(self, url: str, model: str, *, identity: bool = False, rows: int = 2) -> None:
        self._url = urlsplit(url)
        self.model = model
        self.identity = identity
        self.rows = rows
        self.dim = 3
        self.base = "/v2/models/" + quote(model, safe="")

    def call(
        self, method: str, path: str, body: Body = None, headers: Headers | None = None
    ) -> Reply:
        assert self._url.hostname is not None
        chunked = (headers or {}).get("Transfer-Encoding") == "chunked"
        link = http.client.HTTPConnection(self._url.hostname, self._url.port or 80, timeout=30)
        try:
            target = self._url.path.rstrip("/") + path
            link.request(method, target, body=body, headers=headers or {}, encode_chunked=chunked)
            answer = link.getresponse()
            data = answer.read()
        finally:
            link.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if found.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        elif found.get("content-encoding") == "deflate":
            data = zlib.decompress(data)
        return answer.status, found, data

    def post(self, document: Any, headers: Headers | None = None, path: str = "") -> Reply:
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.call(
            "POST", path or self.base + "/infer", text, JSON if headers is None else headers
        )

    def post_binary(self, body: bytes, headers: Headers) -> Reply:
        return self.call("POST", self.base + "/infer", body, headers)

    @cached_property
    def extensions(self) -> set[str]:
        return set(said(self.call("GET", "/v2"))["extensions"])

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return dict(said(self.call("GET", self.base)))

    @property
    def inputs(self) -> list[dict[str, Any]]:
        return list(self.metadata["inputs"])

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return list(self.metadata["outputs"])

    def version(self) -> str:
        versions = self.metadata.get("versions") or []
        if not versions:
            raise Skip("the model has no versions")
        return str(versions[-1])

    def shape(self, tensor: dict[str, Any]) -> list[int]:
        return [
            d if d != -1 else (self.rows if axis == 0 else self.dim)
            for axis, d in enumerate(tensor["shape"])
        ]

    # -- requests ---------------------------------------------------------------------------------

    def json_request(self, *, nested: bool = False, **more: Any) -> dict[str, Any]:
        inputs = []
        for tensor in self.inputs:
            shape = self.shape(tensor)
            data = values(tensor["datatype"], math.prod(shape))
            inputs.append(
                {
                    "name": tensor["name"],
                    "datatype": tensor["datatype"],
                    "shape": shape,
                    "data": nest(data, shape) if nested else data,
                }
            )
        return {"inputs": inputs, **more}

    def binary_request(self, **more: Any) -> tuple[bytes, Headers]:
        self.needs("binary_tensor_data")
        inputs, raws = [], []
        for tensor in self.inputs:
            shape = self.shape(tensor)
            raw = pack(tensor["datatype"], values(tensor["datatype"], math.prod(shape)))
            raws.append(raw)
            inputs.append(
                {
                    "name": tensor["name"],
                    "datatype": tensor["datatype"],
                    "shape": shape,
                    "parameters": {"binary_data_size": len(raw)},
                }
            )
        text = json.dumps({"inputs": inputs, **more}).encode()
        headers = {LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}
        return text + b"".join(raws), headers

    def broken(self, **change: Any) -> dict[str, Any]:
        """A request whose first input is changed so; None takes a member away."""
        first = {
            k: v for k, v in {**self.json_request()["inputs"][0], **change}.items() if v is not None
        }
        return {"inputs": [first]}

    def needs(self, extension: str) -> None:
        if extension not in self.extensions:
            raise Skip(f"{extension} is not announced")

    def needs_json(self) -> None:
        """16-bit floats need not be taken as JSON."""
        half = {t["datatype"] for t in self.inputs + self.outputs} & {"FP16", "BF16"}
        if half and self.post(self.json_request())[0] == 400:
            raise Skip("16-bit floats are refused as JSON")

    # -- answers ----------------------------------------------------------------------------------

    def check(
        self,
        document: dict[str, Any],
        tail: bytes = b"",
        *,
        names: list[str] | None = None,
        binary: bool | None = None,
    ) -> None:
        need(document["model_name"] == self.model, document["model_name"])
        wanted = names or [t["name"] for t in self.outputs]
        need([o["name"] for o in document["outputs"]] == wanted, document["outputs"])
        at = 0
        for index, output in enumerate(document["outputs"]):
            declared = {t["name"]: t for t in self.outputs}[output["name"]]
            need(output["datatype"] == declared["datatype"], output)
            need(len(output["shape"]) == len(declared["shape"]), output)
            count = math.prod(output["shape"])
            size = output.get("parameters", {}).get("binary_data_size")
            if binary is not None:
                need((size is not None) == binary, f"binary_data_size is {size}")
            got: Any
            if size is None:
                got = flatten(output["data"])
                need(len(got) == count, f"{len(got)} values for {output['shape']}")
            else:
                got = tail[at : at + size]
                at += size
                need(len(got) == size, "the body ends before its tensors do")
                if output["datatype"] != "BYTES":
                    need(size == count * SIZES[output["datatype"]], "size and shape differ")
            if self.identity and index < len(self.inputs):
                sent = values(self.inputs[index]["datatype"], count)
                want: Any = sent if size is None else pack(output["datatype"], sent)
                need(got == want, "not what was sent:", str(got)[:80])
        need(at == len(tail), f"{len(tail) - at} bytes after the last tensor")

    def check_json(self, reply: Reply, **options: Any) -> dict[str, Any]:
        document: dict[str, Any] = said(reply)
        self.check(document, binary=False, **options)
        return document

    def check_binary(self, reply: Reply, **options: Any) -> dict[str, Any]:
        status, headers, body = reply
        need(status == 200, status, body[:150])
        need(LENGTH.lower() in headers, f"no {LENGTH}")
        need(headers["content-type"] == "application/octet-stream", headers["content-type"])
        split = int(headers[LENGTH.lower()])
        document: dict[str, Any] = json.loads(body[:split])
        self.check(document, body[split:], binary=True, **options)
        return document


def said(reply: Reply, status: int | tuple[int, ...] = 200) -> Any:
    got, headers, body = reply
    wanted = status if isinstance(status, tuple) else (status,)
    need(got in wanted, f"status {got}:", body[:150])
    need(headers.get("content-type") == "application/json", headers.get("content-type"))
    return json.loads(body)


def refused(reply: Reply, *status: int) -> str:
    found = said(reply, status or (400,))
    need(isinstance(found.get("error"), str) and found["error"], "no error text:", found)
    return str(found["error"])


def values(datatype: str, count: int) -> list[Any]:
    if datatype == "BYTES":
        return [f"v{i}-é" for i in range(count)]
    if datatype == "BOOL":
        return [bool(i % 2) for i in range(count)]
    if "FP" in datatype or datatype == "BF16":
        return [float(i % 7) for i in range(count)]
    return [i % 100 for i in range(count)]


def pack(datatype: str, data: list[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(v.encode())) + v.encode() for v in data)
    if datatype == "BF16":
        return b"".join(struct.pack("<f", v)[2:] for v in data)
    return struct.pack(f"<{len(data)}{FORMATS[datatype]}", *data)


def nest(data: list[Any], shape: list[int]) -> list[Any]:
    if len(shape) <= 1:
        return data
    step = math.prod(shape[1:])
    return [nest(data[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def flatten(data: Any) -> list[Any]:
    return [x for part in data for x in flatten(part)] if isinstance(data, list) else [data]

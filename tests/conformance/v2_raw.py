"""The Open Inference Protocol v2 over plain HTTP, checked on a running server.

    python tests/conformance/v2_raw.py http://127.0.0.1:8000 MODEL [--identity]

Requests are made from the model's own metadata. With --identity the model is known to give back
what it got, and values are compared. Standard library only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __package__:
    from .report import Checks, Skip, need
    from .v2_server import JSON, LENGTH, SIZES, Headers, Server, pack, refused, said, values
else:
    sys.path.insert(0, str(Path(__file__).parent))
    from report import Checks, Skip, need  # type: ignore[import-not-found,no-redef]
    from v2_server import (  # type: ignore[import-not-found,no-redef]
        JSON,
        LENGTH,
        SIZES,
        Headers,
        Server,
        pack,
        refused,
        said,
        values,
    )

check: Checks[Server] = Checks()


# -- server and model -----------------------------------------------------------------------------


@check("GET /v2 tells name, version and extensions")
def _(server: Server) -> None:
    found = said(server.call("GET", "/v2"))
    need(isinstance(found["name"], str) and isinstance(found["version"], str), found)
    need(all(isinstance(e, str) for e in found["extensions"]), found)


@check("GET /v2/ is the same, as the specification's document spells it")
def _(server: Server) -> None:
    need(said(server.call("GET", "/v2/")) == said(server.call("GET", "/v2")))


@check("the content type is bare application/json")
def _(server: Server) -> None:
    need(server.call("GET", "/v2")[1]["content-type"] == "application/json")


@check("live: 200")
def _(server: Server) -> None:
    need(server.call("GET", "/v2/health/live")[0] == 200)


@check("live: a JSON body that says so")
def _(server: Server) -> None:
    need(said(server.call("GET", "/v2/health/live"))["live"] is True)


@check("ready: 200")
def _(server: Server) -> None:
    need(server.call("GET", "/v2/health/ready")[0] == 200)


@check("ready: a JSON body that says so")
def _(server: Server) -> None:
    need(said(server.call("GET", "/v2/health/ready"))["ready"] is True)


@check("HEAD of health: 200 and no body")
def _(server: Server) -> None:
    status, _, body = server.call("HEAD", "/v2/health/ready")
    need(status == 200 and body == b"", status, body)


@check("GET /v2/models lists the model")
def _(server: Server) -> None:
    need(server.model in said(server.call("GET", "/v2/models"))["models"])


@check("model metadata has the declared form")
def _(server: Server) -> None:
    found = server.metadata
    need(found["name"] == server.model and isinstance(found["platform"], str), found)
    for tensor in found["inputs"] + found["outputs"]:
        need(tensor["datatype"] in {*SIZES, "BYTES"}, tensor)
        need(all(isinstance(d, int) and d >= -1 for d in tensor["shape"]), tensor)


@check("model ready: 200")
def _(server: Server) -> None:
    found = said(server.call("GET", server.base + "/ready"))
    need(found == {"name": server.model, "ready": True}, found)


@check("metadata and readiness of a version")
def _(server: Server) -> None:
    at = f"{server.base}/versions/{server.version()}"
    need(said(server.call("GET", at))["name"] == server.model)
    need(server.call("GET", at + "/ready")[0] == 200)


@check("versions are decimal strings")
def _(server: Server) -> None:
    need(all(isinstance(v, str) and v.isdigit() for v in server.metadata.get("versions", [])))


@check("unknown model: 404 for its metadata")
def _(server: Server) -> None:
    refused(server.call("GET", "/v2/models/no_such_model"), 404)


@check("unknown model: 404 for infer")
def _(server: Server) -> None:
    refused(server.call("POST", "/v2/models/no_such_model/infer", b'{"inputs":[]}'), 404)


@check("unknown model: 404 for ready, config and stats")
def _(server: Server) -> None:
    for verb in ("ready", "config", "stats"):
        refused(server.call("GET", f"/v2/models/no_such_model/{verb}"), 404)


@check("unknown version: 404")
def _(server: Server) -> None:
    refused(server.call("GET", f"{server.base}/versions/987654"), 404)
    refused(server.call("POST", f"{server.base}/versions/987654/infer", b"{}"), 404)


@check("a version that is no number: 404")
def _(server: Server) -> None:
    refused(server.call("GET", f"{server.base}/versions/v1"), 404)


@check("unknown path: 404 with an error")
def _(server: Server) -> None:
    refused(server.call("GET", "/v2/nope"), 404)


@check("wrong method: 405 with Allow and an error")
def _(server: Server) -> None:
    reply = server.call("GET", server.base + "/infer")
    refused(reply, 405)
    need("POST" in reply[1].get("allow", ""), reply[1])


@check("errors have a code and a request id, which is also in the head")
def _(server: Server) -> None:
    reply = server.call("GET", "/v2/models/no_such_model", headers={"X-Request-Id": "my-id.1"})
    found = said(reply, 404)
    need(found["code"] == "MODEL_NOT_FOUND" and found["request_id"] == "my-id.1", found)
    need(reply[1]["x-request-id"] == "my-id.1", reply[1])


# -- infer, JSON ----------------------------------------------------------------------------------


@check("JSON: flat data; the id comes back")
def _(server: Server) -> None:
    server.needs_json()
    need(server.check_json(server.post(server.json_request(id="42")))["id"] == "42")


@check("JSON: nested data")
def _(server: Server) -> None:
    server.needs_json()
    server.check_json(server.post(server.json_request(nested=True)))


@check("JSON: no Content-Type, as tritonclient sends it")
def _(server: Server) -> None:
    server.needs_json()
    server.check_json(server.post(server.json_request(), {}))


@check("JSON: charset in the Content-Type")
def _(server: Server) -> None:
    server.needs_json()
    server.check_json(
        server.post(server.json_request(), {"Content-Type": "application/json; charset=utf-8"})
    )


@check("JSON: the Content-Type of a form, as curl -d sends it")
def _(server: Server) -> None:
    server.needs_json()
    server.check_json(
        server.post(server.json_request(), {"Content-Type": "application/x-www-form-urlencoded"})
    )


@check("JSON: a version in the path")
def _(server: Server) -> None:
    server.needs_json()
    path = f"{server.base}/versions/{server.version()}/infer"
    found = server.check_json(server.post(server.json_request(), path=path))
    need(found["model_version"] == server.version(), found)


@check("JSON: one output asked for by name")
def _(server: Server) -> None:
    server.needs_json()
    name = server.outputs[-1]["name"]
    server.check_json(server.post(server.json_request(outputs=[{"name": name}])), names=[name])


@check("JSON: unknown parameters and members are no error")
def _(server: Server) -> None:
    server.needs_json()
    parameters = {"x": 1, "y": "z", "w": True}
    request = server.json_request(parameters=parameters, model_name=server.model)
    server.check_json(server.post(request))


@check("JSON: priority and timeout are taken")
def _(server: Server) -> None:
    server.needs_json()
    parameters = {"priority": 1, "timeout": 5_000_000}
    server.check_json(server.post(server.json_request(parameters=parameters)))


@check("JSON: no id asked for, none given")
def _(server: Server) -> None:
    server.needs_json()
    need("id" not in said(server.post(server.json_request())))


@check("JSON: the answer has no NaN or Infinity tokens")
def _(server: Server) -> None:
    server.needs_json()

    def strict(token: str) -> None:
        raise AssertionError(f"bare {token}")

    json.loads(server.post(server.json_request())[2], parse_constant=strict)


@check("JSON: a compressed answer for those who ask")
def _(server: Server) -> None:
    server.needs_json()
    headers = {**JSON, "Accept-Encoding": "gzip"}
    server.check_json(server.post(server.json_request(), headers))


def _bad(name: str, make: Callable[[Server], Any]) -> None:
    def function(server: Server) -> None:
        body = make(server)
        refused(server.post(body), 400)

    check.add(f"refused with 400: {name}", function)


for _name, _text in {
    "no JSON": b"{",
    "an empty body": b"",
    "a JSON array": b"[]",
    "no inputs": b"{}",
    "inputs that are no list": b'{"inputs": 3}',
    "broken UTF-8": b'{"inputs": [{"name": "\xff"}]}',
    "a hundred thousand brackets": b"[" * 100_000,
    "deep nesting in a member that is ignored": b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "NaN as a token": b'{"inputs":[{"name":"X","shape":[1],"datatype":"FP32","data":[NaN]}]}',
}.items():
    _bad(_name, partial(lambda text, server: text, _text))
_bad("an unknown input", lambda s: s.broken(name="zz_nope"))
_bad("an unknown datatype", lambda s: s.broken(datatype="FP99"))
_bad("a datatype in lower case", lambda s: s.broken(datatype=s.inputs[0]["datatype"].lower()))
_bad("a negative dimension", lambda s: s.broken(shape=[-1, *s.shape(s.inputs[0])[1:]]))
_bad("a dimension that is a fraction", lambda s: s.broken(shape=[2.5]))
_bad("more data than the shape", lambda s: s.broken(data=s.json_request()["inputs"][0]["data"] * 2))
_bad("a huge shape", lambda s: s.broken(shape=[2**40, *s.shape(s.inputs[0])[1:]]))
_bad("a shape whose product is 2^64", lambda s: s.broken(shape=[2**32, 2**32], data=[]))
_bad("no data", lambda s: s.broken(data=None))
_bad("an object in the data", lambda s: s.broken(data=[{}]))
_bad(
    "data nested deep",
    lambda s: (
        json.dumps(s.broken(data=[]))
        .encode()
        .replace(b'"data": []', b'"data": ' + b"[" * 5000 + b"]" * 5000)
    ),
)
_bad("an unknown output", lambda s: s.json_request(outputs=[{"name": "zz_nope"}]))
_bad(
    "an output asked for twice",
    lambda s: s.json_request(outputs=[{"name": s.outputs[0]["name"]}] * 2),
)
_bad("a priority below zero", lambda s: s.json_request(parameters={"priority": -1}))
_bad("a timeout that is text", lambda s: s.json_request(parameters={"timeout": "soon"}))


# -- infer, binary --------------------------------------------------------------------------------


@check("binary: in and out, flagged at each output; the id comes back")
def _(server: Server) -> None:
    outputs = [{"name": o["name"], "parameters": {"binary_data": True}} for o in server.outputs]
    body, headers = server.binary_request(id="7", outputs=outputs)
    need(server.check_binary(server.post_binary(body, headers))["id"] == "7")


ALL = {"binary_data_output": True}


@check("binary: binary_data_output for all outputs")
def _(server: Server) -> None:
    server.check_binary(server.post_binary(*server.binary_request(parameters=ALL)))


@check("binary: an output's own flag overrides it")
def _(server: Server) -> None:
    server.needs_json()
    outputs = [{"name": o["name"], "parameters": {"binary_data": False}} for o in server.outputs]
    body, headers = server.binary_request(parameters=ALL, outputs=outputs)
    server.check_json(server.post_binary(body, headers))


@check("binary: in, and JSON out by default without the header")
def _(server: Server) -> None:
    server.needs_json()
    reply = server.post_binary(*server.binary_request())
    server.check_json(reply)
    need(LENGTH.lower() not in reply[1], reply[1])


@check("binary: JSON in, binary out")
def _(server: Server) -> None:
    server.needs_json()
    server.check_binary(server.post(server.json_request(parameters=ALL)))


@check("binary: no Content-Type")
def _(server: Server) -> None:
    body, headers = server.binary_request(parameters=ALL)
    del headers["Content-Type"]
    server.check_binary(server.post_binary(body, headers))


@check("binary: a gzip body; the header counts the inflated JSON")
def _(server: Server) -> None:
    body, headers = server.binary_request(parameters=ALL)
    headers["Content-Encoding"] = "gzip"
    server.check_binary(server.post_binary(gzip.compress(body), headers))


@check("binary: a deflate body")
def _(server: Server) -> None:
    body, headers = server.binary_request(parameters=ALL)
    headers["Content-Encoding"] = "deflate"
    server.check_binary(server.post_binary(zlib.compress(body), headers))


@check("binary: chunked")
def _(server: Server) -> None:
    body, headers = server.binary_request(parameters=ALL)
    headers["Transfer-Encoding"] = "chunked"
    pieces = iter([body[:7], body[7:]])
    server.check_binary(server.call("POST", server.base + "/infer", pieces, headers))


@check("binary: a whole body as the one input")
def _(server: Server) -> None:
    server.needs("binary_tensor_data")
    if len(server.inputs) != 1 or sum(d == -1 for d in server.inputs[0]["shape"][1:]) > 1:
        raise Skip("the model does not qualify")
    tensor = server.inputs[0]
    data = values(tensor["datatype"], math.prod([1, *server.shape(tensor)[1:]]))
    body = data[0].encode() if tensor["datatype"] == "BYTES" else pack(tensor["datatype"], data)
    headers = {LENGTH: "0", "Content-Type": "application/octet-stream"}
    status, found, answer = server.post_binary(body, headers)
    need(status == 200, status, answer[:120])
    output = json.loads(answer[: int(found[LENGTH.lower()])])["outputs"][0]
    need("binary_data_size" in output["parameters"], output)


@check("binary: no rows are answered with none, or refused")
def _(server: Server) -> None:
    server.needs("binary_tensor_data")
    inputs = [
        {**t, "shape": [0, *server.shape(t)[1:]], "parameters": {"binary_data_size": 0}}
        for t in server.inputs
    ]
    text = json.dumps({"inputs": inputs, "parameters": ALL}).encode()
    status, headers, body = server.post_binary(text, {LENGTH: str(len(text))})
    need(status in (200, 400), status, body[:100])
    if status == 200:
        found = json.loads(body[: int(headers[LENGTH.lower()])])
        need(all(o["shape"][0] == 0 for o in found["outputs"]), found)


def _bad_binary(name: str, change: Callable[[bytes, Headers], tuple[bytes, Headers]]) -> None:
    def function(server: Server) -> None:
        refused(server.post_binary(*change(*server.binary_request())), 400)

    check.add(f"binary, refused with 400: {name}", function)


_bad_binary("a header length over the body", lambda b, h: (b, {**h, LENGTH: str(len(b) + 1)}))
_bad_binary("a header length that is no number", lambda b, h: (b, {**h, LENGTH: "x"}))
_bad_binary("a negative header length", lambda b, h: (b, {**h, LENGTH: "-1"}))
_bad_binary("a byte too few", lambda b, h: (b[:-1], h))
_bad_binary("a byte too many", lambda b, h: (b + b"\0", h))
_bad_binary("no header length", lambda b, h: (b, {k: v for k, v in h.items() if k != LENGTH}))


def _changed(body: bytes, headers: Headers, **change: Any) -> tuple[bytes, Headers]:
    split = int(headers[LENGTH])
    document = json.loads(body[:split])
    document["inputs"][0].update(change)
    text = json.dumps(document).encode()
    return text + body[split:], {**headers, LENGTH: str(len(text))}


_bad_binary("both data and a size", lambda b, h: _changed(b, h, data=[0]))
_bad_binary("a negative size", lambda b, h: _changed(b, h, parameters={"binary_data_size": -1}))
_bad_binary("shared memory", lambda b, h: _changed(b, h, parameters={"shared_memory_region": "r"}))


# -- extensions -----------------------------------------------------------------------------------


@check("model_configuration: what perf_analyzer reads is there")
def _(server: Server) -> None:
    server.needs("model_configuration")
    found = said(server.call("GET", server.base + "/config"))
    need(found["name"] == server.model and found["max_batch_size"] >= 0, found)
    for config, declared in zip(found["input"], server.inputs, strict=True):
        need(config["name"] == declared["name"], config)
        if found["max_batch_size"]:
            need(config["dims"] == declared["shape"][1:], config, declared)


@check("statistics: of the model, with all eight durations")
def _(server: Server) -> None:
    server.needs("statistics")
    (found,) = said(server.call("GET", server.base + "/stats"))["model_stats"]
    need(found["name"] == server.model and found["version"].isdigit(), found)
    for member in (
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
        "cache_hit", "cache_miss",
    ):  # fmt: skip
        duration = found["inference_stats"][member]
        need(duration["count"] >= 0 and duration["ns"] >= 0, member, duration)


@check("statistics: of all models")
def _(server: Server) -> None:
    server.needs("statistics")
    need(isinstance(said(server.call("GET", "/v2/models/stats"))["model_stats"], list))


@check("model_repository: the index, for any of the bodies that clients send")
def _(server: Server) -> None:
    server.needs("model_repository")
    for body in (b"", b"{}", b'{"ready": true}'):
        found = said(server.call("POST", "/v2/repository/index", body))
        need(any(m["name"] == server.model and m["state"] == "READY" for m in found), found)


@check("model_repository: an unknown model can't be loaded")
def _(server: Server) -> None:
    server.needs("model_repository")
    refused(server.call("POST", "/v2/repository/models/no_such_model/load", b""), 403, 404)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a server of the v2 protocol.")
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--identity", action="store_true", help="the model gives back what it got")
    parser.add_argument("--rows", type=int, default=2)
    given = parser.parse_args()
    server = Server(given.url, given.model, identity=given.identity, rows=given.rows)
    return check.run("v2 raw", server)


if __name__ == "__main__":
    raise SystemExit(main())

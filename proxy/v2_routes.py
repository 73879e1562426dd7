"""The Open Inference Protocol's endpoints: health, metadata, infer, and its extensions."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Final

from aiohttp import web

from gpusup.conf.package import package_version
from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import Part, TensorSpec

from . import v2
from .body import Body
from .door import REQUEST_ID, Call, Door
from .errors import Forbidden, InvalidInput, NoWorker
from .gate import GRANT
from .http_rules import header_priority, read_timeout, trace_params
from .jsoncheck import load
from .replies import THREAD_FROM, ask, respond, say, tell_shape
from .v2_checks import ShapeRefused, check_rows

_EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_configuration",
    "statistics",
    "model_repository",
    "parameters",
    "schedule_policy",
)
_STATES: Final = {
    "ready": "READY",
    "loading": "LOADING",
    "swapping": "LOADING",
    "failed": "UNAVAILABLE",
    "unloaded": "UNAVAILABLE",
}
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = _MODEL + "/versions/{version:[0-9]+}"
#: Datatypes whose binary data is looked at; of all others only the length is checked.
_LOOKED_AT: Final = frozenset({"BOOL", "BYTES"})


def add_routes(app: web.Application, door: Door) -> None:
    surface = V2(door)
    get, post = app.router.add_get, app.router.add_post
    get("/v2", surface.server)
    get("/v2/", surface.server)
    get("/v2/health/live", surface.live)
    get("/v2/health/ready", surface.ready)
    get("/v2/models", surface.names)
    get("/v2/models/stats", surface.stats)
    for base in (_MODEL, _VERSION):
        get(base, surface.metadata)
        get(base + "/ready", surface.model_ready)
        get(base + "/config", surface.model_config)
        get(base + "/stats", surface.stats)
        post(base + "/infer", surface.infer, expect_handler=door.expect)
    for index in ("/v2/repository/index", "/v2/repository/{repository}/index"):
        post(index, surface.index, expect_handler=door.expect)
    for verb in ("load", "unload"):
        post(
            f"/v2/repository/models/{{model}}/{verb}",
            partial(surface.change, verb),
            expect_handler=door.expect,
        )


class V2:
    def __init__(self, door: Door) -> None:
        self._door = door
        extensions = list(_EXTENSIONS)
        if door.config.server.repository_control:
            extensions.append("model_repository(unload_dependents)")
        self._server = {
            "name": "gpusup",
            "version": package_version(),
            "extensions": extensions,
        }

    # -- what is here ------------------------------------------------------------------------------

    async def server(self, request: web.Request) -> web.Response:
        return say(self._server)

    async def live(self, request: web.Request) -> web.Response:
        return say({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        ready = self._door.ready
        return say({"ready": ready, "live": True}, 200 if ready else 503)

    async def names(self, request: web.Request) -> web.Response:
        return say({"models": [model.name for model in self._door.snapshot.models]})

    def _model(self, request: web.Request) -> tuple[ModelInfo, str | None]:
        version = request.match_info.get("version")
        return self._door.model(request.match_info["model"], version), version

    async def metadata(self, request: web.Request) -> web.Response:
        model, _ = self._model(request)
        return say(metadata_of(model))

    async def model_ready(self, request: web.Request) -> web.Response:
        model, version = self._model(request)
        ready = is_ready(model, version) and not self._door.draining
        told: dict[str, Any] = {"name": model.name, "ready": ready}
        if ready:
            return say(told)
        told["reason"] = model.reason or model.state
        return say(told, 503, {"Retry-After": "1"})

    async def model_config(self, request: web.Request) -> web.Response:
        model, version = self._model(request)
        return say(config_of(model, version or model.version))

    async def stats(self, request: web.Request) -> web.StreamResponse:
        path = "/v2stats"
        if "model" in request.match_info:
            model, version = self._model(request)
            path += f"/{model.name}" + (f"/{version}" if version else "")
        reply = await ask(self._door, "GET", path)
        headers = {"Content-Type": "application/json"}
        return await respond(self._door, request, headers, reply.body)

    # -- infer -------------------------------------------------------------------------------------

    async def infer(self, request: web.Request) -> web.StreamResponse:
        received = time.monotonic()
        door = self._door
        headers = request.headers
        model, version = self._model(request)
        if model.methods and "predict" not in model.methods:
            raise InvalidInput(
                f"model {model.name!r} makes text; use /v2/models/{model.name}/generate "
                "or generate_stream"
            )
        body = await door.read(request)
        try:
            asked = await self._decode(request, model, body)
            params = trace_params(headers)
            if asked.params:
                params = {**asked.params, **params}
            call = Call(
                model.name,
                asked.parts,
                version,
                rows=asked.rows,
                deadline=door.deadline(model, read_timeout(headers), asked.timeout_s),
                priority=asked.priority or header_priority(headers),
                params=params,
                request_id=request[REQUEST_ID],
                session=headers.get("Gpusup-Session", ""),
                leases=body.leases,
                received=received,
            )
            if asked.rows == 0:
                return await self._nothing(request, model, version, asked)
            outcome = await door.infer(call)
        finally:
            body.release()
        parts = outcome.answer.parts
        return await self._answer(request, asked, model, outcome.version, parts, outcome.headers())

    async def _decode(self, request: web.Request, model: ModelInfo, body: Body) -> v2.InferRequest:
        door = self._door
        length = request.headers.get(v2.HEADER_LENGTH)
        decode = partial(
            v2.decode,
            body.data,
            length,
            inputs=model.inputs,
            outputs=model.outputs,
            cut=body.cut,
            limit=door.reader.limit,
            depth=door.config.server.json_depth,
        )
        try:
            if len(body) < THREAD_FROM or (length is not None and _plain(model.inputs)):
                asked = decode()
            else:
                asked = await asyncio.to_thread(decode)
        except ShapeRefused as error:
            tell_shape(door, request, model.name, error)
            raise
        check_rows(model, asked.rows)
        return asked

    async def _nothing(
        self, request: web.Request, model: ModelInfo, version: str | None, asked: v2.InferRequest
    ) -> web.StreamResponse:
        if not is_ready(model, version):
            raise NoWorker(f"no worker is ready for model {model.name!r}", retry_after_s=1)
        parts = v2.empty_answer(asked, model.inputs, model.outputs)
        version = version or model.version
        headers = {"Gpusup-Model-Version": version}
        return await self._answer(request, asked, model, version, parts, headers)

    async def _answer(
        self,
        request: web.Request,
        asked: v2.InferRequest,
        model: ModelInfo,
        version: str,
        parts: tuple[Part, ...],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        size = 0
        for part in parts:
            size += len(part.data) if isinstance(part.data, bytes) else 0
        if size < THREAD_FROM or asked.binary:
            answer = v2.encode(parts, asked, model.name, version)
        else:
            answer = await asyncio.to_thread(v2.encode, parts, asked, model.name, version)
        if answer.header_length is None:
            headers["Content-Type"] = "application/json"
        else:
            headers["Content-Type"] = "application/octet-stream"
            headers[v2.HEADER_LENGTH] = str(answer.header_length)
        return await respond(self._door, request, headers, answer.json, *answer.tensors)

    # -- repository --------------------------------------------------------------------------------

    async def _json(self, request: web.Request) -> dict[str, Any]:
        text = await self._door.read_bytes(request)
        found = load(text, depth=self._door.config.server.json_depth) if text.strip() else {}
        if not isinstance(found, dict):
            raise InvalidInput("the request is not a JSON object")
        return found

    async def index(self, request: web.Request) -> web.Response:
        asked = await self._json(request)
        only_ready = asked.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidInput(f"ready is {only_ready!r:.40} and neither true nor false")
        return say(
            [
                entry
                for model in self._door.snapshot.models
                for entry in index_of(model)
                if not only_ready or entry["state"] == "READY"
            ]
        )

    async def change(self, verb: str, request: web.Request) -> web.Response:
        door = self._door
        model = door.model(request.match_info["model"])
        if not door.config.server.repository_control:
            raise Forbidden(
                "explicit model load / unload is not allowed: server.repository_control is off"
            )
        if (grant := request.get(GRANT)) is not None:
            grant.permits_admin()
        asked = await self._json(request)
        parameters = asked.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidInput("parameters is not a JSON object")
        if files := [name for name in parameters if name == "config" or name.startswith("file:")]:
            raise InvalidInput(
                f"a load with {files[0][:80]!r} is not supported: models are described "
                "in the configuration"
            )
        await ask(door, "POST", f"/models/{model.name}/{verb}")
        return web.Response(body=b"", headers={"Content-Type": "application/json"})


def _plain(specs: tuple[TensorSpec, ...]) -> bool:
    return bool(specs) and all(spec.datatype not in _LOOKED_AT for spec in specs)


def is_ready(model: ModelInfo, version: str | None) -> bool:
    """Whether a worker of it (of that version) is ready now."""
    if version is not None:
        return version in model.versions
    return bool(model.versions) and model.state != "failed"


def metadata_of(model: ModelInfo) -> dict[str, Any]:
    """Shapes with the rows, which vary, in front."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [{"name": s.name, "datatype": s.datatype, "shape": [-1, *s.shape]} for s in specs]

    return {
        "name": model.name,
        "versions": list(model.versions or (model.version,)),
        "platform": model.platform or "pytorch",
        "inputs": tensors(model.inputs),
        "outputs": tensors(model.outputs),
    }


def config_of(model: ModelInfo, version: str) -> dict[str, Any]:
    """The parts of Triton's ModelConfig that clients read; dims are without the rows."""

    def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [
            {
                "name": s.name,
                "data_type": "TYPE_" + ("STRING" if s.datatype == "BYTES" else s.datatype),
                "dims": list(s.shape),
                "optional": False,
                "is_shape_tensor": False,
            }
            for s in specs
        ]

    return {
        "name": model.name,
        "platform": model.platform or "pytorch",
        "backend": "gpusup",
        "version_policy": {"specific": {"versions": [int(version)]}},
        "max_batch_size": model.max_rows,
        "input": tensors(model.inputs),
        "output": tensors(model.outputs),
        "instance_group": [
            {"name": model.name, "kind": "KIND_AUTO", "count": max(1, model.slots), "gpus": []}
        ],
        "dynamic_batching": {
            "preferred_batch_size": [model.max_rows],
            "max_queue_delay_microseconds": round(model.wait_s * 1e6),
        },
        "model_transaction_policy": {"decoupled": False},
        "parameters": {
            "retry": {"string_value": model.retry},
            "methods": {"string_value": ",".join(model.methods)},
        },
    }


def index_of(model: ModelInfo) -> list[dict[str, str]]:
    """One entry for each version that is ready, or one that says why none is."""
    ready = [
        {"name": model.name, "version": version, "state": "READY", "reason": ""}
        for version in model.versions
    ]
    if ready:
        return ready
    state = _STATES[model.state] if model.state != "ready" else "UNAVAILABLE"
    return [{"name": model.name, "version": model.version, "state": state, "reason": model.reason}]

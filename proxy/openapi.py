"""`/openapi.json`: a 3.1 document of what is really served here, one concrete path per model."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from gpusup.conf.package import package_version
from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import TensorSpec

from .datatypes import elements
from .door import Door
from .replies import respond

Json = dict[str, Any]

_encode: Final = msgspec.json.Encoder().encode
#: Examples are left out of documents where they would be longer than this many elements.
_EXAMPLE_LIMIT: Final = 16


def add_routes(app: web.Application, door: Door) -> None:
    app.router.add_get("/openapi.json", partial(_serve, door, {}))


async def _serve(door: Door, cache: dict[int, bytes], request: web.Request) -> web.StreamResponse:
    snapshot = door.snapshot
    body = cache.get(snapshot.serial)
    if body is None:
        cache.clear()
        server = door.config.server
        body = cache[snapshot.serial] = _encode(
            document(
                snapshot.models,
                keys=bool(server.api_keys),
                metrics=server.metrics == "server",
                default_model=server.default_model,
            )
        )
    return await respond(door, request, {"Content-Type": "application/json"}, body)


def document(
    models: tuple[ModelInfo, ...],
    *,
    keys: bool = False,
    metrics: bool = True,
    default_model: str = "",
) -> Json:
    paths: Json = dict(_fixed(metrics))
    for model in models:
        paths.update(_v2(model))
        paths[f"/predictions/{model.name}"] = _raw(model)
        paths[f"/predictions/{model.name}/{model.version}"] = _raw(model)
    named = next((m for m in models if m.name == default_model), None)
    if named is None and len(models) == 1:
        named = models[0]
    if named is not None:
        paths["/infer"] = _raw(named)
    paths.update(_openai(models))
    found: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "gpusup",
            "version": package_version(),
            "description": "Inference on this machine's GPUs. Errors are small JSON objects; "
            "429 and 503 carry Retry-After.",
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "responses": _RESPONSES},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Json, description: str = "OK") -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _operation(
    summary: str, ok: Json, body: Json | None = None, *, error: str = "Error", **more: Any
) -> Json:
    found: Json = {
        "summary": summary,
        "responses": {
            "200": ok,
            "default": {"$ref": f"#/components/responses/{error}"},
        },
        **more,
    }
    if body is not None:
        found["requestBody"] = body
    return found


def _body(schema: Json, example: Any = None, **content: Json) -> Json:
    said: Json = {"schema": schema}
    if example is not None:
        said["example"] = example
    return {"required": True, "content": {"application/json": said, **content}}


_SCHEMAS: Final[Json] = {
    "Error": {
        "type": "object",
        "required": ["error", "code", "request_id"],
        "properties": {
            "error": {"type": "string"},
            "code": {"type": "string"},
            "request_id": {"type": "string"},
            "retry_after_s": {"type": "integer", "minimum": 1},
        },
    },
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "Live": {
        "type": "object",
        "required": ["live"],
        "properties": {"live": {"type": "boolean"}},
    },
    "Ready": {
        "type": "object",
        "required": ["ready"],
        "properties": {"ready": {"type": "boolean"}},
    },
    "Tensor": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "data": {},
            "parameters": {"type": "object"},
        },
    },
    "InferAnswer": {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
        },
    },
    "ModelMetadata": {
        "type": "object",
        "required": ["name", "platform", "inputs", "outputs"],
        "properties": {
            "name": {"type": "string"},
            "versions": {"type": "array", "items": {"type": "string"}},
            "platform": {"type": "string"},
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
        },
    },
    "Object": {"type": "object"},
}
_RESPONSES: Final[Json] = {
    "Error": _json(_ref("Error"), "Refused or failed"),
    "OpenAIError": _json(_ref("OpenAIError"), "Refused or failed"),
    "NotReady": _json(_ref("Object"), "Not ready"),
}
_EVENTS: Final[Json] = {"schema": {}}  # readers see events, no string


def _fixed(metrics: bool) -> Json:
    def get(summary: str, schema: Json, error: str = "Error") -> Json:
        return {"get": _operation(summary, _json(schema), error=error)}

    found: Json = {
        "/livez": get("Whether the process answers", _ref("Live")),
        "/healthz": get("The same as /livez", _ref("Live")),
        "/readyz": get("Whether the required models are ready", _ref("Ready"), "NotReady"),
        "/ping": get("Readiness, as TorchServe says it", _ref("Object"), "NotReady"),
        "/models": get("Models, as TorchServe lists them", _ref("Object")),
        "/v2": get("Server metadata", _ref("Object")),
        "/v2/health/live": get("Liveness", _ref("Live")),
        "/v2/health/ready": get("Readiness", _ref("Ready"), "NotReady"),
        "/v2/models": get("Names of all models", _ref("Object")),
        "/v2/models/stats": get("Statistics of all models", _ref("Object")),
        "/v2/repository/index": {
            "post": _operation(
                "Models and their states",
                _json({"type": "array", "items": _ref("Object")}),
                {
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "properties": {"ready": {"type": "boolean"}},
                            }
                        }
                    }
                },
            )
        },
    }
    if metrics:
        text = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
        found["/metrics"] = {"get": _operation("Metrics for Prometheus", text)}
    return found


def _v2(model: ModelInfo) -> Json:
    base = f"/v2/models/{model.name}"
    found: Json = {
        base: {"get": _operation("Model metadata", _json(_ref("ModelMetadata")))},
        f"{base}/ready": {
            "get": _operation("Model readiness", _json(_ref("Ready")), error="NotReady")
        },
        f"{base}/config": {"get": _operation("Model configuration", _json(_ref("Object")))},
        f"{base}/stats": {"get": _operation("Statistics", _json(_ref("Object")))},
    }
    if not model.methods or "predict" in model.methods:
        answer = _json(_ref("InferAnswer"))
        answer["content"]["application/octet-stream"] = {"schema": {}}
        found[f"{base}/infer"] = {
            "post": _operation(
                f"Infer with {model.name}",
                answer,
                _body(_infer_schema(model), _infer_example(model)),
            )
        }
    if "generate" in model.methods:
        schema = {
            "type": "object",
            "required": ["text_input"],
            "properties": {
                "id": {"type": "string"},
                "text_input": {"type": "string"},
                "parameters": {"type": "object"},
            },
        }
        example = {"text_input": "Hello"}
        found[f"{base}/generate"] = {
            "post": _operation("Generate text", _json(_ref("Object")), _body(schema, example))
        }
        found[f"{base}/generate_stream"] = {
            "post": _operation(
                "Generate text, piece by piece",
                {"description": "Events", "content": {"text/event-stream": _EVENTS}},
                _body(schema, example),
            )
        }
    return found


def _infer_schema(model: ModelInfo) -> Json:
    tensor: Json = _ref("Tensor")
    if model.inputs:
        tensor = {
            "type": "object",
            "required": ["name", "datatype", "shape"],
            "properties": {
                "name": {"enum": [s.name for s in model.inputs]},
                "datatype": {"enum": sorted({s.datatype for s in model.inputs})},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "data": {"type": "array"},
                "parameters": {"type": "object"},
            },
        }
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "minItems": 1, "items": tensor},
            "outputs": {"type": "array"},
            "parameters": {"type": "object"},
        },
    }


def _infer_example(model: ModelInfo) -> Json | None:
    inputs = [example_tensor(spec) for spec in model.inputs]
    return {"inputs": inputs} if inputs else None


def example_tensor(spec: TensorSpec) -> Json:
    """One row of zeros; 2 stands for a variable dimension."""
    shape = [1, *(2 if d == -1 else d for d in spec.shape)]
    found: Json = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
    if (count := elements(shape)) <= _EXAMPLE_LIMIT:
        zero: Any = {"BYTES": "text", "BOOL": False}.get(spec.datatype, 0)
        found["data"] = [zero] * count
    return found


def _raw(model: ModelInfo) -> Json:
    binary: Json = {"schema": {}}
    body: Json = {
        "content": {
            "application/octet-stream": binary,
            "image/*": binary,
            "application/x-npy": binary,
            "application/json": {"schema": {}},
            "multipart/form-data": {"schema": {"type": "object"}},
        }
    }
    ok: Json = {"description": "The model's answer, in the form asked for", "content": {"*/*": {}}}
    operation = _operation(f"A body for {model.name}", ok, body)
    return {"post": operation, "put": operation}


def _openai(models: tuple[ModelInfo, ...]) -> Json:
    found: Json = {
        "/v1/models": {
            "get": _operation("Models", _json(_ref("Object")), error="OpenAIError"),
        }
    }

    def add(method: str, path: str, summary: str, schema: Json, *, stream: bool) -> None:
        names = [m.name for m in models if method in m.methods]
        if not names:
            return
        ok = _json(_ref("Object"))
        if stream:
            ok["content"]["text/event-stream"] = _EVENTS
        whole = {
            "type": "object",
            "required": ["model", *schema],
            "properties": {"model": {"enum": names}, **schema},
        }
        found[path] = {"post": _operation(summary, ok, _body(whole), error="OpenAIError")}

    text = {"type": ["string", "array"]}
    messages = {"type": "array", "minItems": 1, "items": {"type": "object"}}
    add("embed", "/v1/embeddings", "Embeddings", {"input": text}, stream=False)
    add("generate", "/v1/completions", "Completions", {"prompt": text}, stream=True)
    add("chat", "/v1/chat/completions", "Chat", {"messages": messages}, stream=True)
    return found

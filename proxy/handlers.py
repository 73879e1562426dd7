"""The raw surface (POST or PUT a body to /predictions/MODEL) and health."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from aiohttp import hdrs, web

from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import Part

from . import images, raw_codec
from .body import Body
from .door import REQUEST_ID, Call, Door
from .generate_routes import is_text, raw_text
from .http_rules import header_priority, read_timeout, trace_params
from .multipart import split
from .replies import THREAD_FROM, respond, say, tell_shape
from .v2_checks import ShapeRefused, check_rows


def add_raw_routes(app: web.Application, door: Door) -> None:
    for path in ("/predictions/{model}", "/predictions/{model}/{version}", "/infer"):
        for method in (hdrs.METH_POST, hdrs.METH_PUT):
            app.router.add_route(method, path, partial(predict, door), expect_handler=door.expect)


def add_health_routes(app: web.Application, door: Door) -> None:
    for path, handler in (
        ("/livez", live),
        ("/healthz", live),
        ("/readyz", ready),
        ("/ping", ping),
        ("/models", models),
    ):
        app.router.add_get(path, partial(handler, door))


async def predict(door: Door, request: web.Request) -> web.StreamResponse:
    received = time.monotonic()
    match = request.match_info
    name = match.get("model") or door.default_model()
    version = match.get("version")
    model = door.model(name, version)
    headers = request.headers
    content_type = headers.get(hdrs.CONTENT_TYPE)
    wanted = headers.get(hdrs.ACCEPT)
    makes_text = is_text(model, wanted)
    body = await door.read(request)
    try:
        if makes_text:
            return await raw_text(door, request, model, version, body)
        try:
            if len(body) < THREAD_FROM:
                parts, rows, lead = decode(door, model, body, content_type)
            else:
                parts, rows, lead = await asyncio.to_thread(decode, door, model, body, content_type)
        except ShapeRefused as error:
            tell_shape(door, request, name, error)
            raise
        call = Call(
            name,
            parts,
            version,
            rows=rows,
            deadline=door.deadline(model, read_timeout(headers)),
            priority=header_priority(headers),
            params=trace_params(headers),
            request_id=request[REQUEST_ID],
            session=headers.get("Gpusup-Session", ""),
            leases=body.leases,
            received=received,
        )
        outcome = await door.infer(call)
    finally:
        body.release()
    encode = partial(raw_codec.encode, outcome.answer.parts, wanted, lead=lead)
    if sum(bytes_to_convert(part) for part in outcome.answer.parts) < THREAD_FROM:
        answer = encode()
    else:
        answer = await asyncio.to_thread(encode)
    told = outcome.headers()
    told["Content-Type"] = answer.content_type
    if answer.varies:
        told["Vary"] = "Accept"
    return await respond(door, request, told, answer.body)


def bytes_to_convert(part: Part) -> int:
    """Bytes that have to be turned into another form; those of opaque parts go as they are."""
    return len(part.data) if part.datatype and isinstance(part.data, bytes) else 0


def decode(
    door: Door, model: ModelInfo, body: Body, content_type: str | None
) -> tuple[tuple[Part, ...], int, bool]:
    """Parts, rows, and whether a row was put in front."""
    server = door.config.server
    if content_type is not None and raw_codec.media_type(content_type) == raw_codec.MULTIPART:
        assert content_type is not None
        fields = split(body, content_type)
        for field in fields:
            images.check(body.data[field.start : field.end], server.pixels, field.name)
        parts = tuple(
            raw_codec.field(
                field.name,
                body.cut(field.start, field.end),
                field.content_type,
                field.filename,
            )
            for field in fields
        )
        return parts, 1, False
    found = raw_codec.decode(
        body.data,
        content_type,
        inputs=model.inputs,
        cut=body.cut,
        limit=door.reader.limit,
        depth=server.json_depth,
        pixels=server.pixels,
    )
    check_rows(model, found.rows)
    return found.parts, found.rows, found.lead


async def live(door: Door, request: web.Request) -> web.Response:
    """This process answers, so it is alive."""
    return say({"live": True})


async def ready(door: Door, request: web.Request) -> web.Response:
    snapshot = door.snapshot
    if door.ready:
        return say({"ready": True, "live": True})
    why = "draining" if door.draining else snapshot.reason
    told: dict[str, Any] = {"ready": False, "live": True, "reason": why}
    told["models"] = {m.name: m.reason or m.state for m in snapshot.models if m.state != "ready"}
    return say(told, 503)


async def ping(door: Door, request: web.Request) -> web.Response:
    if door.ready:
        return say({"status": "Healthy"})
    return say({"status": "Unhealthy"}, 503)


async def models(door: Door, request: web.Request) -> web.Response:
    return say(
        {"models": [{"modelName": m.name, "modelUrl": m.version} for m in door.snapshot.models]}
    )

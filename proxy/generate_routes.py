"""Text: v2's generate and generate_stream, and raw requests to models that make text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import Answer, Block, Part

from . import accept, raw_codec, sse
from .body import Body
from .datatypes import say
from .door import REQUEST_ID, Call, Door
from .errors import InvalidInput, NotAcceptable, ProxyError
from .http_rules import header_priority, read_timeout, trace_params
from .jsoncheck import load
from .replies import respond
from .v2_checks import check_params, take_timing

_encode: Final = msgspec.json.Encoder().encode


def add_routes(app: web.Application, door: Door) -> None:
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version:[0-9]+}"):
        for verb, handler in (("generate", generate), ("generate_stream", generate_stream)):
            app.router.add_post(
                f"{base}/{verb}", partial(handler, door), expect_handler=door.expect
            )


def makes_text(model: ModelInfo) -> None:
    """Raises InvalidInput."""
    if model.methods and "generate" not in model.methods:
        raise InvalidInput(f"model {model.name!r} does not generate text; use infer")


def text_call(
    request: web.Request,
    door: Door,
    model: ModelInfo,
    version: str | None,
    part: Part,
    *,
    params: dict[str, Any],
    timeout_s: float = 0.0,
    priority: int = 0,
    method: str = "generate",
    received: float = 0.0,
) -> Call:
    """A call with what its head says about time, urgency and traces."""
    headers = request.headers
    return Call(
        model.name,
        (part,),
        version,
        method=method,  # type: ignore[arg-type]
        deadline=door.deadline(model, read_timeout(headers), timeout_s),
        priority=priority or header_priority(headers),
        params={**params, **trace_params(headers)},
        request_id=request[REQUEST_ID],
        session=headers.get("Gpusup-Session", ""),
        received=received,
    )


def text_of(parts: tuple[Part, ...]) -> str:
    """What a worker gave as text."""
    return b"".join(p.data for p in parts if not isinstance(p.data, Block)).decode()


# -- v2 -------------------------------------------------------------------------------------------


class _Asked(msgspec.Struct):
    text: str
    params: dict[str, Any]
    id: str = ""
    priority: int = 0
    timeout_s: float = 0.0


def read_generate(body: bytes, depth: int) -> _Asked:
    """`text_input`, `id`, and all else as parameters. Raises InvalidInput."""
    said = load(body, depth=depth)
    if not isinstance(said, dict):
        raise InvalidInput("the request is not a JSON object")
    text = said.pop("text_input", None)
    if not isinstance(text, str):
        raise InvalidInput("text_input is missing or no string")
    named = said.pop("id", None)
    if named is not None and not isinstance(named, str):
        raise InvalidInput(f"id is {say(named)} and no string")
    inner = said.pop("parameters", None)
    if inner is not None and not isinstance(inner, dict):
        raise InvalidInput("parameters is not a JSON object")
    params = {**said, **(inner or {})}
    params.pop("stream", None)
    priority, timeout_s = take_timing(params)
    check_params(params)
    return _Asked(text, params, named or "", priority, timeout_s)


async def _call(door: Door, request: web.Request) -> tuple[_Asked, ModelInfo, str | None, Call]:
    received = time.monotonic()
    version = request.match_info.get("version")
    model = door.model(request.match_info["model"], version)
    makes_text(model)
    asked = read_generate(await door.read_bytes(request), door.config.server.json_depth)
    part = Part("text_input", asked.text.encode(), content_type="text/plain")
    call = text_call(
        request,
        door,
        model,
        version,
        part,
        params=asked.params,
        timeout_s=asked.timeout_s,
        priority=asked.priority,
        received=received,
    )
    return asked, model, version, call


def _told(asked: _Asked, model: str, version: str, text: str) -> bytes:
    told = {"model_name": model, "model_version": version, "text_output": text}
    return _encode({"id": asked.id, **told} if asked.id else told)


async def generate(door: Door, request: web.Request) -> web.StreamResponse:
    asked, model, _, call = await _call(door, request)
    outcome = await door.infer(call)
    body = _told(asked, model.name, outcome.version, text_of(outcome.answer.parts))
    headers = {**outcome.headers(), "Content-Type": "application/json"}
    return await respond(door, request, headers, body)


async def generate_stream(door: Door, request: web.Request) -> web.StreamResponse:
    asked, model, version, call = await _call(door, request)
    name, number = model.name, version or model.version

    def render(answer: Answer) -> Iterable[bytes]:
        if answer.parts:
            yield _told(asked, name, number, text_of(answer.parts))

    return await sse.serve(
        request,
        door.stream(call),
        render=render,
        last=tuple,
        failed=partial(_failed, request),
        headers={},
        write_timeout_s=door.config.server.write_timeout,
    )


def _failed(request: web.Request, error: ProxyError) -> bytes:
    return error.body(request[REQUEST_ID])


# -- raw ------------------------------------------------------------------------------------------


def is_text(model: ModelInfo, wanted: str | None) -> bool:
    """Whether a raw request goes to `generate`: the model has nothing else, or a stream is asked
    for. Raises NotAcceptable if only a stream will do and the model can't."""
    if "generate" in model.methods:
        return "predict" not in model.methods or accept.wants_events(wanted)
    if model.methods and accept.wants_events(wanted):
        assert wanted is not None
        if not any(
            q > 0 and (kind, sub) != ("text", "event-stream")
            for q, kind, sub in accept.ranges(wanted)
        ):
            raise NotAcceptable(f"model {model.name!r} does not stream")
    return False


async def raw_text(
    door: Door, request: web.Request, model: ModelInfo, version: str | None, body: Body
) -> web.StreamResponse:
    """A prompt as plain text or in JSON; the answer as JSON, plain text or a stream."""
    wanted = request.headers.get(hdrs.ACCEPT)
    kind = raw_codec.media_type(request.headers.get(hdrs.CONTENT_TYPE))
    part, params = read_raw(body.copy(), kind, door.config.server.json_depth)
    call = text_call(request, door, model, version, part, params=params)
    if accept.wants_events(wanted):
        return await sse.serve(
            request,
            door.stream(call),
            render=lambda answer: (
                [_encode({"text": text_of(answer.parts)})] if answer.parts else []
            ),
            last=lambda: [b"[DONE]"],
            failed=partial(_failed, request),
            headers={"Vary": "Accept"},
            write_timeout_s=door.config.server.write_timeout,
        )
    form = accept.choose(wanted, (raw_codec.JSON, "text/plain"))
    outcome = await door.infer(call)
    text = text_of(outcome.answer.parts)
    headers = {**outcome.headers(), "Vary": "Accept"}
    if form == raw_codec.JSON:
        headers["Content-Type"] = form
        return await respond(door, request, headers, _encode({"text": text}))
    headers["Content-Type"] = "text/plain; charset=utf-8"
    return await respond(door, request, headers, text.encode())


def read_raw(body: bytes, kind: str, depth: int) -> tuple[Part, dict[str, Any]]:
    """The prompt and the parameters beside it. Raises InvalidInput."""
    if kind == raw_codec.JSON or kind.endswith("+json"):
        said = load(body, depth=depth)
        if isinstance(said, str):
            said = {"prompt": said}
        if not isinstance(said, dict):
            raise InvalidInput("the request is neither a JSON object nor a string")
        prompt = said.pop("prompt", None)
        if prompt is None:
            prompt = said.pop("text", None)
        if not isinstance(prompt, str):
            raise InvalidInput("prompt is missing or no string")
        said.pop("stream", None)
        check_params(said)
        return Part("prompt", prompt.encode(), content_type="text/plain"), said
    try:
        body.decode()
    except UnicodeDecodeError:
        raise InvalidInput("the prompt is not UTF-8 text") from None
    return Part("prompt", body, content_type="text/plain"), {}

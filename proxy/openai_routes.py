"""The OpenAI-compatible endpoints, for models that implement the text methods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import Answer, Part

from . import openai, sse
from .door import REQUEST_ID, Call, Door, Outcome
from .errors import ModelFailed, ModelNotFound, ProxyError
from .gate import GRANT
from .generate_routes import text_call, text_of
from .openai import BadRequest, Talk, TextRequest
from .replies import THREAD_FROM, respond, say

_encode: Final = msgspec.json.Encoder().encode
_METHODS: Final = {"chat": "chat", "completions": "generate", "embeddings": "embed"}


def add_routes(app: web.Application, door: Door) -> None:
    door.error_bodies.append(("/v1/", _error))
    app.router.add_get("/v1/models", partial(models, door))
    app.router.add_get("/v1/models/{model}", partial(one_model, door))
    for path, handler in (
        ("/v1/embeddings", embeddings),
        ("/v1/completions", partial(talk, "completions")),
        ("/v1/chat/completions", partial(talk, "chat")),
    ):
        app.router.add_post(path, partial(handler, door), expect_handler=door.expect)


def _error(error: ProxyError, request_id: str) -> bytes:
    return openai.error_body(error)


def _entry(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "gpusup",
    }


async def models(door: Door, request: web.Request) -> web.Response:
    """Every model, so that clients written for others find theirs; only some make text."""
    return say({"object": "list", "data": [_entry(m) for m in door.snapshot.models]})


async def one_model(door: Door, request: web.Request) -> web.Response:
    return say(_entry(_model(door, request, request.match_info["model"])))


def _model(door: Door, request: web.Request, name: str) -> ModelInfo:
    try:
        model = door.model(name)
    except ModelNotFound:
        raise ModelNotFound(f"The model `{name[:100]}` does not exist") from None
    if (grant := request.get(GRANT)) is not None:
        grant.permits(model.name)
    return model


async def _read(
    door: Door, request: web.Request, kind: str
) -> tuple[TextRequest, ModelInfo, float]:
    received = time.monotonic()
    text = await door.read_bytes(request)
    depth = door.config.server.json_depth
    if len(text) < THREAD_FROM:
        asked = openai.read(text, kind, depth)
    else:
        asked = await asyncio.to_thread(openai.read, text, kind, depth)
    model = _model(door, request, asked.model)
    if model.methods and _METHODS[kind] not in model.methods:
        raise BadRequest(f"model {model.name!r} does not do {kind}", "model")
    return asked, model, received


def _hint(request: web.Request) -> float:
    """The OpenAI client says how long it is going to wait."""
    try:
        seconds = float(request.headers.get("x-stainless-read-timeout", "0"))
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < 86400 else 0.0


async def embeddings(door: Door, request: web.Request) -> web.StreamResponse:
    asked, model, received = await _read(door, request, "embeddings")
    part = Part("input", _encode(asked.texts), content_type="application/json")
    call = text_call(
        request,
        door,
        model,
        None,
        part,
        params=asked.params,
        timeout_s=_hint(request),
        method="embed",
        received=received,
    )
    outcome = await door.infer(call)
    if len(outcome.answer.parts) != 1:
        raise ModelFailed(f"the model gave {len(outcome.answer.parts)} outputs, wanted is 1")
    body = openai.embeddings(outcome.answer.parts[0], asked)
    return await respond(door, request, _headers(outcome), body)


def _headers(outcome: Outcome) -> dict[str, str]:
    return {**outcome.headers(), "Content-Type": "application/json"}


async def talk(kind: str, door: Door, request: web.Request) -> web.StreamResponse:
    """Completions and chat completions, whole or streamed."""
    asked, model, received = await _read(door, request, kind)
    if kind == "chat":
        parts = [Part("messages", _encode(asked.messages), content_type="application/json")]
    else:
        parts = [Part("prompt", t.encode(), content_type="text/plain") for t in asked.texts]
    calls = [
        text_call(
            request,
            door,
            model,
            None,
            part,
            params=asked.params,
            timeout_s=_hint(request),
            method=_METHODS[kind],
            received=received,
        )
        for part in parts
    ]
    said = Talk(
        chat=kind == "chat",
        id=request[REQUEST_ID],
        model=model.name,
        created=int(time.time()),
        prompt_words=asked.prompt_words,
        max_tokens=asked.max_tokens,
    )
    if asked.stream:
        return await _stream(door, request, calls[0], said, asked.usage)
    if len(calls) == 1:
        outcomes = [await door.infer(calls[0])]
    else:
        outcomes = await _all(door, calls)
    body = said.whole([text_of(outcome.answer.parts) for outcome in outcomes])
    return await respond(door, request, _headers(outcomes[0]), body)


async def _all(door: Door, calls: list[Call]) -> list[Outcome]:
    """The first failure cancels the others and is the answer."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(door.infer(call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _stream(
    door: Door, request: web.Request, call: Call, said: Talk, usage: bool
) -> web.StreamResponse:
    pieces = 0

    def render(answer: Answer) -> Iterable[bytes]:
        nonlocal pieces
        if answer.parts:
            pieces += 1
            yield said.chunk(text_of(answer.parts), first=pieces == 1)

    return await sse.serve(
        request,
        door.stream(call),
        render=render,
        last=lambda: said.last(pieces, usage=usage),
        failed=openai.error_body,
        headers={},
        write_timeout_s=door.config.server.write_timeout,
    )

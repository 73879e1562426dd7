"""All surfaces beside the raw one, put on the application in the one order that works."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from gpusup.conf.log import event

from . import generate_routes, openai_routes, openapi, page, v2_routes
from .door import Door
from .gate import add_keys, add_options
from .http_rules import Cors
from .replies import ask, respond
from .security import KeyFileError, KeyRing


def add_surfaces(app: web.Application, door: Door) -> None:
    """Call last: OPTIONS is added to every path that is there by then. Raises KeyFileError."""
    server = door.config.server
    v2_routes.add_routes(app, door)
    generate_routes.add_routes(app, door)
    openai_routes.add_routes(app, door)
    if server.metrics == "server":
        app.router.add_get("/metrics", partial(_metrics, door))
    if server.docs == "server":
        openapi.add_routes(app, door)
        page.add_routes(app, door)
    if server.api_keys:
        ring = KeyRing(server.api_keys)
        add_keys(app, door, ring)
        door.rereads.append(partial(_reread, ring))
    add_options(app, Cors(server.cors_origins))


def _reread(ring: KeyRing) -> None:
    try:
        ring.reload()
    except KeyFileError as error:
        event("keys-not-reloaded", "error", error=str(error))


async def _metrics(door: Door, request: web.Request) -> web.StreamResponse:
    reply = await ask(door, "GET", "/metrics")
    return await respond(door, request, {"Content-Type": reply.content_type}, reply.body)

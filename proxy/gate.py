"""Who may pass, before anything is read: API keys at each route, CORS and OPTIONS for browsers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from aiohttp import hdrs, web

from .door import Door
from .http_rules import Cors
from .security import Grant, KeyRing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Key of the Grant in `request[...]`, where keys are wanted at all.
GRANT: Final = web.RequestKey("grant", Grant)

#: Health is for balancers, which have no keys.
OPEN: Final = frozenset(
    {"/livez", "/readyz", "/healthz", "/ping", "/v2/health/live", "/v2/health/ready"}
)


def add_keys(app: web.Application, door: Door, ring: KeyRing) -> None:
    """Call before the application starts. `ring.reload` counts at once."""

    async def check(request: web.Request) -> None:
        if GRANT in request or request.path in OPEN or request.method == hdrs.METH_OPTIONS:
            return
        grant = await ring.check(request.headers)
        if (model := door.named(request)) is not None:
            grant.permits(model)
        grant.take()
        request[GRANT] = grant

    @web.middleware
    async def hold(request: web.Request, handler: Handler) -> web.StreamResponse:
        grant: Grant | None = request.get(GRANT)
        if grant is None:
            return await handler(request)
        grant.enter()
        try:
            return await handler(request)
        finally:
            grant.leave()

    door.checks.append(check)
    app.middlewares.append(hold)


def add_options(app: web.Application, cors: Cors) -> None:
    """OPTIONS for each path that has been added; with origins configured, CORS on every answer."""
    for resource in list(app.router.resources()):
        if not isinstance(resource, web.Resource):
            continue
        methods = sorted({route.method for route in resource} | {hdrs.METH_OPTIONS})
        resource.add_route(hdrs.METH_OPTIONS, partial(_options, cors, ", ".join(methods)))
    if cors:

        async def dress(request: web.Request, response: web.StreamResponse) -> None:
            for name, value in cors.headers(request.headers.get(hdrs.ORIGIN)).items():
                if name == hdrs.VARY and hdrs.VARY in response.headers:
                    value = f"{response.headers[hdrs.VARY]}, {value}"
                response.headers[name] = value

        app.on_response_prepare.append(dress)


async def _options(cors: Cors, allow: str, request: web.Request) -> web.Response:
    return web.Response(status=204, headers=cors.preflight(request.headers, allow))

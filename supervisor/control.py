"""The control API: HTTP and JSON on a Unix socket, for `gpusupctl`, `curl` and our own proxies.

    GET  /status /metrics /changes /changes/ID[?wait=S] /events[?since=N&follow=1]
         /slots/SLOT/logs[?lines=N&since=N&follow=1] /models/NAME/buckets /plan /leases /support
    POST /slots/SLOT/{cordon,uncordon,drain,restart,reset-failed,dump}
         /models/NAME/{reload,rollback,promote,load,unload,reset-failed}
         /changes/ID/abort /stop /reexec /reload-config

Who may connect may read (the socket is 0660). To change something one must be root, the service's
own user, or in the control group. Errors are `{"error", "code"}`; a conflict names the `change`.
"""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import pwd
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from aiohttp import web

from .commands import ENDED, CommandError, Commands, NotAllowed, UnknownTarget
from .worker_link import peer_of

log = logging.getLogger("gpusup.supervisor")

JSON: Final = "application/json"
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BODY_LIMIT: Final = 1024 * 1024
_WAIT_LIMIT_S: Final = 300.0
_LOOK_AGAIN_S: Final = 0.05
_FOLLOW_S: Final = 0.25
_SO_PEERGROUPS: Final = 59
_GROUPS_BYTES: Final = 1024  # the most that getsockopt takes here

Answer = tuple[int, str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. `admin`: may change something."""

    name: str
    admin: bool


#: A proxy asks only what its configuration lets clients ask.
PROXY: Final = Caller(name="proxy", admin=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    target: str
    query: Mapping[str, str]
    body: Mapping[str, Any]
    caller: Caller


class Control:
    """Answers calls, whoever brings them. `handle` for proxies' Ask, `serve` for the socket."""

    def __init__(self, commands: Commands, group: str = "") -> None:
        self._commands = commands
        self._group = group
        self._runner: web.AppRunner | None = None
        c = commands
        self._reads: dict[tuple[str, str], Callable[[_Call], Any]] = {
            ("", "status"): lambda call: c.status(),
            ("", "changes"): lambda call: {"changes": list(c.changes())},
            ("", "events"): lambda call: {"events": list(c.events(_integer(call, "since", 0)))},
            ("", "plan"): lambda call: c.plan(),
            ("", "leases"): lambda call: c.leases(),
            ("", "support"): lambda call: c.support(),
            ("changes", ""): self._change,
            ("slots", "logs"): self._logs,
            ("models", "buckets"): lambda call: c.buckets(call.target),
        }
        self._writes: dict[tuple[str, str], Callable[[_Call], Any]] = {
            ("slots", "cordon"): self._cordon,
            ("slots", "uncordon"): lambda call: c.uncordon(call.target),
            ("slots", "drain"): self._drain,
            ("slots", "restart"): lambda call: {"change": c.restart(call.target)},
            ("proxies", "restart"): lambda call: {"change": c.restart(call.target)},
            ("slots", "reset-failed"): lambda call: c.reset_failed(call.target),
            ("models", "reset-failed"): lambda call: c.reset_failed(call.target),
            ("slots", "dump"): self._dump,
            ("models", "reload"): self._reload,
            ("models", "rollback"): lambda call: {"change": c.rollback(call.target)},
            ("models", "promote"): lambda call: {"change": c.promote(call.target)},
            ("models", "load"): lambda call: {"change": c.load(call.target)},
            ("models", "unload"): lambda call: {"change": c.unload(call.target)},
            ("changes", "abort"): lambda call: c.abort(call.target),
            ("", "stop"): lambda call: c.stop(),
            ("", "reexec"): lambda call: c.reexec(),
            ("", "reload-config"): lambda call: {"changes": list(c.reload_config())},
        }

    # -- one call --------------------------------------------------------------------------------

    async def handle(
        self, method: str, path: str, body: bytes = b"", caller: Caller = PROXY
    ) -> Answer:
        """(HTTP status, content type, body). Never raises but for cancellation."""
        try:
            return await self._handle(method, path, body, caller)
        except CommandError as error:
            answer: dict[str, Any] = {"error": str(error), "code": error.code}
            if error.change:
                answer["change"] = error.change
            return error.status, JSON, msgspec.json.encode(answer)
        except Exception as error:
            # The one place where a defect must not end more than the call that met it.
            log.exception("control API: %s %s failed", method, path)
            text = f"{type(error).__name__}: {error}"
            return 500, JSON, msgspec.json.encode({"error": text, "code": "internal"})

    async def _handle(self, method: str, path: str, body: bytes, caller: Caller) -> Answer:
        split = urlsplit(path)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        parts = [unquote(part) for part in split.path.strip("/").split("/")]
        if method == "GET" and parts == ["metrics"]:
            return 200, _METRICS_TYPE, self._commands.metrics().encode()
        if method == "GET" and parts[0] == "v2stats" and len(parts) <= 3:
            stats = self._commands.v2_stats(*parts[1:])
            return 200, JSON, msgspec.json.encode(stats)
        match parts:
            case [verb]:
                key, target = ("", verb), ""
            case ["changes" | "models" | "slots" | "proxies" as kind, target]:
                key = (kind, "")
            case ["changes" | "models" | "slots" | "proxies" as kind, target, verb]:
                key = (kind, verb)
            case _:
                raise UnknownTarget(f"no such path: {split.path}")
        act = self._reads.get(key)
        if method not in ("GET", "HEAD") or act is None:
            act = self._writes.get(key)
            if act is None and key not in self._reads:
                raise UnknownTarget(f"no such path: {split.path}")
            if act is None or method != "POST":
                allowed = "GET" if key in self._reads else "POST"
                text = f"{split.path} takes {allowed}, not {method}"
                return 405, JSON, msgspec.json.encode({"error": text, "code": "method"})
            if not caller.admin:
                raise NotAllowed(
                    f"{caller.name} may look but not change anything; "
                    "be root, the service's user, or in server.control_group"
                )
        call = _Call(target=target, query=query, body=_fields(body), caller=caller)
        result = act(call)
        if isinstance(result, Awaitable):
            result = await result
        return 200, JSON, msgspec.json.encode({"ok": True} if result is None else result)

    async def _change(self, call: _Call) -> Any:
        """With ?wait=S the answer comes when the change has ended, or after that time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(_number(call.query.get("wait", 0), "wait"), _WAIT_LIMIT_S)
        steps = _integer(call, "steps", -1)
        while True:
            change = self._commands.change(call.target)
            if change["state"] in ENDED or change["state"] == "waiting" or loop.time() >= until:
                return change
            if 0 <= steps < len(change.get("steps", ())):
                return change  # there is news for somebody who shows them
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _logs(self, call: _Call) -> Any:
        lines, reached = self._commands.logs(
            call.target, _integer(call, "lines", 200), _integer(call, "since", 0)
        )
        return {"lines": lines, "next": reached}

    def _cordon(self, call: _Call) -> None:
        self._commands.cordon(call.target, str(call.body.get("why", "")), call.caller.name)

    def _drain(self, call: _Call) -> Any:
        limit = call.body.get("limit_s")
        limit_s = None if limit is None else _number(limit, "limit_s")
        return {"change": self._commands.drain(call.target, limit_s, call.caller.name)}

    def _reload(self, call: _Call) -> Any:
        result = self._commands.reload_model(call.target, call.body)
        return {"change": result} if isinstance(result, str) else result

    async def _dump(self, call: _Call) -> Any:
        return {"text": await self._commands.dump(call.target)}

    # -- the socket ------------------------------------------------------------------------------

    async def serve(self, listener: socket.socket) -> None:
        """Answer on a listening Unix socket until `close`. The socket stays the caller's."""
        app = web.Application(client_max_size=_BODY_LIMIT)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # a follower that left must not be followed for ever
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        # A copy, because a server closes its socket when it ends, and this one may serve again.
        await web.SockSite(self._runner, listener.dup()).start()

    async def close(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        follow = request.query.get("follow") in ("1", "true")
        path = request.path
        if request.method == "GET" and follow and path == "/events":
            return await self._stream(request, self._follow_events(request))
        if request.method == "GET" and follow and path.endswith("/logs"):
            return await self._stream(request, self._follow_logs(request))
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            text = f"a body of over {_BODY_LIMIT} bytes"
            return web.json_response({"error": text, "code": "too_large"}, status=413)
        status, kind, content = await self.handle(
            request.method, request.path_qs, body, self._caller(request)
        )
        headers = {"Allow": "GET, POST"} if status == 405 else {}
        return web.Response(status=status, body=content, headers={"Content-Type": kind, **headers})

    def _caller(self, request: web.Request) -> Caller:
        sock = request.transport.get_extra_info("socket") if request.transport else None
        if sock is None:
            return Caller(name="somebody", admin=False)
        _, uid, gid = peer_of(sock)
        admin = uid in (0, os.geteuid())
        if not admin and self._group:
            try:
                admin = grp.getgrnam(self._group).gr_gid in _groups_of(sock, uid, gid)
            except KeyError:
                admin = False
        return Caller(name=_user_name(uid), admin=admin)

    async def _stream(
        self, request: web.Request, lines: AsyncIterator[Mapping[str, Any]]
    ) -> web.StreamResponse:
        """One JSON object a line, until the client leaves or what it follows is gone."""
        try:
            first = await anext(lines)
        except CommandError as error:
            body = {"error": str(error), "code": error.code}
            return web.json_response(body, status=error.status)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(msgspec.json.encode(first) + b"\n")
        try:
            async for line in lines:
                await response.write(msgspec.json.encode(line) + b"\n")
        except (ConnectionResetError, CommandError):
            pass
        return response

    async def _follow_events(self, request: web.Request) -> AsyncIterator[Mapping[str, Any]]:
        since = int(_number(request.query.get("since", 0), "since"))
        yield {"kind": "following", "serial": since}
        while True:
            for event in self._commands.events(since):
                since = max(since, event["serial"])
                yield event
            await asyncio.sleep(_FOLLOW_S)

    async def _follow_logs(self, request: web.Request) -> AsyncIterator[Mapping[str, Any]]:
        target = request.path.strip("/").split("/")[1]
        count = int(_number(request.query.get("lines", 20), "lines"))
        lines, since = self._commands.logs(target, count, 0)
        yield {"lines": lines, "next": since}
        while True:
            await asyncio.sleep(_FOLLOW_S)
            lines, since = self._commands.logs(target, 100_000, since)
            if lines:
                yield {"lines": lines, "next": since}


def _fields(body: bytes) -> Mapping[str, Any]:
    if not body.strip():
        return {}
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CommandError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CommandError("the body is not a JSON object")
    return found


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{name} is {value!r}, a number is wanted") from error
    if not 0 <= number < float("inf"):
        raise CommandError(f"{name} is {value}, it must be 0 or more")
    return number


def _integer(call: _Call, name: str, default: int) -> int:
    return int(_number(call.query[name], name)) if name in call.query else default


def _groups_of(sock: socket.socket, uid: int, gid: int) -> set[int]:
    """The groups the peer had when it connected; of one with very many, those it has by name."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        with suppress(KeyError):
            return {gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)}
        return {gid}
    return {gid, *struct.unpack(f"{len(data) // 4}I", data)}


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"

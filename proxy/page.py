"""The page at `/`: what runs here and how to call it. No scripts, nothing from elsewhere."""

from __future__ import annotations

from functools import partial
from html import escape

import msgspec
from aiohttp import web

from gpusup.conf.package import package_version
from gpusup.supervisor.wire import ModelInfo, Snapshot

from .door import Door
from .openapi import example_tensor
from .replies import respond

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.35rem .8rem .35rem 0;
border-bottom:1px solid #d5dae0}pre{background:#f3f5f7;padding:.8rem;overflow:auto;
border-radius:4px}.ready{color:#146c2e}.not{color:#a4262c}
@media(prefers-color-scheme:dark){body{color:#dfe3e8;background:#16191d}pre{background:#22262b}
td,th{border-color:#3a4047}.ready{color:#62c77c}.not{color:#f1707a}a{color:#7ab8ff}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def add_routes(app: web.Application, door: Door) -> None:
    app.router.add_get("/", partial(_serve, door))


async def _serve(door: Door, request: web.Request) -> web.StreamResponse:
    base = f"{request.scheme}://{_host(request)}"
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
    }
    text = render(door.snapshot, base, keys=bool(door.config.server.api_keys))
    return await respond(door, request, headers, text.encode())


def _host(request: web.Request) -> str:
    """The client's own name for us, where it is one; it is only shown."""
    host = request.headers.get("Host", "")
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-:[]")
    return host if 0 < len(host) < 256 and set(host) <= allowed else "localhost"


def render(snapshot: Snapshot, base: str, *, keys: bool = False) -> str:
    state = "draining" if snapshot.draining else "ready" if snapshot.ready else "not ready"
    css = "ready" if state == "ready" else "not"
    why = f": {escape(snapshot.reason)}" if snapshot.reason and state != "ready" else ""
    rows = "".join(map(_row, snapshot.models)) or "<tr><td colspan=4>none configured</td></tr>"
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    calls = "\n".join(_calls(model, base, key) for model in snapshot.models[:20])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gpusup</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>gpusup {escape(package_version())}</h1>
<p>This server is <b class="{css}">{state}</b>{why}. {len(snapshot.routes)} worker(s) on
{len(snapshot.devices)} device(s).</p>
<h2>Models</h2>
<table><tr><th>model</th><th>version</th><th>state</th><th>inputs</th></tr>{rows}</table>
<h2>How to call them</h2>
<pre>{escape(calls)}</pre>
<p><a href="/openapi.json">openapi.json</a> describes every path.
<a href="/readyz">/readyz</a>, <a href="/livez">/livez</a> and <a href="/v2">/v2</a> are for
machines.</p>
</body></html>
"""


def _row(model: ModelInfo) -> str:
    state = escape(model.state + (f": {model.reason}" if model.reason else ""))
    css = "ready" if model.state == "ready" else "not"
    inputs = ", ".join(
        f"{s.name} {s.datatype} [{', '.join(map(str, (-1, *s.shape)))}]" for s in model.inputs
    )
    if not inputs:
        inputs = ", ".join(m for m in model.methods if m != "predict") or "any body"
    return (
        f"<tr><td>{escape(model.name)}</td>"
        f"<td>{escape(', '.join(model.versions) or model.version)}</td>"
        f'<td class="{css}">{state}</td><td>{escape(inputs)}</td></tr>'
    )


def _calls(model: ModelInfo, base: str, key: str) -> str:
    lines = [f"# {model.name}"]
    if not model.methods or "predict" in model.methods:
        lines.append(f"curl{key} -T input.bin {base}/predictions/{model.name}")
        if model.inputs:
            inputs = [example_tensor(spec) for spec in model.inputs]
            for tensor in inputs:
                tensor.setdefault("data", ["..."])
            body = msgspec.json.encode({"inputs": inputs}).decode()
            lines.append(f"curl{key} {base}/v2/models/{model.name}/infer -d '{body}'")
    if "generate" in model.methods:
        lines.append(
            f'curl{key} {base}/v2/models/{model.name}/generate -d \'{{"text_input": "Hello"}}\''
        )
    if "chat" in model.methods:
        lines.append(f"# OpenAI clients: base_url={base}/v1 model={model.name}")
    return "\n".join(lines) + "\n"

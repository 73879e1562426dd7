"""A whole front door over HTTP, with a model of ours behind it: for tests, and to try things on.

`python -m tests.proxy.front PORT` from the checkout serves it until interrupted.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from gpusup.conf.schema import Config, ServerConfig
from gpusup.proxy.app import Runner, Site, make_app
from gpusup.proxy.serve import make_surfaces
from gpusup.supervisor import wire as swire
from gpusup.worker import wire
from gpusup.worker.wire import TensorSpec

from .conftest import World

DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
)  # fmt: skip


def identity(datatype: str) -> dict[str, Any]:
    spec = (TensorSpec(name="X", datatype=datatype, shape=(-1,)),)
    return {
        "inputs": spec,
        "outputs": (TensorSpec(name="O", datatype=datatype, shape=(-1,)),),
        "methods": ("predict",),
        "max_rows": 64,
    }


#: name -> fields of its ModelInfo. "m" declares nothing: it takes whatever comes.
MODELS: dict[str, dict[str, Any]] = {
    "m": {"methods": ("predict", "generate", "chat", "embed"), "max_rows": 64},
    "text": {"methods": ("generate", "chat", "embed")},
    **{f"identity_{d.lower()}": identity(d) for d in DATATYPES},
}


class Front:
    """`url` answers; `world` is what stands behind it. `asked`: calls of the control API."""

    def __init__(self, world: World, app: web.Application, runner: web.AppRunner) -> None:
        self.world = world
        self.app = app
        self.runner = runner
        self.url = ""
        self.port = 0
        self.asked: list[tuple[str, str]] = []
        self.replies: dict[str, swire.Reply] = {}

    async def ask(self, method: str, path: str) -> swire.Reply:
        self.asked.append((method, path))
        if path in self.replies:
            return self.replies[path]
        if path.startswith("/v2stats"):
            return swire.Reply(0, 200, msgspec.json.encode(stats(path)))
        if path == "/metrics":
            return swire.Reply(0, 200, b"gpusup_build_info 1\n", "text/plain; version=0.0.4")
        return swire.Reply(0, 200, b"{}")


def stats(path: str) -> dict[str, Any]:
    names = [path.split("/")[2]] if path.count("/") > 1 else list(MODELS)
    duration = {"count": 0, "ns": 0}
    members = (
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
        "cache_hit", "cache_miss",
    )  # fmt: skip
    return {
        "model_stats": [
            {
                "name": name, "version": "1", "last_inference": 0, "inference_count": 0,
                "execution_count": 0, "inference_stats": dict.fromkeys(members, duration),
                "response_stats": {}, "batch_stats": [], "memory_usage": [],
            }
            for name in names
        ]
    }  # fmt: skip


def answers(worker: Any) -> Callable[[wire.Item], wire.Answer | None]:
    """The model: echoes tensors and bytes, and for text says the words back in capitals."""

    def answer(item: wire.Item) -> wire.Answer | None:
        if item.method in ("generate", "chat"):
            return _text(worker, item)
        if item.method == "embed":
            texts = msgspec.json.decode(worker.data(item.parts[0]))
            values = np.arange(4 * len(texts), dtype="<f4")
            part = wire.Part("embedding", values.tobytes(), "FP32", (len(texts), 4))
            return wire.Answer(item.id, "ok", (part,), batch_rows=1)
        parts = tuple(
            wire.Part(
                "O" if part.name == "X" else part.name,
                worker.data(part),
                part.datatype,
                part.shape,
                part.content_type or "application/octet-stream",
            )
            for part in item.parts
        )
        if not item.parts[0].datatype:
            parts = (_echo(worker, item),)
        return wire.Answer(item.id, "ok", parts, batch_rows=item.rows)

    return answer


def _echo(worker: Any, item: wire.Item) -> wire.Part:
    """An opaque request comes back as JSON that says what was there."""
    told = {
        part.name: {
            "bytes": len(worker.data(part)),
            "type": part.content_type,
            "file": part.filename,
        }
        for part in item.parts
    }
    return wire.Part("", msgspec.json.encode(told), content_type="application/json")


def _text(worker: Any, item: wire.Item) -> wire.Answer | None:
    data = worker.data(item.parts[0])
    if item.method == "chat":
        data = msgspec.json.decode(data)[-1]["content"].encode()
    words = data.decode().upper().split()
    if words and words[0] == "WAIT":
        return None  # the test answers
    if not item.stream:
        text = " ".join(words).encode()
        part = wire.Part("text", text, content_type="text/plain")
        return wire.Answer(item.id, "ok", (part,), batch_rows=1)
    worker.stream(item, words)
    return None


@asynccontextmanager
async def front(
    folder: Path, *, port: int = 0, models: dict[str, dict[str, Any]] | None = None, **server: Any
) -> AsyncIterator[Front]:
    from .fake_worker import FakeWorker

    class Streaming(FakeWorker):
        def stream(self, item: wire.Item, words: list[str]) -> None:
            import asyncio

            def later() -> None:
                for index, word in enumerate(words):
                    text = (word if index == 0 else f" {word}").encode()
                    part = wire.Part("text", text, content_type="text/plain")
                    self.reply(item, parts=(part,), more=True)
                self.reply(item)

            asyncio.get_running_loop().call_soon(later)

    world = World(folder)
    options: dict[str, Any] = {
        "default_model": "m",
        "arena": 8 * 2**20,
        "body_timeout": 2.0,
        "body_limit": 2**20,
    }
    world.open(Config(server=ServerConfig(**{**options, **server})))
    for name, fields in (MODELS if models is None else models).items():
        world.model(name, **fields)
        worker = Streaming(folder, slot=f"s.{name}", model=name)
        worker.answer = answers(worker)
        await worker.start()
        world.workers.append(worker)
    await world.tell()
    app = make_app(world.door)
    make_surfaces(app, world.door)
    runner = Runner(app, world.door)
    made = Front(world, app, runner)
    world.door.ask = made.ask  # type: ignore[method-assign]
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", port))
    site = Site(runner, sock, most=100)
    await site.start()
    made.port = sock.getsockname()[1]
    made.url = f"http://127.0.0.1:{made.port}"
    try:
        yield made
    finally:
        await runner.cleanup()
        sock.close()
        await world.close()


async def _serve(port: int) -> None:
    import asyncio
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        async with front(Path(folder), port=port, body_timeout=4.0, idle_timeout=4.0):
            await asyncio.Event().wait()


if __name__ == "__main__":
    import asyncio
    import sys

    asyncio.run(_serve(int(sys.argv[1])))

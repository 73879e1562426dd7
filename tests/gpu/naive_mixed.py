"""The usual way to serve a model, for comparison: FastAPI, threads, no limits.

    python naive_mixed.py --port 9000 --weights FOLDER [--threads 256] [--dtype fp32] [--cpu]

The same two nets on the same images as `handlers.Mixed`. Each request runs by itself in a thread:
a plain `def` of FastAPI, whose threads are as many as asked for (0: its own 40). An exception is a
500 with its text. Where FastAPI can't be imported, aiohttp stands in for it, and does the same.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import handlers  # with the scripts' folders on sys.path
import torch
import work
from aiohttp import web

Infer = Callable[[bytes], dict[str, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--threads", type=int, default=256)
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    device = torch.device("cpu" if given.cpu else "cuda")
    nets = [
        handlers.net_of(name, f"{given.weights}/{name}.safetensors", device)
        for name in ("resnet50", "vit_b_16")
    ]
    if given.dtype == "fp32":
        nets = [net.float() for net in nets]
    gc.collect()

    def infer(body: bytes) -> dict[str, int]:
        side = math.isqrt(len(body) // 3)
        with torch.inference_mode():
            images = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            images = images.view(1, 3, side, side).to(device)
            first = work.gpu_forward(nets[0], images)
            second = handlers.vit_forward(nets[1], images)
            return {"resnet": int(first), "vit": int(second)}

    infer(bytes(3 * 32 * 32))
    found = importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn")
    (with_fastapi if found else with_aiohttp)(infer, given.port, given.threads)


def with_fastapi(infer: Infer, port: int, threads: int) -> None:
    import anyio.to_thread
    import uvicorn
    from fastapi import Depends, FastAPI, Request, Response

    app = FastAPI()

    async def body_of(request: Request) -> bytes:
        if threads:
            anyio.to_thread.current_default_thread_limiter().total_tokens = threads
        body: bytes = await request.body()
        return body

    def predict(body: bytes = Depends(body_of)) -> Any:
        try:
            return infer(body)
        except Exception as error:
            return Response(f"{type(error).__name__}: {error}"[:300], 500)

    # Its annotations are names of this function, which strings could not be resolved to.
    body_of.__annotations__["request"] = Request
    app.add_api_route("/predict", predict, methods=["POST"], response_model=None)
    print("fastapi", flush=True)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def with_aiohttp(infer: Infer, port: int, threads: int) -> None:
    pool = ThreadPoolExecutor(threads or 40)

    async def predict(request: web.Request) -> web.Response:
        body = await request.read()
        loop = asyncio.get_running_loop()
        try:
            return web.json_response(await loop.run_in_executor(pool, infer, body))
        except Exception as error:  # what a framework answers; with the text, to be counted
            return web.Response(status=500, text=f"{type(error).__name__}: {error}"[:300])

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/predict", predict)
    print("aiohttp", flush=True)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


if __name__ == "__main__":
    main()

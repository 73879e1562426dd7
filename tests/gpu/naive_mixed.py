"""The usual way to serve a model, for comparison: an async server, threads, no limits.

    python naive_mixed.py --port 9000 --weights FOLDER [--threads 256] [--dtype fp32] [--cpu]

The same two nets on the same images as `handlers.Mixed`. Each request runs by itself in a thread,
as FastAPI runs a plain `def`; an exception is a 500 with its text.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor

import handlers  # with the scripts' folders on sys.path
import torch
import work
from aiohttp import web


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
    pool = ThreadPoolExecutor(given.threads)

    def infer(body: bytes) -> dict[str, int]:
        side = math.isqrt(len(body) // 3)
        with torch.inference_mode():
            images = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            images = images.view(1, 3, side, side).to(device)
            first = work.gpu_forward(nets[0], images)
            second = handlers.vit_forward(nets[1], images)
            return {"resnet": int(first), "vit": int(second)}

    async def predict(request: web.Request) -> web.Response:
        body = await request.read()
        loop = asyncio.get_running_loop()
        try:
            return web.json_response(await loop.run_in_executor(pool, infer, body))
        except Exception as error:  # what a framework answers; with the text, to be counted
            return web.Response(status=500, text=f"{type(error).__name__}: {error}"[:300])

    infer(bytes(3 * 32 * 32))
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/predict", predict)
    web.run_app(app, host="127.0.0.1", port=given.port, access_log=None, print=None)


if __name__ == "__main__":
    main()

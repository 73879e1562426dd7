"""The bench's work behind Ray Serve."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray
import work
from ray import serve

QUIET = {"enable_access_log": False}
OPTIONS: dict[str, Any] = {
    "num_replicas": work.WORKERS,
    "logging_config": QUIET,
    "health_check_period_s": 1,
    "health_check_timeout_s": max(1.0, work.TIMEOUT_S),
    "max_ongoing_requests": 100,
    "ray_actor_options": {"num_cpus": 0.1},
}


@serve.deployment(**OPTIONS)
class Single:
    def __init__(self) -> None:
        work.set_up()

    async def __call__(self, request: Any) -> Any:
        body = await request.body()
        return work.length(body) if work.MODE == "length" else work.op(json.loads(body))


@serve.deployment(**OPTIONS)
class Images:
    def __init__(self) -> None:
        self.net = work.set_up()

    @serve.batch(  # type: ignore[untyped-decorator]
        max_batch_size=work.BATCH, batch_wait_timeout_s=work.WINDOW_MS / 1000
    )
    async def infer(self, bodies: list[bytes]) -> list[dict[str, Any]]:
        return work.predict(self.net, bodies)

    async def __call__(self, request: Any) -> Any:
        return await self.infer(await request.body())


if __name__ == "__main__":
    passed = {k: v for k, v in os.environ.items() if k.startswith("BENCH_")}
    passed |= {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=1 << 30,
        log_to_driver=False,
        runtime_env={"env_vars": passed},
    )
    http = {
        "host": "127.0.0.1",
        "port": work.PORT,
        "location": "HeadOnly",
        "request_timeout_s": work.TIMEOUT_S,
    }
    serve.start(logging_config=QUIET, http_options=http)
    app: Any = Images if work.MODE == "conv" else Single
    serve.run(app.bind(), route_prefix="/predict")
    while True:
        time.sleep(3600)

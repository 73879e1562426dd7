"""The bench's work behind BentoML."""
# No `from __future__ import annotations`: BentoML reads the annotations of its APIs.

from typing import Any

import bentoml
import work

TRAFFIC = {"timeout": work.TIMEOUT_S}
LOGGING = {"access": {"enabled": False}}

if work.MODE == "conv":
    # BentoML batches lists; a raw-bytes front service calls the batching one (its documented way).
    @bentoml.service(workers=work.WORKERS, traffic=TRAFFIC, logging=LOGGING)
    class Inner:
        def __init__(self) -> None:
            self.net = work.set_up()

        @bentoml.api(batchable=True, max_batch_size=work.BATCH, max_latency_ms=1000)  # type: ignore[untyped-decorator]
        def infer(self, bodies: list[bytes]) -> list[dict[str, Any]]:
            return work.predict(self.net, bodies)

    @bentoml.service(workers=1, traffic=TRAFFIC, logging=LOGGING)
    class Bench:
        inner = bentoml.depends(Inner)

        @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
        async def predict(self, data: bytes, /) -> dict[str, Any]:
            answers: list[dict[str, Any]] = await self.inner.to_async.infer([data])
            return answers[0]

elif work.MODE == "length":

    @bentoml.service(workers=work.WORKERS, traffic=TRAFFIC, logging=LOGGING)
    class Bench:  # type: ignore[no-redef]
        @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
        def predict(self, data: bytes, /) -> dict[str, Any]:
            return work.length(data)

else:

    @bentoml.service(workers=work.WORKERS, traffic=TRAFFIC, logging=LOGGING)
    class Bench:  # type: ignore[no-redef]
        def __init__(self) -> None:
            work.set_up()

        @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
        def predict(self, op: str, id: str = "", pad: str = "", ms: int = 20) -> dict[str, Any]:
            return work.op({"op": op, "id": id, "pad": pad, "ms": ms})

"""The bench's work behind mosec."""

from __future__ import annotations

from typing import Any

import work
from mosec import Server, Worker


class Op(Worker):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = work.set_up()

    def forward(self, data: Any) -> Any:
        return work.op(data)


class Length(Op):
    def deserialize(self, data: bytes) -> Any:
        return data

    def forward(self, data: Any) -> Any:
        return work.length(data)


class Images(Length):
    def forward(self, data: Any) -> Any:
        if isinstance(data, list):
            return work.predict(self.net, data)
        return work.predict(self.net, [data])[0]


if __name__ == "__main__":
    server = Server()
    # mosec takes whole seconds here.
    limits = {"route": "/predict", "num": work.WORKERS, "timeout": max(1, int(work.TIMEOUT_S))}
    if work.MODE in ("conv", "resnet50", "vit_b_16"):
        server.append_worker(
            Images, max_batch_size=work.BATCH, max_wait_time=work.WINDOW_MS, **limits
        )
    else:
        server.append_worker(Length if work.MODE == "length" else Op, **limits)
    server.run()

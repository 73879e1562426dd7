"""The bench's work behind LitServe."""
# No `from __future__ import annotations`: LitServe reads the annotations of decode_request.

import os
from typing import Annotated, Any

import litserve
import work
from fastapi import Body

Raw = Annotated[bytes, Body(media_type="application/octet-stream")]


class Op(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.net = work.set_up()

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request  # unannotated is LitServe's way to say "the parsed JSON"

    def predict(self, x: Any) -> Any:
        return work.op(x)

    def encode_response(self, output: Any) -> Any:
        return output


class Length(Op):
    def decode_request(self, request: Raw) -> Any:
        return request

    def predict(self, x: Any) -> Any:
        return work.length(x)


class Images(Length):
    def batch(self, inputs: Any) -> Any:
        return inputs

    def predict(self, x: Any) -> Any:
        return work.predict(self.net, x)

    def unbatch(self, output: Any) -> Any:
        return output


if __name__ == "__main__":
    if work.MODE in ("conv", "resnet50", "vit_b_16"):
        api = Images(max_batch_size=work.BATCH, batch_timeout=work.WINDOW_MS / 1000)
    else:
        api = Length() if work.MODE == "length" else Op()
    server = litserve.LitServer(
        api,
        accelerator="cuda" if work.MODE in ("resnet50", "vit_b_16") else "cpu",
        devices=1,
        workers_per_device=work.WORKERS,
        restart_workers=True,
        fast_queue=True,
        timeout=work.TIMEOUT_S,
    )
    server.run(
        host="127.0.0.1",
        port=work.PORT,
        num_api_servers=int(os.environ.get("BENCH_FRONTS", "1")),
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )

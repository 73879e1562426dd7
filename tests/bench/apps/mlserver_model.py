"""The bench's work behind MLServer."""
# No `from __future__ import annotations`: MLServer reads the annotations of its handlers.

import base64
from typing import Annotated, Any

import work
from fastapi import Body
from mlserver import MLModel
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

Raw = Annotated[bytes, Body(media_type="application/octet-stream")]


class Op(MLModel):  # type: ignore[misc]
    async def load(self) -> bool:
        self.net = work.set_up()
        return True

    @custom_handler(rest_path="/predict")  # type: ignore[untyped-decorator]
    async def op(self, request: dict) -> dict:  # type: ignore[type-arg]
        return work.op(request)


class Length(MLModel):  # type: ignore[misc]
    async def load(self) -> bool:
        return True

    @custom_handler(rest_path="/predict")  # type: ignore[untyped-decorator]
    async def length(self, data: Raw) -> dict:  # type: ignore[type-arg]
        return work.length(data)


class Images(MLModel):  # type: ignore[misc]
    """Adaptive batching exists only on the V2 protocol: a BYTES tensor, base64 in JSON."""

    async def load(self) -> bool:
        self.net = work.set_up()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = work.predict(self.net, [base64.b64decode(b) for b in payload.inputs[0].data])

        def output(name: str, key: str) -> Any:
            values = [row[key] for row in rows]
            return ResponseOutput(name=name, shape=[len(rows), 1], datatype="INT64", data=values)

        outputs = [output("class", "class"), output("pid", "pid")]
        return InferenceResponse(model_name=self.name, outputs=outputs)

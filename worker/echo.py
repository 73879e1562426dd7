"""Two models that cost nothing: for measuring the way to a model and back, and for trying out a
configuration without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .model import InvalidInput, Model, Request, Response, Tensor

if TYPE_CHECKING:
    import torch


class Echo(Model):
    """Tensors in, the same tensors out; bytes in, the same bytes out."""

    inputs = (Tensor("x", "FP32", (-1,)),)
    outputs = (Tensor("x", "FP32", (-1,)),)
    capturable = False

    def decode(self, request: Request) -> torch.Tensor:
        import torch

        if not request.body:
            raise InvalidInput("the body is empty: send the bytes that should come back")
        return torch.frombuffer(bytearray(request.body), dtype=torch.uint8)

    def forward(self, batch: Any) -> Any:
        return batch

    def encode(self, row: Any, request: Request) -> Any:
        data = row.numpy().tobytes()
        return Response(data, request.content_type or "application/octet-stream")


class NoOp(Model):
    """Any body in, `{"ok": true}` out: what is left is the price of the way."""

    decode_inline = True
    capturable = False

    def load(self, device: torch.device, version: str) -> None:
        import torch

        self._nothing = torch.zeros(1)

    def decode(self, request: Request) -> torch.Tensor:
        return self._nothing

    def forward(self, batch: Any) -> Any:
        return batch

    def encode(self, row: Any, request: Request) -> Any:
        return {"ok": True}

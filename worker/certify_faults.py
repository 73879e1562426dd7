"""Models that misbehave on demand, for `gpusup certify`: they run only in a service it started."""

from __future__ import annotations

import ctypes
import json
from typing import Any, Final

import torch

from .model import InvalidInput, Model, Request, Tensor

_CODES: Final = {"echo": 0.0, "hold-gil": 1.0, "free-gil": 2.0, "busy-device": 3.0}


class Faults(Model):
    """`{"do": "echo" | "hold-gil" | "free-gil" | "busy-device"}`; all but the first never end."""

    inputs = (Tensor("do", "FP32", (1,)),)
    outputs = (Tensor("done", "FP32", (1,)),)
    capturable = False

    def load(self, device: torch.device, version: str) -> None:
        self.device = device

    def decode(self, request: Request) -> torch.Tensor:
        try:
            return torch.tensor([_CODES[json.loads(request.body)["do"]]])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"the body should say what to do, one of {list(_CODES)}") from error

    def forward(self, batch: Any) -> Any:
        do = float(batch.max())
        while do == 1.0:
            ctypes.PyDLL(None).pause()  # in C, holding the interpreter's lock
        while do == 2.0:
            ctypes.CDLL(None).pause()  # in C, as a call of the driver that does not come back
        while do == 3.0:
            torch.cuda._sleep(2**62)
            torch.cuda.synchronize(self.device)
        return batch

    def encode(self, row: Any, request: Request) -> Any:
        return {"done": float(row[0])}


class Broken(Model):
    """Passes every check beforehand and fails on the device: what a swap must take back."""

    capturable = False

    def load(self, device: torch.device, version: str) -> None:
        if device.type != "meta":
            raise RuntimeError("this version fails on purpose, to see it rolled back")

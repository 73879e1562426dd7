"""Handlers that break a real GPU worker in the ways GPUs break."""

from __future__ import annotations

import json
from typing import Any

import torch

from gpusup.worker.model import InvalidInput, Model, Request, Tensor


class Breakable(Model):
    """A small net; the body says what happens: {"do": "ok" | "hang" | "assert" | "oom"}."""

    inputs = (Tensor("x", "FP32", (8,)),)
    outputs = (Tensor("y", "FP32", (8,)),)
    capturable = False
    codes = ("ok", "hang", "assert", "oom")

    def load(self, device: torch.device, version: str) -> None:
        self.device = device
        self.net = torch.nn.Linear(8, 8).eval().to(device)

    def decode(self, request: Request) -> torch.Tensor:
        try:
            code = self.codes.index(json.loads(request.body)["do"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"do must be one of {self.codes}") from error
        return torch.full((8,), float(code))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        asked = {self.codes[int(c)] for c in batch[:, 0].tolist()}
        if "hang" in asked:  # a kernel that never ends, as far as anybody will wait
            torch.cuda._sleep(2**62)
        if "assert" in asked:
            table = torch.zeros(4, device=self.device)
            table[torch.full((8,), 99, device=self.device)].sum()
        if "oom" in asked:
            _, total = torch.cuda.mem_get_info()
            torch.empty(total, dtype=torch.uint8, device=self.device)
        return self.net(batch)

    def encode(self, row: Any, request: Request) -> Any:
        return {"sum": float(row.sum())}

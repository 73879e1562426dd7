"""A synthetic model of many GB for swaps on a real GPU. Also served by swap_5gb.py."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpusup.worker.loader import load_weights
from gpusup.worker.model import InvalidInput, Model, Request, Tensor

WIDTH = 8192


class Layers(Model):
    """x -> x times the version's number, after a few layers whose product is the identity.

    The weights: "scale" (1,) float32, and "layer.N" (WIDTH, WIDTH) half-precision identities; the
    layers make the answer depend on every file read whole.
    """

    inputs = (Tensor("x", "FP32", (1,)),)
    outputs = (Tensor("y", "FP32", (1,)),)
    decode_inline = True
    weights_on_device: Mapping[str, torch.Tensor]

    def load(self, device: torch.device, version: str) -> None:
        self.weights_on_device = load_weights(self.weights, device)
        self.layers = [t for n, t in self.weights_on_device.items() if n.startswith("layer.")]
        self.version = version

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self.weights_on_device

    def decode(self, request: Request) -> torch.Tensor:
        try:
            return torch.tensor([float(json.loads(request.body))])
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"the body should be a number: {error}") from error

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(batch.shape[0], WIDTH, dtype=torch.float16, device=batch.device)
        wide[:, :1] = batch.half()
        for layer in self.layers[:: max(1, len(self.layers) // 4)]:
            wide = wide @ layer
        return wide[:, :1].float() * self.weights_on_device["scale"]

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"value": float(row[0]), "version": self.version, "pid": os.getpid()}

    def warm_up(self) -> Sequence[torch.Tensor]:
        return (torch.ones(1),)

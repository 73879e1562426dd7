"""The bundled model: handwritten digits, 8x8 grey, white ink on black. Small, real, and pure.

Two trained versions are shipped, "1" and "2", so that a version change can be tried out of the box.
`tests/train/digits.py` makes them; `conf/digits/*.json` say how good they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .images import decode_image
from .loader import load_weights, prefetch
from .model import ConfigProblem, InvalidInput, Model, Request, Tensor

SIDE = 8


class Net(nn.Module):  # type: ignore[misc]
    """(rows, 1, 8, 8) of 0..1 -> (rows, 10) logits. About 28,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(48, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(batch)
        return logits


class Digits(Model):
    """An image of any size (made grey, shrunk to 8x8) to `{"digit": 7, "probability": 0.99}`."""

    inputs = (Tensor("image", "FP32", (1, SIDE, SIDE)),)
    outputs = (Tensor("logits", "FP32", (10,)), Tensor("probabilities", "FP32", (10,)))
    # Decoding 8x8 pixels is quicker than the hop to another thread and back would be, but a
    # client may send a photograph; so the pool it is.
    decode_inline = False

    net: nn.Module

    def prepare(self, version: str) -> None:
        prefetch(weights_path(self.weights, version))

    def load(self, device: torch.device, version: str) -> None:
        tensors = load_weights(weights_path(self.weights, version), device)
        with torch.device("meta"):
            net = Net()
        try:
            net.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise ConfigProblem(f"weights of version {version} do not fit: {error}") from error
        self.net = net.eval().requires_grad_(False)

    def state_dict(self) -> Mapping[str, torch.Tensor] | None:
        return dict(self.net.state_dict())

    def decode(self, request: Request) -> torch.Tensor:
        if request.json is not None and not request.body:
            raise InvalidInput("expected an image as the body, such as a PNG; got JSON")
        pixels = decode_image(request.body, mode="L", size=(SIDE, SIDE), resample="box")
        return torch.from_numpy(pixels).unsqueeze(0).float().div_(255)

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(batch)
        return {"logits": logits, "probabilities": torch.softmax(logits.float(), dim=1)}

    def encode(self, row: Any, request: Request) -> dict[str, Any]:
        probabilities = row["probabilities"]
        digit = int(probabilities.argmax())
        return {"digit": digit, "probability": round(float(probabilities[digit]), 6)}

    def warm_up(self) -> Sequence[torch.Tensor]:
        return (torch.zeros(1, SIDE, SIDE),)


def weights_path(weights: str, version: str) -> Path:
    """`weights` (a file, or a folder of versions) or, if that is "", the file in the package.

    Raises ConfigProblem if it is not there.
    """
    if weights:
        path = Path(weights)
        if path.is_dir():
            path = path / f"digits-{version}.safetensors"
    else:
        path = Path(str(files("gpusup.conf") / "digits" / f"digits-{version}.safetensors"))
    if not path.is_file():
        there = sorted(p.stem.removeprefix("digits-") for p in path.parent.glob("*.safetensors"))
        have = f"; there are {', '.join(there)}" if there else ""
        raise ConfigProblem(f"no weights for version {version} at {path}{have}")
    return path

"""Handlers for runs on a real GPU: ResNet-50, ViT-B/16, and images of many sizes.

Random weights, half precision. A raw body is the pixels themselves: uint8, channels first.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from gpusup.worker.model import InvalidInput, Model, Request, Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "apps"))
import work

# The body is read-only memory of the server; nothing here writes to the tensor that views it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

SIDE = 224
LEAST_SIDE, MOST_SIDE = 32, 2048


class Classifier(Model):
    """(3, 224, 224) uint8 in, the number of the strongest class out."""

    inputs = (Tensor("image", "UINT8", (3, SIDE, SIDE)),)
    outputs = (Tensor("class", "INT32", ()),)
    decode_inline = True  # a view, no work
    net_name: ClassVar[str]

    def load(self, device: torch.device, version: str) -> None:
        self.net = work.gpu_net(self.net_name, device)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.net.state_dict()
        return weights

    def decode(self, request: Request) -> torch.Tensor:
        body = request.body
        if len(body) != work.IMAGE_BYTES:
            raise InvalidInput(f"the body has {len(body)} bytes, {work.IMAGE_BYTES} are wanted")
        return torch.frombuffer(body, dtype=torch.uint8).view(3, SIDE, SIDE)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = work.gpu_forward(self.net, batch)
        return classes

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"class": int(row), "pid": os.getpid()}

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(3, SIDE, SIDE, dtype=torch.uint8),)


class ResNet50(Classifier):
    net_name = "resnet50"


class ViT(Classifier):
    net_name = "vit_b_16"


class MixedSizes(Model):
    """Images of 32 to 2048 pixels a side: PNG or JPEG, or the raw pixels of a square.

    Convolutional to the end, so any size is served at its own size; meant for `fit = "pad"` or
    `"resize"` with buckets of, say, 256, 512, 1024 and 2048, or for none.
    """

    inputs = (Tensor("image", "UINT8", (3, -1, -1)),)
    outputs = (Tensor("class", "INT32", ()),)

    def load(self, device: torch.device, version: str) -> None:
        self.net = work.gpu_net("resnet50", device)

    def decode(self, request: Request) -> torch.Tensor:
        body = request.body
        pixels = _decoded(bytes(body)) if _is_encoded(body) else _square(body)
        height, width = pixels.shape[1:]
        if min(height, width) < LEAST_SIDE or max(height, width) > MOST_SIDE:
            raise InvalidInput(
                f"the image is {width} x {height}; both sides must be within "
                f"{LEAST_SIDE} and {MOST_SIDE}"
            )
        return pixels

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = work.gpu_forward(self.net, batch)
        return classes

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"class": int(row), "pid": os.getpid()}


def _is_encoded(body: bytes) -> bool:
    return bytes(body[:8]) == b"\x89PNG\r\n\x1a\n" or bytes(body[:3]) == b"\xff\xd8\xff"


def _decoded(body: bytes) -> torch.Tensor:
    """(3, height, width) uint8."""
    # Imported here: raw pixels need neither.
    import io

    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(body)) as image:
            pixels = np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"cannot read the image: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _square(body: bytes) -> torch.Tensor:
    side = math.isqrt(len(body) // 3)
    if side == 0 or 3 * side * side != len(body):
        raise InvalidInput(
            f"the body has {len(body)} bytes: neither PNG nor JPEG, nor three planes of a square"
        )
    return torch.frombuffer(body, dtype=torch.uint8).view(3, side, side)

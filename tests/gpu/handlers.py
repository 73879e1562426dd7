"""Handlers for runs on a real GPU: ResNet-50, ViT-B/16, and both for images of many sizes.

Random weights from the files that `work.weights_file` makes, half precision. A raw body is the
pixels themselves: uint8, channels first. On a CPU, where the scripts are tried out, float32.
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

from gpusup.worker.loader import load_weights, prefetch
from gpusup.worker.model import InvalidInput, Model, Request, Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "apps"))
import work

# The body is read-only memory of the server; nothing here writes to the tensor that views it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

SIDE = 224
LEAST_SIDE, MOST_SIDE = 32, 2048


def net_of(name: str, weights: str, device: torch.device) -> Any:
    """The net with the file's weights, on `device`."""
    net = work.filled(work.bare_net(name), load_weights(weights, device))
    return net.float() if device.type == "cpu" else net


def gpu_uuid(device: torch.device) -> str:
    """As the driver spells it; "" for a CPU."""
    if device.type != "cuda":
        return ""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class Classifier(Model):
    """(3, 224, 224) uint8 in, the number of the strongest class out.

    Without a `decode`, so a body of the right size is the tensor, read where it lies.
    settings.fails: `load` raises on a device, as a broken version would.
    """

    inputs = (Tensor("image", "UINT8", (3, SIDE, SIDE)),)
    outputs = (Tensor("class", "INT32", ()),)
    decode_inline = True  # nothing to decode, and little to encode
    net_name: ClassVar[str]

    def prepare(self, version: str) -> None:
        prefetch(self.weights)

    def load(self, device: torch.device, version: str) -> None:
        if self.settings.get("fails") and device.type != "meta":
            raise RuntimeError("this version was made to fail")
        self.net = net_of(self.net_name, self.weights, device)
        self.said = {"pid": os.getpid(), "gpu": gpu_uuid(device)}

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.net.state_dict()
        return weights

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = work.gpu_forward(self.net, batch)
        return classes

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"class": int(row), **self.said}


class ResNet50(Classifier):
    net_name = "resnet50"


class ViT(Classifier):
    net_name = "vit_b_16"


class Mixed(Model):
    """Both nets on one image of 32 to 2048 pixels a side: raw pixels of a square, PNG or JPEG.

    ResNet-50 is convolutional to its end and sees the image at its own size, which is what takes
    the memory; ViT-B/16 sees it at 224 pixels. `weights` is the folder of both files.
    """

    inputs = (Tensor("image", "UINT8", (3, -1, -1)),)
    outputs = (Tensor("resnet", "INT32", ()), Tensor("vit", "INT32", ()))

    def prepare(self, version: str) -> None:
        for name in ("resnet50", "vit_b_16"):
            prefetch(f"{self.weights}/{name}.safetensors")

    def load(self, device: torch.device, version: str) -> None:
        self.nets = [
            net_of(name, f"{self.weights}/{name}.safetensors", device)
            for name in ("resnet50", "vit_b_16")
        ]
        self.said = {"pid": os.getpid(), "gpu": gpu_uuid(device)}

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

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        resnet, vit = self.nets
        return {"resnet": work.gpu_forward(resnet, batch), "vit": vit_forward(vit, batch)}

    def encode(self, row: Mapping[str, torch.Tensor], request: Request) -> Any:
        return {"resnet": int(row["resnet"]), "vit": int(row["vit"]), **self.said}


def vit_forward(net: Any, images: torch.Tensor) -> torch.Tensor:
    """(rows, 3, side, side) uint8 -> (rows,) int32, at the 224 pixels that this net takes."""
    small = torch.nn.functional.interpolate(images, (SIDE, SIDE), mode="nearest")
    classes: torch.Tensor = work.gpu_forward(net, small)
    return classes


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

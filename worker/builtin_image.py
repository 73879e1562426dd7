"""An image classifier that needs no code: weights, labels, and how its images are prepared.

    [models.cats]
    handler = "gpusup.worker.builtin_image:ImageClassifier"
    weights = "resnet50-{version}.safetensors"  # a state dict, or a whole .pt2 / TorchScript file
    settings.network = "torchvision.models:resnet50"  # makes what a state dict belongs to
    settings.network_args = { num_classes = 2 }
    settings.labels = "labels.txt"          # one a line, or a JSON list
    settings.size = [224, 224]              # height, width
    settings.resize = 256                   # shorter side before the middle is cut; 0: stretch
    settings.mean = [0.485, 0.456, 0.406]   # of 0..1
    settings.std = [0.229, 0.224, 0.225]
    settings.top = 5                        # classes in an answer

Paths in settings are relative to the weights' folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from .builtin_exported import load_program
from .handlers import import_attribute
from .images import decode_image
from .loader import PRECISIONS, load_weights
from .model import ConfigProblem, InvalidInput, Model, Request, Tensor

_WHOLE: Final = (".pt2", ".ts", ".torchscript")


class ImageClassifier(Model):
    """An image in; `{"class", "label", "probability", "top": [...]}` out."""

    # Pixels travel to the device as bytes: a quarter of what floats would take.
    inputs = (Tensor("image", "UINT8", (3, -1, -1)),)
    outputs = (Tensor("probabilities", "FP32", (-1,)),)
    degrade_steps = ("lower_precision",)

    def load(self, device: torch.device, version: str) -> None:
        self._read_settings()
        path = Path(self.weights)
        if not self.weights:
            raise ConfigProblem("weights: names no file")
        kind = PRECISIONS.get(self.dtype, torch.float32)
        network = str(self.settings.get("network", ""))
        if path.suffix in _WHOLE or not network:
            self.net = load_program(path, device)
            self.kind = torch.float32
        else:
            self.net = self._network(network, path, device).to(kind)
            self.kind = kind
        self.mean = torch.tensor(self._mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(self._std, device=device).view(1, -1, 1, 1)

    def state_dict(self) -> Mapping[str, torch.Tensor] | None:
        return dict(self.net.state_dict()) if isinstance(self.net, torch.nn.Module) else None

    def decode(self, request: Request) -> torch.Tensor:
        height, width = self._size
        if self._resize:
            # The shorter side to `resize`, then the middle: the same as cutting out a larger
            # middle first, in one step.
            share = self._resize / min(height, width)
            outer = (round(height * share), round(width * share))
            pixels = decode_image(request.body, mode="RGB", size=outer, crop=True)
            top, left = (outer[0] - height) // 2, (outer[1] - width) // 2
            pixels = pixels[top : top + height, left : left + width]
        else:
            pixels = decode_image(request.body, mode="RGB", size=(height, width))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scaled = (batch.float() / 255 - self.mean) / self.std
        logits = self.net(scaled.to(self.kind))
        return torch.softmax(logits.float(), dim=1)

    def encode(self, row: torch.Tensor, request: Request) -> dict[str, Any]:
        count = min(int(request.params.get("top", self._top)), len(row))
        if count < 1:
            raise InvalidInput(f"top must be at least 1, got {count}")
        values, indices = row.topk(count)
        top = [
            {"class": int(i), "label": self._label(int(i)), "probability": round(float(v), 6)}
            for v, i in zip(values, indices, strict=True)
        ]
        return {**top[0], "top": top}

    def warm_up(self) -> Sequence[torch.Tensor]:
        return (torch.zeros(3, *self._size, dtype=torch.uint8),)

    def _label(self, index: int) -> str:
        return self._labels[index] if index < len(self._labels) else str(index)

    def _read_settings(self) -> None:
        get = self.settings.get
        self._size = _pair("size", get("size", [224, 224]))
        self._resize = int(get("resize", 256))
        if self._resize and self._resize < min(self._size):
            raise ConfigProblem(
                f"settings.resize: {self._resize} is below the smaller side of size, "
                f"{min(self._size)}"
            )
        self._mean = _three("mean", get("mean", [0.485, 0.456, 0.406]))
        self._std = _three("std", get("std", [0.229, 0.224, 0.225]))
        if 0 in self._std:
            raise ConfigProblem("settings.std: can't be 0")
        self._top = int(get("top", 5))
        labels = str(get("labels", ""))
        self._labels = read_labels(Path(self.weights).parent / labels) if labels else []

    def _network(self, name: str, path: Path, device: torch.device) -> torch.nn.Module:
        make = import_attribute(name)
        arguments = dict(self.settings.get("network_args", {}))
        with torch.device("meta"):
            net: torch.nn.Module = make(**arguments)
        tensors = read_tensors(path, device)
        if wrong := misfit(tensors, net.state_dict()):
            raise ConfigProblem(f"{path} does not fit {name}: {wrong}")
        try:
            net.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise ConfigProblem(f"{path} does not fit {name}: {said}") from error
        left = [key for key, value in net.state_dict().items() if value.is_meta]
        if left and device.type != "meta":
            raise ConfigProblem(f"{path} lacks {left[0]} and {len(left) - 1} more of {name}")
        return net.to(device).eval().requires_grad_(False)


def misfit(have: Mapping[str, Any], want: Mapping[str, Any]) -> str:
    """What keeps a state dict from being a network's, in one line; "" if nothing does."""
    found = []
    for words, names in (
        ("lacks", [name for name in want if name not in have]),
        ("has what is not in it:", [name for name in have if name not in want]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found.append(f"{words} {names[0]}{more}")
    for name in want:
        if name not in have or not isinstance(want[name], torch.Tensor):
            continue
        value, shape = have[name], list(want[name].shape)
        if not isinstance(value, torch.Tensor):
            found.append(f"{name} is a {type(value).__name__}, no tensor")
        elif list(value.shape) != shape:
            found.append(f"{name} has shape {list(value.shape)}, {shape} is wanted")
    return "; ".join(found[:3])


def read_tensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """A state dict from safetensors or from torch.save. Raises ConfigProblem."""
    if path.is_dir():
        raise ConfigProblem(f"{path} is a folder; the weights of this handler are one file")
    if path.suffix == ".safetensors":
        return load_weights(path, device)
    try:
        # weights_only: a pickle from elsewhere may hold any program.
        loaded = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise ConfigProblem(f"cannot read {path}: {error}") from error
    except Exception as error:
        raise ConfigProblem(f"cannot read {path}: {type(error).__name__}: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise ConfigProblem(f"{path} holds a {type(loaded).__name__}, no state dict")
    return {str(key).removeprefix("module."): value for key, value in loaded.items()}


def read_labels(path: Path) -> list[str]:
    """One label a line, or a JSON list. Raises ConfigProblem."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            found = json.loads(text)
            if not isinstance(found, list):
                raise ConfigProblem(f"{path}: expected a list of labels")
            return [str(label) for label in found]
    except (OSError, ValueError) as error:
        raise ConfigProblem(f"cannot read labels {path}: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _pair(name: str, value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        value = [value, value]
    if not (isinstance(value, list | tuple) and len(value) == 2 and min(value) > 0):
        raise ConfigProblem(f"settings.{name}: expected [height, width], got {value!r}")
    return int(value[0]), int(value[1])


def _three(name: str, value: Any) -> list[float]:
    if not (isinstance(value, list | tuple) and len(value) == 3):
        raise ConfigProblem(f"settings.{name}: expected three numbers, got {value!r}")
    return [float(part) for part in value]

"""The work that every server does here, the same for all. Runs in the peers' venvs too.

The environment says what: BENCH_MODE (noop, length, conv, resnet50, vit_b_16), BENCH_PORT,
BENCH_WORKERS, BENCH_WIDTH (channels of the conv net), BENCH_BATCH (rows), BENCH_TIMEOUT (seconds).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MODE = os.environ.get("BENCH_MODE", "noop")
PORT = int(os.environ.get("BENCH_PORT", "9000"))
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))
WIDTH = int(os.environ.get("BENCH_WIDTH", "16"))
BATCH = int(os.environ.get("BENCH_BATCH", "16"))
TIMEOUT_S = float(os.environ.get("BENCH_TIMEOUT", "60"))
WINDOW_MS = 5
SIDE = 64  # of the conv net's images
CONV_BYTES = 3 * SIDE * SIDE
IMAGE_BYTES = 3 * 224 * 224
FOREVER_S = 3600
#: Where weights are made: in memory, if there is such a place.
WEIGHTS = "/dev/shm/gpusup-bench" if os.path.isdir("/dev/shm") else "/tmp/gpusup-bench"


def hang(hold_gil: bool) -> None:
    """Sleep in C. `PyDLL` keeps the interpreter's lock, `CDLL` gives it up."""
    library = ctypes.PyDLL(None) if hold_gil else ctypes.CDLL(None)
    library.sleep(FOREVER_S)


def op(request: dict[str, Any]) -> dict[str, Any]:
    """The JSON handler. `op`: noop, slow (`ms`), hang, hang-gil."""
    match request.get("op"):
        case "slow":
            time.sleep(request.get("ms", 20) / 1000)
        case "hang":
            hang(hold_gil=False)
        case "hang-gil":
            hang(hold_gil=True)
        case _:
            pass
    return {"ok": True, "n": len(request.get("pad", "")), "pid": os.getpid()}


def length(body: bytes) -> dict[str, Any]:
    return {"len": len(body), "pid": os.getpid()}


def conv_net(width: int, classes: int = 1000) -> Any:
    """A residual net of 18 layers; `width` 64 has ResNet-18's channels, 16 a quarter of them."""
    import torch
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            self.first_norm = nn.BatchNorm2d(after)
            self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
            self.second_norm = nn.BatchNorm2d(after)
            self.shortcut: nn.Module = nn.Identity()
            if stride != 1 or before != after:
                convolution = nn.Conv2d(before, after, 1, stride, bias=False)
                self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first_norm(self.first(x)))
            return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))

    torch.manual_seed(0)
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for step, stride in enumerate((1, 2, 2, 2)):
        after = width << step
        layers += [Block(before, after, stride), Block(after, after, 1)]
        before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers).eval()


def conv_forward(net: Any, images: Any) -> Any:
    """(rows, 3, 64, 64) uint8 -> (rows,) class numbers."""
    return net(images.float().div_(255.0)).argmax(1)


def bare_net(name: str) -> Any:
    """torchvision's model in half precision, on the meta device: shapes without memory."""
    import torch
    import torchvision

    with torch.device("meta"), _nothing_drawn():
        return getattr(torchvision.models, name)(weights=None).eval().half()


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Without the first values of all weights: others follow, and these take most of the time."""
    from torch.nn import init

    names = [name for name in dir(init) if name.endswith("_") and not name.startswith("_")]
    kept = {name: getattr(init, name) for name in names}
    try:
        for name in names:
            setattr(init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, function in kept.items():
            setattr(init, name, function)


def draw(tensors: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Random values of these shapes and types, the same each time on one kind of device.

    Scaled so that nothing overflows on its way through the layers.
    """
    import torch

    random = torch.Generator(device).manual_seed(0)
    found = {}
    for name, like in tensors.items():
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        if tensor.dim() > 1:
            tensor.normal_(0.0, tensor[0].numel() ** -0.5, generator=random)
        else:
            tensor.fill_(1.0 if name.endswith(("weight", "running_var")) else 0.0)
        found[name] = tensor
    return found


def filled(net: Any, tensors: Mapping[str, Any]) -> Any:
    """A bare net with these tensors as its weights, channels last."""
    import torch

    net.load_state_dict(tensors, assign=True)
    return net.requires_grad_(False).to(memory_format=torch.channels_last)


def gpu_net(name: str, device: Any = "cuda") -> Any:
    """torchvision's model with random weights, in half precision, channels last.

    The weights are drawn on the device: on the host that would take longer than all the rest of a
    start.
    """
    net = bare_net(name)
    return filled(net, draw(net.state_dict(), device))


def weights_file(name: str, folder: str = WEIGHTS) -> str:
    """A file of random weights of this net, made once. It is what a real service loads."""
    from safetensors.torch import save_file

    path = os.path.join(folder, f"{name}.safetensors")
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        fresh = f"{path}.{os.getpid()}"
        save_file(draw(bare_net(name).state_dict(), "cpu"), fresh)
        os.replace(fresh, path)
    return path


def gpu_forward(net: Any, images: Any) -> Any:
    """(rows, 3, side, side) uint8 on the net's device -> (rows,) int32 class numbers."""
    import torch

    dtype = next(net.parameters()).dtype
    pixels = images.to(dtype=dtype, memory_format=torch.channels_last).div_(255)
    return net(pixels).argmax(1).int()


def set_up() -> Any:
    """Once in each worker: the model of this mode, warmed up, or None."""
    if MODE == "conv":
        import torch

        torch.set_num_threads(1)
        net = conv_net(WIDTH)
        predict(net, [bytes(CONV_BYTES)] * BATCH)
        return net
    if MODE in ("resnet50", "vit_b_16"):
        net = gpu_net(MODE)
        rows = 1
        while rows <= BATCH:
            predict(net, [bytes(IMAGE_BYTES)] * rows)
            rows *= 2
        return net
    if MODE == "torch":
        import torch
    return None


def predict(net: Any, bodies: Sequence[bytes]) -> list[dict[str, Any]]:
    """Raw uint8 images, all of one size -> their classes; one forward for the batch."""
    import torch

    side = SIDE if MODE == "conv" else 224
    with torch.inference_mode():
        joined = torch.frombuffer(bytearray(b"".join(bodies)), dtype=torch.uint8)
        images = joined.view(len(bodies), 3, side, side)
        if MODE == "conv":
            classes = conv_forward(net, images).tolist()
        else:
            classes = gpu_forward(net, images.to("cuda", non_blocking=True)).tolist()
    return [{"class": number, "pid": os.getpid()} for number in classes]


def answer(net: Any, body: bytes) -> dict[str, Any]:
    """One request without batching, in the mode of this process."""
    if MODE == "length":
        return length(body)
    if net is not None:
        return predict(net, [body])[0]
    import json

    return op(json.loads(body))

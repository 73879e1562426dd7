"""Requests that the model answers: the user's own, the bundled digits, images, tensors."""

from __future__ import annotations

import io
import json
import math
import mimetypes
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from PIL import Image

from .buckets import parse
from .certify_load import Body
from .certify_service import CertifyError, Target
from .certify_toml import DIGITS

#: Edge of a square image in pixels -> share of the requests, where nobody knows better.
USUAL_SIZES: Final = {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
ASK_LIMIT_S: Final = 60.0
#: What a variable dimension becomes in a made-up tensor.
VARIABLE: Final = 16

_NUMPY: Final = {
    "BOOL": "bool", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`file`: JSON, {"256": 0.4, "640x480": 0.6}. `inputs`: bodies as they are to be sent."""

    file: Path | None = None
    inputs: tuple[Path, ...] = ()


async def make_bodies(target: Target, sizes: Sizes) -> tuple[str, list[Body], str]:
    """(path to POST to, bodies, where they are from). Raises CertifyError."""
    raw = f"/predictions/{target.model}"
    timeout = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        tried = []
        for path, bodies, origin in [
            *([(raw, from_files(sizes.inputs), "the files given")] if sizes.inputs else []),
            *(_digits(target, raw) if not sizes.inputs and not sizes.file else []),
            *(await _images(target, raw, sizes) if not sizes.inputs else []),
            *(await _tensors(session, target) if not sizes.inputs else []),
        ]:
            status, told = await _ask(session, target.url + path, bodies[0])
            if status == 200:
                return path, bodies, origin
            tried.append(f"{origin}: {status} {told}")
        raise CertifyError(
            f"no request made up here is answered by {target.model}; give some with --input\n  "
            + "\n  ".join(tried)
        )


async def _ask(session: aiohttp.ClientSession, url: str, body: Body) -> tuple[int, str]:
    try:
        async with session.post(url, data=body.data, headers=dict(body.headers)) as response:
            return response.status, (await response.text(errors="replace"))[:200]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return 0, str(error) or type(error).__name__


def from_files(paths: Sequence[Path]) -> list[Body]:
    """Each file, or each one in a folder, with the type its name says. Raises CertifyError."""
    found = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            try:
                data = file.read_bytes()
            except OSError as error:
                raise CertifyError(f"cannot read {file}: {error.strerror}") from error
            found.append(Body(data=data, headers={"Content-Type": kind}, title=file.name))
    if not found:
        raise CertifyError(f"{paths[0]} holds no file to send")
    return found


def _digits(target: Target, path: str) -> list[tuple[str, list[Body], str]]:
    model = target.config.models.get(target.model) if target.config else None
    ours = model is not None and model.handler == DIGITS
    if not ours and target.model != "digits":
        return []
    folder = Path(str(files("gpusup.conf") / "digits"))
    bodies = from_files(sorted(folder.glob("held-out-*.png")))
    return [(path, bodies, f"the {len(bodies)} bundled images of digits")]


async def _images(target: Target, path: str, sizes: Sizes) -> list[tuple[str, list[Body], str]]:
    if sizes.file is not None:
        shares, origin = read_sizes(sizes.file), f"sizes of {sizes.file.name}"
    elif seen := await _seen(target):
        shares, origin = seen, "the sizes this model was sent before"
    else:
        shares = {(edge, edge): share for edge, share in USUAL_SIZES.items()}
        origin = "images of 256, 512, 1024 and 2048 px at 0.4, 0.3, 0.2 and 0.1"
    rng = random.Random(1)
    return [(path, [image(w, h, share, rng) for (w, h), share in shares.items()], origin)]


def image(width: int, height: int, share: float, rng: random.Random) -> Body:
    """A picture that looks like one to a codec: a gradient with some noise, as PNG."""
    noise = np.random.default_rng(rng.randrange(2**32))
    across = np.linspace(0, 255, width, dtype=np.float32)[None, :, None]
    down = np.linspace(0, 255, height, dtype=np.float32)[:, None, None]
    tint = noise.random((1, 1, 3), dtype=np.float32)
    grain = noise.integers(0, 8, (height, width, 1))
    pixels = ((across + down) / 2 * tint + grain).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return Body(
        data=out.getvalue(),
        headers={"Content-Type": "image/png"},
        weight=share,
        title=f"{width}x{height}",
    )


def read_sizes(file: Path) -> dict[tuple[int, int], float]:
    """Raises CertifyError."""
    try:
        told = json.loads(file.read_text())
        found = {_edges(key): float(value) for key, value in told.items()}
    except OSError as error:
        raise CertifyError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise CertifyError(f'{file} is not like {{"256": 0.4, "640x480": 0.6}}: {error}') from error
    if not found or any(not 0 < share < math.inf for share in found.values()):
        raise CertifyError(f"{file}: every size needs a share above 0")
    return found


def _edges(key: str) -> tuple[int, int]:
    sides = [int(side) for side in key.split("x")]
    if len(sides) > 2 or any(not 0 < side <= 16384 for side in sides):
        raise ValueError(f"{key!r} is no size in pixels")
    return sides[0], sides[-1]


async def _seen(target: Target) -> dict[tuple[int, int], float]:
    """The model's histogram, as far as its shapes are those of images."""
    if target.control is None:
        return {}
    told = await target.call("GET", f"/models/{target.model}/buckets")
    return sizes_seen(told.get("sizes", {}))


def sizes_seen(shapes: Mapping[str, int]) -> dict[tuple[int, int], float]:
    """Shares by (width, height), of shapes such as "3x480x640/uint8" or "480x640x3"."""
    counts: dict[tuple[int, int], int] = {}
    for key, count in shapes.items():
        shape = parse(key)
        if shape is None or len(shape) != 3:
            continue
        if shape[0] in (1, 3):
            height, width = shape[1], shape[2]
        elif shape[2] in (1, 3):
            height, width = shape[0], shape[1]
        else:
            continue
        if min(width, height) >= 16:
            counts[width, height] = counts.get((width, height), 0) + count
    total = sum(counts.values())
    common = sorted(counts, key=lambda size: -counts[size])[:20]
    return {size: counts[size] / total for size in common}


async def _tensors(
    session: aiohttp.ClientSession, target: Target
) -> list[tuple[str, list[Body], str]]:
    path = f"/v2/models/{target.model}"
    try:
        async with session.get(target.url + path) as response:
            told = await response.json()
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
        return []
    inputs = told.get("inputs", []) if isinstance(told, dict) else []
    if not inputs:
        return []
    body = tensor_body(inputs)
    return [] if body is None else [(f"{path}/infer", [body], "tensors of the declared shapes")]


def tensor_body(inputs: Sequence[Mapping[str, Any]]) -> Body | None:
    """One row of each declared input as a v2 request with binary data; None if it can't be."""
    told, blocks = [], []
    for tensor in inputs:
        shape = [1] + [side if side > 0 else VARIABLE for side in tensor["shape"][1:]]
        kind = _NUMPY.get(tensor["datatype"])
        if kind is None:
            return None
        size = math.prod(shape)
        if tensor["datatype"].startswith("FP"):
            data = np.linspace(0, 1, size).astype(kind).tobytes()
        else:
            data = (np.arange(size) % 2).astype(kind).tobytes()
        blocks.append(data)
        told.append(
            {
                "name": tensor["name"],
                "datatype": tensor["datatype"],
                "shape": shape,
                "parameters": {"binary_data_size": len(data)},
            }
        )
    head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    return Body(
        data=head + b"".join(blocks),
        headers={
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
        },
        title="tensors",
    )

"""Image bytes to pixels, the same way for every model. What happens to unusual images:

| image | becomes |
|---|---|
| 16-bit grey | the upper 8 bits (Pillow's own conversion would make everything above 255 white) |
| palette | its colours, not the indices |
| alpha (RGBA, LA, palette with transparency) | laid over white |
| CMYK, YCCK | RGB |
| EXIF orientation | applied: what was shot upright is upright |
| several frames | the first |
| floating point, truncated, broken, not an image | `InvalidInput` |
| more pixels than the limit | `InvalidInput`, before anything is decoded |

Colour profiles are ignored. Formats: PNG, JPEG, WebP, GIF, BMP, TIFF.
"""

from __future__ import annotations

import io
import os
import re
import threading
import warnings
from typing import Any, Final, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .model import InvalidInput

#: Pillow also opens EPS, which runs Ghostscript, and a few dozen formats nobody sends.
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

#: `[server] pixels` comes in through the environment, so that handlers needn't pass it on.
PIXELS_VARIABLE: Final = "GPUSUP_PIXELS"
DEFAULT_PIXELS: Final = 100_000_000

# Ours is the limit that decides; Pillow's warning about large images would only fill the log.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)

_raising = threading.Lock()


def pixel_limit() -> int:
    text = os.environ.get(PIXELS_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else DEFAULT_PIXELS


def decode_image(
    data: bytes | memoryview,
    *,
    mode: Literal["RGB", "L"] = "RGB",
    size: tuple[int, int] | None = None,
    crop: bool = False,
    resample: Literal["box", "bilinear", "bicubic"] = "bilinear",
    pixels: int | None = None,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 of (height, width, 3) for "RGB" and (height, width) for "L".

    `size` is (height, width) to resize to; with `crop` the middle is cut out instead of
    stretching. `pixels` is the most an image may have; default `pixel_limit()`.
    Raises InvalidInput.
    """
    limit = pixel_limit() if pixels is None else pixels
    image = _open(data, limit)
    width, height = image.size
    if width * height > limit:
        raise InvalidInput(
            f"image is {width}x{height} = {width * height} pixels, at most {limit} are allowed"
        )
    if width == 0 or height == 0:
        raise InvalidInput(f"image is {width}x{height}: it has no pixels")
    try:
        if size is not None and image.format == "JPEG":
            # Lets the JPEG decoder skip what the resize would throw away; twice the size keeps
            # the result as sharp. The longer side for both, since a turn may swap them.
            image.draft(None, (2 * max(size), 2 * max(size)))
        image.load()
        image = ImageOps.exif_transpose(image)
        image = _convert(image, mode)
        if size is not None and image.size != (size[1], size[0]):
            image = _resize(image, size, crop, resample)
    except InvalidInput:
        raise
    except MemoryError:
        raise
    except Exception as error:
        # A damaged file can raise nearly anything in a decoder: OSError, SyntaxError, zlib.error,
        # struct.error, IndexError. All of them are the sender's.
        raise InvalidInput(f"cannot decode the image: {_short(error)}") from error
    # Pillow's buffer is read-only, and torch.from_numpy warns about such.
    return np.array(image, dtype=np.uint8)


def _open(data: bytes | memoryview, limit: int) -> Image.Image:
    if not len(data):
        raise InvalidInput("cannot decode the image: the body is empty")
    allowed = Image.MAX_IMAGE_PIXELS
    if allowed is not None and limit > allowed:
        # Pillow refuses by a limit of its own; the operator has set ours higher.
        with _raising:
            Image.MAX_IMAGE_PIXELS = max(limit, Image.MAX_IMAGE_PIXELS or limit)
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        found = re.search(r"\((\d+) pixels\)", str(error))
        size = f"{found.group(1)} pixels" if found else "too many pixels"
        raise InvalidInput(f"image has {size}, at most {limit} are allowed") from error
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise InvalidInput(
            f"cannot decode the image: {len(data)} bytes are none of {', '.join(FORMATS)}"
        ) from error
    except Exception as error:
        raise InvalidInput(f"cannot decode the image: {_short(error)}") from error


def _convert(image: Image.Image, mode: Literal["RGB", "L"]) -> Image.Image:
    if image.mode == mode:
        return image if "transparency" not in image.info else _over_white(image, mode)
    if image.mode.startswith("I"):
        # I;16 as Pillow opens 16-bit PNG; plain I is what other formats and older versions give.
        wide = np.asarray(image).astype(np.int64)
        grey = Image.fromarray((np.clip(wide, 0, 65535) >> 8).astype(np.uint8))
        return grey.convert(mode)
    if image.mode == "F":
        raise InvalidInput("cannot decode the image: floating-point pixels have no known range")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        return _over_white(image, mode)
    if image.mode == "P":
        image = image.convert("RGB")
    return image.convert(mode)


def _over_white(image: Image.Image, mode: Literal["RGB", "L"]) -> Image.Image:
    seen = image.convert("RGBA")
    white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, seen).convert(mode)


def _resize(
    image: Image.Image,
    size: tuple[int, int],
    crop: bool,
    resample: Literal["box", "bilinear", "bicubic"],
) -> Image.Image:
    how = {
        "box": Image.Resampling.BOX,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
    }[resample]
    box: tuple[float, float, float, float] | None = None
    if crop:
        width, height = image.size
        scale = min(height / size[0], width / size[1])
        cut_height, cut_width = size[0] * scale, size[1] * scale
        left, top = (width - cut_width) / 2, (height - cut_height) / 2
        box = (left, top, left + cut_width, top + cut_height)
    return image.resize((size[1], size[0]), how, box=box)


def _short(error: BaseException) -> str:
    """One line of at most 200 characters: a decoder's message may quote the data."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."

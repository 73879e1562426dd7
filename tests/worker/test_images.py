"""Legal but unusual images, broken ones, and bombs. All of them are made here."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gpusup.worker.images import PIXELS_VARIABLE, decode_image, pixel_limit
from gpusup.worker.model import InvalidInput


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that says how large it is and has next to nothing behind its header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"\x78")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


RED = Image.new("RGB", (4, 2), (255, 0, 0))


def test_rgb_comes_as_it_is() -> None:
    pixels = decode_image(saved(RED))
    assert pixels.shape == (2, 4, 3)
    assert pixels.dtype == np.uint8
    assert pixels[0, 0].tolist() == [255, 0, 0]
    assert pixels.flags.writeable


def test_16_bit_grey_keeps_its_upper_bits() -> None:
    wide = Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16))
    assert decode_image(saved(wide), mode="L")[0, 0] == 40000 >> 8
    assert decode_image(saved(wide)).shape == (8, 8, 3)


def test_a_palette_gives_colours_not_indices() -> None:
    assert decode_image(saved(RED.convert("P")))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_over_white(mode: str) -> None:
    clear = Image.new(mode, (2, 2), (0, 0, 0, 0) if mode == "RGBA" else (0, 0))
    assert decode_image(saved(clear)).min() == 255


def test_a_transparent_palette_entry_is_laid_over_white() -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    assert decode_image(saved(image, transparency=0)).min() == 255


def test_cmyk_becomes_rgb() -> None:
    red, green, blue = decode_image(saved(RED.convert("CMYK"), "JPEG"))[0, 0].tolist()
    assert red > 200
    assert green < 60
    assert blue < 60


def test_what_was_shot_upright_is_upright() -> None:
    image = Image.new("RGB", (64, 32))
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode_image(saved(image, "JPEG", exif=exif)).shape == (64, 32, 3)


def test_of_several_frames_the_first_counts() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "the body is empty"),
        (b"<html>no image</html>", "21 bytes are none of PNG, JPEG"),
        (saved(Image.effect_noise((64, 64), 90))[:2000], "cannot decode the image"),
        (saved(Image.effect_noise((64, 64), 90), "JPEG")[:900], "cannot decode the image"),
        (bomb(12000, 12000), "144000000 pixels, at most 100000000 are allowed"),
        (bomb(30000, 30000), "900000000 pixels, at most 100000000 are allowed"),
        (bomb(4, 4), "cannot decode the image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "are none of"),
        (saved(Image.new("F", (2, 2), 0.5), "TIFF"), "floating-point pixels"),
    ],
)
def test_what_is_no_usable_image_is_the_clients_fault(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint) as error:
        decode_image(data)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_the_limit_can_be_set_by_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIXELS_VARIABLE, "7")
    assert pixel_limit() == 7
    with pytest.raises(InvalidInput, match=r"4x2 = 8 pixels, at most 7"):
        decode_image(saved(RED))


def test_resizing_stretches_or_cuts_out_the_middle() -> None:
    left_half_black = Image.new("L", (40, 10), 255)
    left_half_black.paste(0, (0, 0, 20, 10))
    data = saved(left_half_black)
    stretched = decode_image(data, mode="L", size=(4, 4), resample="box")
    assert stretched.shape == (4, 4)
    assert stretched[0].tolist() == [0, 0, 255, 255]
    cut = decode_image(data, mode="L", size=(10, 10), crop=True, resample="box")
    assert cut[0].tolist() == [0] * 5 + [255] * 5


def test_a_large_jpeg_shrinks_to_nearly_what_it_was() -> None:
    ramp = Image.linear_gradient("L").resize((1024, 1024))
    small = decode_image(saved(ramp, "JPEG", quality=95), mode="L", size=(8, 8))
    exact = decode_image(saved(ramp), mode="L", size=(8, 8))
    assert np.abs(small.astype(int) - exact.astype(int)).max() <= 4


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 400), st.sampled_from(["PNG", "JPEG", "GIF", "BMP"]))
def test_no_damage_raises_anything_else(noise: bytes, at: int, form: str) -> None:
    data = bytearray(saved(RED.resize((16, 16)), form))
    data[at : at + len(noise)] = noise
    try:
        pixels = decode_image(bytes(data), pixels=1_000_000)
    except InvalidInput:
        return
    assert pixels.shape[2] == 3

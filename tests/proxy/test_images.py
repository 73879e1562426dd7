"""Pixels are counted from headers, in every format and however odd the file."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.proxy import images
from gpusup.proxy.errors import InputTooLarge

from . import pictures


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_the_header_tells_the_size(kind: str) -> None:
    assert images.size(pictures.encoded(kind, 64, 32)) == (64, 32)
    assert images.size(memoryview(pictures.encoded(kind, 64, 32))) == (64, 32)


def test_a_lossless_webp_and_a_jpeg_with_a_long_exif_tell_it_too() -> None:
    assert images.size(pictures.encoded("WEBP", 65, 33, lossless=True)) == (65, 33)
    assert images.size(pictures.encoded("WEBP", 65, 33, mode="RGBA", lossless=False)) == (65, 33)
    exif = b"Exif\0\0" + bytes(60_000)
    assert images.size(pictures.encoded("JPEG", 64, 32, exif=exif)) == (64, 32)
    assert images.size(pictures.encoded("JPEG", 64, 32, progressive=True)) == (64, 32)


def test_a_bomb_is_refused_with_both_numbers() -> None:
    bomb = pictures.png(12_000, 12_000, real=False)
    with pytest.raises(InputTooLarge, match="144000000 pixels, 100000000 are allowed"):
        images.check(bomb, 100_000_000)
    with pytest.raises(InputTooLarge):
        images.check(pictures.png(30_000, 30_000, depth=1, real=False), 100_000_000)
    images.check(bomb, 144_000_000)
    assert len(bomb) < 200


def test_a_gif_frame_larger_than_its_screen_counts() -> None:
    gif = bytearray(pictures.encoded("GIF", 4, 2, mode="L"))
    gif[6:10] = b"\1\0\1\0"
    assert images.size(bytes(gif)) == (4, 2)


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", b"<html>", b"BM", b"\xff\xd8\xff", b"GIF89a"]
)
def test_what_is_no_image_is_let_through(data: bytes) -> None:
    assert images.size(data) is None
    images.check(data, 1)


@settings(max_examples=300, deadline=None)
@given(
    head=st.sampled_from(
        [
            b"\xff\xd8\xff\xe0",
            b"GIF89a",
            b"BM",
            b"RIFF....WEBPVP8 ",
            b"RIFF....WEBPVP8L",
            b"\x89PNG\r\n\x1a\n",
        ]
    ),
    tail=st.binary(max_size=120),
)
def test_any_bytes_are_sized_without_a_crash(head: bytes, tail: bytes) -> None:
    found = images.size(head + tail)
    assert found is None or min(found) >= 0

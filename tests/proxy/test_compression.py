"""Inflating is bounded and strict; deflating is for those who profit."""

from __future__ import annotations

import contextlib
import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.proxy import compression
from gpusup.proxy.errors import InputTooLarge, InvalidInput, ProxyError

TEXT = b'{"x": 1}' * 500


def test_what_was_compressed_comes_back() -> None:
    for coding in ("gzip", "deflate"):
        packed = compression.deflate(TEXT, coding)
        assert len(packed) < len(TEXT)
        assert compression.inflate(packed, coding, len(TEXT)) == TEXT
        assert compression.inflate(memoryview(packed), coding, len(TEXT)) == TEXT
    assert compression.inflate(gzip.compress(TEXT), "x-gzip", len(TEXT)) == TEXT
    assert compression.inflate(compression.deflate(b"", "gzip"), "gzip", 0) == b""
    bare = zlib.compressobj(9, zlib.DEFLATED, -15)
    assert compression.inflate(bare.compress(TEXT) + bare.flush(), "deflate", 10**6) == TEXT


def test_a_bomb_stops_at_the_limit() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(InputTooLarge, match="limit of 1000000 bytes"):
        compression.inflate(bomb, "gzip", 1_000_000)
    with pytest.raises(InputTooLarge):
        compression.inflate(gzip.compress(TEXT), "gzip", len(TEXT) - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        gzip.compress(TEXT)[:-1],
        gzip.compress(TEXT)[:20],
        gzip.compress(TEXT) + b"x",
        gzip.compress(TEXT) * 2,
        gzip.compress(gzip.compress(TEXT))[:40],
    ],
)
def test_what_is_broken_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="broken gzip body"):
        compression.inflate(data, "gzip", 10**6)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=100), coding=st.sampled_from(["gzip", "deflate"]))
def test_any_bytes_are_inflated_or_refused(data: bytes, coding: str) -> None:
    head = b"\x1f\x8b\x08\0\0\0\0\0\0\x03" if coding == "gzip" else b"\x78\x9c"
    for body in (data, head + data):
        with contextlib.suppress(ProxyError):
            assert len(compression.inflate(body, coding, 1000)) <= 1000


def test_a_client_gets_the_coding_it_likes_best() -> None:
    assert compression.accepted("gzip, deflate, br") == ("gzip", "deflate")
    assert compression.accepted("deflate;q=1, gzip;q=0.5") == ("deflate", "gzip")
    assert compression.accepted("gzip;q=0, *") == ("deflate",)
    assert compression.accepted("br, identity") == ()


def test_small_answers_and_tensors_go_as_they_are() -> None:
    many = "gzip, deflate, br"
    assert compression.choose(many, "application/json", 2000) == "gzip"
    assert compression.choose(many, "application/json", 100) == ""
    assert compression.choose(None, "application/json", 2000) == ""
    assert compression.choose(many, "application/octet-stream", 10**6) == ""
    assert compression.choose("gzip", "application/octet-stream", 10**6) == "gzip"
    assert compression.choose("br", "application/json", 2000) == ""

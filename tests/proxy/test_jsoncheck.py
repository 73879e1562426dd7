"""JSON is bounded before it costs, and never ends in a RecursionError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.proxy import jsoncheck
from gpusup.proxy.errors import InputTooLarge, InvalidInput


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_the_depth_is_counted_exactly() -> None:
    jsoncheck.check(nested(64), depth=64)
    with pytest.raises(InvalidInput, match="65 deep, 64 levels are allowed"):
        jsoncheck.check(nested(65), depth=64)
    many = b"[" + b",".join([b"[1]"] * 1000) + b"]"
    jsoncheck.check(many, depth=2)
    with pytest.raises(InvalidInput):
        jsoncheck.check(many, depth=1)


def test_brackets_in_strings_are_text() -> None:
    text = json.dumps(["[" * 500, '\\"[[', "]]]{"] * 3).encode()
    jsoncheck.check(text, depth=1)
    assert jsoncheck.load(text, depth=1) == json.loads(text)
    hidden = b'["' + b"]" * 500 + b'",' + nested(100) + b"]"
    with pytest.raises(InvalidInput, match="101 deep"):
        jsoncheck.check(hidden, depth=64)


def test_too_many_values_are_refused_with_both_numbers() -> None:
    with pytest.raises(InputTooLarge, match="11 values, 9 are allowed"):
        jsoncheck.check(b"[" + b"1," * 10 + b"1]", values=9)


@pytest.mark.parametrize(
    "body", [b"1" + b"0" * 40, b"[-9223372036854775809]", b"[[18446744073709551616]]"]
)
def test_integers_that_could_not_travel_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"64 bits|range"):
        jsoncheck.load(body)


def test_tokens_that_are_no_json_are_named() -> None:
    for body in (b"[NaN]", b"[-Infinity]"):
        with pytest.raises(InvalidInput, match="binary"):
            jsoncheck.load(body)
    with pytest.raises(InvalidInput, match="is not JSON"):
        jsoncheck.load(b'{"NaNny": ')


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@settings(max_examples=300, deadline=None)
@given(value=VALUES)
def test_the_depth_is_that_of_the_value(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    assert jsoncheck._depth(text) == depth(value)
    assert jsoncheck.load(text) == value


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=100) | st.text('[]{}",\\:1a', max_size=200).map(str.encode))
def test_any_bytes_are_loaded_or_refused(body: bytes) -> None:
    refused = False
    try:
        jsoncheck.load(body, depth=8)
    except InvalidInput:
        refused = True
    assert refused or body

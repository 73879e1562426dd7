"""Parts to tensors and back, exactly; and every lie about a size is found."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpusup.worker import wire
from gpusup.worker.codec import DTYPES, encoded, part_of, request_of, tensor_of
from gpusup.worker.model import InvalidInput, Response


def data_of(part: wire.Part) -> bytes:
    assert isinstance(part.data, bytes)
    return part.data


@pytest.mark.parametrize("datatype", sorted(DTYPES))
def test_each_datatype_comes_back_as_it_went(datatype: str) -> None:
    size = DTYPES[datatype].itemsize
    raw = bytes([0, 1] * 6) if datatype == "BOOL" else bytes(range(12 * size))
    part = wire.Part("x", raw, datatype, (3, 4))
    tensor = tensor_of(part, raw)
    assert tensor.dtype is DTYPES[datatype]
    assert part_of("x", tensor) == part


def test_non_finite_numbers_survive_bit_by_bit() -> None:
    raw = struct.pack("<5f", math.nan, math.inf, -math.inf, -0.0, 1e-45)
    part = wire.Part("x", raw, "FP32", (5,))
    assert part_of("x", tensor_of(part, raw)).data == raw


@pytest.mark.parametrize(
    ("datatype", "shape", "length"),
    [
        ("FP32", (2**32, 2**32), 0),  # numpy's product of these is 0
        ("FP32", (2**63 - 1, 2), 0),
        ("FP32", (-1,), 0),
        ("FP32", (2, -3), 24),
        ("FP32", (3,), 11),
        ("FP32", (3,), 13),
        ("FLOAT", (1,), 4),
        ("fp32", (1,), 4),
        ("BYTES", (2**40,), 8),
    ],
)
def test_sizes_that_do_not_match_are_refused(
    datatype: str, shape: tuple[int, ...], length: int
) -> None:
    with pytest.raises(InvalidInput, match="'x'"):
        tensor_of(wire.Part("x", bytes(length), datatype, shape), bytes(length))


def test_a_bool_is_zero_or_one() -> None:
    with pytest.raises(InvalidInput, match="byte of 2"):
        tensor_of(wire.Part("x", b"\x00\x02", "BOOL", (2,)), b"\x00\x02")


def test_empty_tensors_keep_their_shape() -> None:
    tensor = tensor_of(wire.Part("x", b"", "FP32", (0, 3)), b"")
    assert tuple(tensor.shape) == (0, 3)
    assert part_of("x", tensor).shape == (0, 3)


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_bytes_elements_are_opaque(elements: list[bytes]) -> None:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    part = part_of("x", array) if elements else wire.Part("x", b"", "BYTES", (0,))
    assert list(tensor_of(part, data_of(part))) == elements


@given(st.binary(max_size=60), st.integers(0, 20))
def test_any_bytes_tensor_is_read_or_refused(raw: bytes, count: int) -> None:
    part = wire.Part("x", raw, "BYTES", (count,))
    try:
        elements = tensor_of(part, raw)
    except InvalidInput:
        return
    assert part_of("x", elements).data == raw if count else not raw


def test_a_length_beyond_the_body_allocates_nothing() -> None:
    raw = struct.pack("<I", 1_150_092_980) + bytes(100)
    with pytest.raises(InvalidInput, match=r"1150092980 bytes, 100 are left"):
        tensor_of(wire.Part("x", raw, "BYTES", (1,)), raw)


def test_a_view_of_the_arena_is_not_a_copy() -> None:
    arena = bytearray(16)
    tensor = tensor_of(wire.Part("x", wire.Block(0, 16), "FP32", (4,)), memoryview(arena))
    arena[:4] = struct.pack("<f", 5.0)
    assert tensor[0] == 5.0


def test_outputs_are_cast_to_what_was_declared() -> None:
    assert part_of("y", torch.ones(2, dtype=torch.float16), "FP32").datatype == "FP32"


@pytest.mark.parametrize(
    ("value", "data", "kind"),
    [
        ({"a": [1, 2.5]}, b'{"a":[1,2.5]}', "application/json"),
        (b"x", b"x", "application/octet-stream"),
        (Response(b"x", "a/b"), b"x", "a/b"),
        (None, b"null", "application/json"),
        ("null", b'"null"', "application/json"),
        (torch.tensor([1.0, 2.0]), b"[1.0,2.0]", "application/json"),
        ({"a": np.float32(1.5), "b": np.arange(2)}, b'{"a":1.5,"b":[0,1]}', "application/json"),
    ],
)
def test_what_encode_may_return(value: Any, data: bytes, kind: str) -> None:
    part = encoded(value)
    assert (part.data, part.content_type) == (data, kind)


@pytest.mark.parametrize(
    "value",
    [math.nan, [1.0, [math.inf]], {"a": (-math.inf, None)}, torch.tensor([math.nan])],
)
def test_what_json_cannot_hold_is_an_error_and_not_null(value: Any) -> None:
    with pytest.raises(ValueError, match="NaN or an infinity"):
        encoded(value)


def test_a_result_without_end_is_an_error() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        encoded(deep)


def request(*parts: wire.Part) -> Any:
    return request_of(
        wire.Item(1, parts, params={"k": 1}, request_id="r"), lambda p: memoryview(data_of(p))
    )


def test_the_body_is_the_first_file_of_a_form() -> None:
    made = request(
        wire.Part("note", b"hello"),
        wire.Part("image", b"png", content_type="image/png", filename="a.png"),
    )
    assert made.body == b"png"
    assert made.content_type == "image/png"
    assert made.fields["note"].data == b"hello"
    assert made.params == {"k": 1}


def test_bulk_is_looked_at_where_it_lies_until_bytes_are_asked_for() -> None:
    shared = bytearray(b"0123456789")
    part = wire.Part("body", wire.Block(2, 5), content_type="image/png")
    made = request_of(wire.Item(1, (part,)), lambda _: memoryview(shared)[2:7])
    assert len(made.view) == 5
    shared[2:4] = b"ab"
    assert bytes(made.view) == b"ab456"
    assert made.body == b"ab456"
    shared[2:4] = b"zz"
    assert made.body is made.fields["body"].data
    assert made.body == b"ab456"


def test_json_is_parsed_and_tensors_are_arrays() -> None:
    made = request(wire.Part("body", b'{"a": 1}', content_type="application/json; charset=utf-8"))
    assert made.json == {"a": 1}
    made = request(wire.Part("x", struct.pack("<2e", 1.0, 2.0), "FP16", (2,)))
    assert made.tensors["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'"\xff"', b"NaN"])
def test_broken_json_is_the_clients_fault(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="JSON"):
        request(wire.Part("body", body, content_type="application/json"))

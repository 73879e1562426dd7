"""The v2 codec, a pure function: what it takes, what it refuses, and that it never falls over."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from gpusup.proxy import v2
from gpusup.proxy.datatypes import NUMPY, SIZES
from gpusup.proxy.errors import InvalidInput, ProxyError
from gpusup.proxy.v2_checks import ShapeRefused
from gpusup.worker.wire import Block, Part, TensorSpec

LIMIT = 64 * 2**20


def spec(datatype: str = "FP32", shape: tuple[int, ...] = (-1,), name: str = "X") -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def tensor(data: Any, datatype: str, shape: Any, name: str = "X", **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


def decode(document: Any, tail: bytes = b"", **options: Any) -> v2.InferRequest:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    length = str(len(text)) if tail else None
    return v2.decode(text + tail, length, limit=LIMIT, **options)


def one(data: Any, datatype: str, shape: Any, **options: Any) -> Part:
    (part,) = decode({"inputs": [tensor(data, datatype, shape)]}, **options).parts
    return part


def refusal(document: Any, tail: bytes = b"", **options: Any) -> str:
    with pytest.raises(ProxyError) as caught:
        decode(document, tail, **options)
    assert caught.value.status in (400, 413)
    return str(caught.value)


def data_of(part: Part) -> bytes:
    assert isinstance(part.data, bytes)
    return part.data


# -- what it takes --------------------------------------------------------------------------------


def test_flat_and_nested_data_are_the_same_tensor() -> None:
    flat = one([0.0, 1.0, 2.5, 3.0], "FP32", [2, 2])
    assert flat == one([[0.0, 1.0], [2.5, 3.0]], "FP32", [2, 2])
    assert np.frombuffer(data_of(flat), "<f4").tolist() == [0.0, 1.0, 2.5, 3.0]
    assert flat.shape == (2, 2)


@pytest.mark.parametrize("datatype", sorted(SIZES))
def test_every_datatype_goes_in_and_out_as_json_and_as_binary(datatype: str) -> None:
    values: list[Any] = [True, False, True] if datatype == "BOOL" else [0, 1, 100]
    if datatype in ("FP16", "BF16", "FP32", "FP64"):
        values = [0.0, -1.5, 64.0]
    request = decode({"inputs": [tensor(values, datatype, [3])], "id": "7"})
    (part,) = request.parts
    assert len(data_of(part)) == 3 * SIZES[datatype]
    said = json.loads(v2.encode([part], request, "m", "1").json)
    assert said["outputs"][0]["data"] == values
    assert (said["id"], said["model_name"], said["model_version"]) == ("7", "m", "1")

    document = {
        "inputs": [
            {
                "name": "X",
                "datatype": datatype,
                "shape": [3],
                "parameters": {"binary_data_size": len(data_of(part))},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    request = decode(document, data_of(part))
    assert request.parts == (part,)
    answer = v2.encode(request.parts, request, "m", "1")
    assert answer.header_length == len(answer.json)
    assert answer.tensors == (data_of(part),)
    assert json.loads(answer.json)["outputs"][0]["parameters"] == {
        "binary_data_size": len(data_of(part))
    }


def test_numpy_reads_what_was_packed() -> None:
    for datatype, dtype in NUMPY.items():
        values = [True, False] if datatype == "BOOL" else [1, 2]
        assert np.frombuffer(data_of(one(values, datatype, [2])), dtype).tolist() == values


def test_the_largest_uint64_survives() -> None:
    assert data_of(one([2**64 - 1], "UINT64", [1])) == b"\xff" * 8


def test_integers_pass_for_floats() -> None:
    assert data_of(one([1, 2], "FP32", [2])) == struct.pack("<2f", 1, 2)


def test_bytes_elements_keep_zeros_and_may_be_empty() -> None:
    elements = [b"", b"a\0\0", b"\x00\xff ab", "hé".encode()]
    packed = b"".join(struct.pack("<I", len(e)) + e for e in elements)
    document = {
        "inputs": [
            {
                "name": "X",
                "datatype": "BYTES",
                "shape": [4],
                "parameters": {"binary_data_size": len(packed)},
            }
        ]
    }
    request = decode(document, packed)
    assert data_of(request.parts[0]) == packed
    with pytest.raises(InvalidInput, match="binary_data"):
        v2.encode(request.parts, request, "m", "1")
    request.binary = True
    assert v2.encode(request.parts, request, "m", "1").tensors == (packed,)


def test_strings_travel_as_utf8() -> None:
    part = one(["v-é", ""], "BYTES", [2])
    assert data_of(part) == b"\x04\0\0\0v-\xc3\xa9\0\0\0\0"
    said = json.loads(v2.encode([part], v2.InferRequest(parts=(), rows=2), "m", "1").json)
    assert said["outputs"][0]["data"] == ["v-é", ""]


def test_bfloat16_rounds_to_nearest_even_and_echoes_exactly() -> None:
    assert data_of(one([1.0, -2.0, 1.00390625], "BF16", [3])) == b"\x80\x3f\x00\xc0\x80\x3f"


def test_an_empty_tensor_keeps_its_shape() -> None:
    fillings: list[dict[str, Any]] = [
        {"parameters": {"binary_data_size": 0}},
        {"parameters": {"binary_data_size": 0}, "data": None},
        {"data": []},
    ]
    for filling in fillings:
        document = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [0, 3], **filling}]}
        request = decode(document, inputs=[spec(shape=(3,))])
        assert (request.rows, request.parts[0].shape) == (0, (0, 3))
        outputs = [spec(shape=(3,), name="O"), spec(shape=(-1, 2), name="P")]
        answer = v2.empty_answer(request, [spec(shape=(3,))], outputs)
        assert [p.shape for p in answer] == [(0, 3), (0, 0, 2)]


def test_binary_tensors_follow_the_order_of_the_inputs() -> None:
    document = {
        "inputs": [
            tensor(None, "FP32", [2, 2], "A", parameters={"binary_data_size": 16}),
            tensor([5, 6], "INT8", [2], "C"),
            tensor(None, "BOOL", [2], "B", parameters={"binary_data_size": 2}),
        ]
    }
    cuts: list[tuple[int, int]] = []

    def cut(start: int, end: int) -> Block:
        cuts.append((start, end))
        return Block(start, end - start)

    length = len(json.dumps(document))
    request = decode(document, bytes(16) + b"\1\0", cut=cut)
    assert cuts == [(length, length + 16), (length + 16, length + 18)]
    assert request.parts[2].data == Block(length + 16, 2)
    assert request.rows == 2


def test_a_body_in_an_arena_is_read_like_any_other() -> None:
    text = json.dumps({"inputs": [tensor([1], "UINT8", [1])]}).encode()
    assert v2.decode(memoryview(text), None).parts[0].data == b"\1"


def test_options_are_read() -> None:
    request = decode(
        {
            "inputs": [tensor([1], "UINT8", [1])],
            "outputs": [{"name": "O", "parameters": {"binary_data": False}}, {"name": "P"}],
            "parameters": {
                "binary_data_output": True,
                "priority": 2,
                "timeout": 500000,
                "k": "v",
                "n": 3,
            },
            "model_name": "ignored",
        }
    )
    assert (request.binary, request.priority, request.timeout_s) == (True, 2, 0.5)
    assert request.params == {"k": "v", "n": 3}
    assert request.outputs == (v2.Wanted("O", False), v2.Wanted("P", None))
    parts = [Part("P", b"\2", "UINT8", (1,)), Part("O", b"\1", "UINT8", (1,))]
    answer = v2.encode(parts, request, "m", "1")
    said = json.loads(answer.json)["outputs"]
    assert [(o["name"], o.get("data")) for o in said] == [("O", [1]), ("P", None)]
    assert answer.tensors == (b"\2",)


def test_the_whole_body_may_be_the_one_input() -> None:
    request = v2.decode(bytes(24), "0", inputs=[spec("FP32", (-1, 2))])
    assert (request.parts[0].shape, request.rows, request.binary) == ((1, 3, 2), 1, True)
    request = v2.decode(b"text", "0", inputs=[spec("BYTES", (1,))])
    assert request.parts[0].data == b"\4\0\0\0text"
    for body, specs in (
        (bytes(23), [spec("FP32", (-1, 2))]),
        (bytes(24), [spec("FP32", (-1, -1))]),
        (bytes(24), [spec("FP32", (2, 2))]),
        (b"text", [spec("BYTES", (2,))]),
        (b"text", []),
    ):
        with pytest.raises(InvalidInput):
            v2.decode(body, "0", inputs=specs)


def test_a_scalar_is_one_value() -> None:
    assert one([5], "UINT8", []).shape == ()
    assert one(5, "UINT8", []).data == b"\5"


# -- values that do not fit are refused, with the index -------------------------------------------


@pytest.mark.parametrize(
    ("data", "datatype", "says"),
    [
        ([0, 256], "UINT8", "value 1 .* 256"),
        ([-1], "UINT8", "value 0 .* -1"),
        ([2147483648], "INT32", "2147483648"),
        ([2**64], "UINT64", "18446744073709551616"),
        ([2**63], "INT64", "9223372036854775808"),
        ([-1], "UINT64", "-1"),
        ([0, 1.9], "INT8", "value 1 .* 1.9"),
        ([1.0], "INT8", "an integer"),
        ([True, 2], "BOOL", "value 1 .* 2"),
        (["true"], "BOOL", "true or false"),
        ([1e39], "FP32", r"1e\+39"),
        ([65536.0], "FP16", "65536"),
        ([3.4e38], "BF16", r"3.4e\+38"),
        (["1.0"], "FP32", "a number"),
        ([True], "FP32", "a number"),
        ([None], "FP32", "a number"),
        ([{}], "FP32", "a number"),
        ([1], "BYTES", "a string"),
        ([10**400], "FP32", "."),
    ],
)
def test_a_value_that_does_not_fit_is_refused(data: Any, datatype: str, says: str) -> None:
    document = {"inputs": [tensor(data, datatype, [len(data)])]}
    with pytest.raises(InvalidInput, match=says):
        decode(document)


def test_ragged_data_is_refused() -> None:
    assert "along dimension 1" in refusal({"inputs": [tensor([[1, 2], [3]], "INT8", [2, 2])]})
    refusal({"inputs": [tensor([[1, 2], [3, 4], [5, 6]], "INT8", [2, 3])]})
    refusal({"inputs": [tensor([[1, [2]]], "INT8", [1, 2])]})
    refusal({"inputs": [tensor([[1], 2], "INT8", [2, 1])]})


def test_nan_in_a_request_is_refused_with_the_way_out() -> None:
    text = b'{"inputs":[{"name":"X","shape":[2],"datatype":"FP32","data":[NaN,Infinity]}]}'
    assert "binary" in refusal(text)


def test_a_byte_of_two_is_no_bool() -> None:
    document = {
        "inputs": [
            {"name": "X", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}}
        ]
    }
    assert "BOOL" in refusal(document, b"\1\2")


def test_nan_is_null_and_infinity_asks_for_binary() -> None:
    request = v2.InferRequest(parts=(), rows=3)
    data = struct.pack("<3f", float("nan"), -0.0, 1e-45)
    said = v2.encode([Part("O", data, "FP32", (3,))], request, "m", "1").json
    assert b'"data":[null,-0.0,1.401298464324817e-45]' in said
    for value in (float("inf"), float("-inf")):
        with pytest.raises(InvalidInput, match="binary_data"):
            v2.encode([Part("O", struct.pack("<f", value), "FP32", (1,))], request, "m", "1")
    request.binary = True
    data = struct.pack("<f", float("inf"))
    assert v2.encode([Part("O", data, "FP32", (1,))], request, "m", "1").tensors == (data,)


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        [4294967296, 4294967296],
        [2**63 - 1, 2],
        [2**40, 3],
        [-1],
        [-1, -1],
        [2, -3],
        [2.0],
        ["2"],
        [True],
        None,
        [1] * 10_000,
        [1] * 33,
        [2**64],
        "2",
        {},
    ],
)
def test_an_odd_shape_is_refused(shape: Any) -> None:
    refusal({"inputs": [tensor([], "FP32", shape)]})
    binary = {
        "inputs": [
            {
                "name": "X",
                "datatype": "FP32",
                "shape": shape,
                "parameters": {"binary_data_size": 0},
            }
        ]
    }
    refusal(binary)


def test_a_shape_that_would_explode_tells_its_features() -> None:
    with pytest.raises(ShapeRefused) as caught:
        decode({"inputs": [tensor([], "FP32", [2**32, 2**32])]})
    assert caught.value.fields["shape"] == "4294967296x4294967296"
    assert caught.value.fields["limit"] == LIMIT
    assert str(2**66) in str(caught.value)


def test_a_request_must_look_as_declared() -> None:
    inputs = [spec("FP32", (3, -1))]
    one([0.0] * 6, "FP32", [1, 3, 2], inputs=inputs)
    for bad in (
        tensor([0.0] * 6, "FP32", [1, 2, 3]),
        tensor([0.0] * 6, "FP32", [2, 3]),
        tensor([0.0] * 6, "FP64", [1, 3, 2]),
        tensor([0.0] * 6, "fp32", [1, 3, 2]),
        tensor([0.0] * 6, "FLOAT", [1, 3, 2]),
        tensor([0.0] * 6, "FP32", [1, 3, 2], "Y"),
    ):
        refusal({"inputs": [bad]}, inputs=inputs)
    refusal({"inputs": []}, inputs=inputs)
    refusal(
        {"inputs": [tensor([1], "INT8", [1], "A"), tensor([1], "INT8", [1], "A")]},
    )
    two = [spec("INT8", (), "A"), spec("INT8", (), "B")]
    assert "'B'" in refusal({"inputs": [tensor([1], "INT8", [1], "A")]}, inputs=two)
    assert "rows" in refusal(
        {"inputs": [tensor([1], "INT8", [1], "A"), tensor([1, 2], "INT8", [2], "B")]}, inputs=two
    )
    assert "no output" in refusal(
        {"inputs": [tensor([1], "INT8", [1])], "outputs": [{"name": "Z"}]}, outputs=two
    )
    assert "twice" in refusal(
        {"inputs": [tensor([1], "INT8", [1])], "outputs": [{"name": "A"}, {"name": "A"}]}
    )

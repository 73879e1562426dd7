"""The v2 codec: where JSON ends and tensors begin, and bodies that are neither."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.proxy import v2
from gpusup.proxy.datatypes import SIZES
from gpusup.proxy.errors import InvalidInput, ProxyError
from gpusup.worker.wire import Part, TensorSpec

from .test_v2 import decode, refusal, spec, tensor

# -- framing and JSON -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["x", "-1", "+1", "99", "1_0", " 1", "", "²", "9" * 30])
def test_an_odd_header_length_is_refused(length: str) -> None:
    with pytest.raises(InvalidInput, match="Inference-Header-Content-Length"):
        v2.decode(b"{}", length)


def test_too_few_and_too_many_bytes_are_refused() -> None:
    document = {
        "inputs": [
            {"name": "X", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}}
        ]
    }
    decode(document, bytes(4))
    refusal(document, bytes(3))
    refusal(document, bytes(5))
    refusal(document)  # no header length: the JSON is the whole body
    document["inputs"][0]["parameters"] = {"binary_data_size": 6}
    refusal(document, bytes(6))
    document["inputs"][0]["data"] = [0, 0]
    refusal(document, bytes(6))


@pytest.mark.parametrize("size", [-1, 1.5, "4", True, 2**70])
def test_an_odd_binary_size_is_refused(size: Any) -> None:
    refusal({"inputs": [tensor(None, "INT8", [1], parameters={"binary_data_size": size})]}, b"1")


def test_a_string_length_beyond_the_body_allocates_nothing() -> None:
    data = struct.pack("<I", 1_150_092_980) + b"x" * 96
    document = {
        "inputs": [
            {
                "name": "X",
                "datatype": "BYTES",
                "shape": [1],
                "parameters": {"binary_data_size": len(data)},
            }
        ]
    }
    assert "announces 1150092980 bytes, 96 are there" in refusal(document, data)
    document["inputs"][0]["shape"] = [2]
    refusal(document, b"\1\0\0\0x" + data[:95])
    document["inputs"][0]["shape"] = [2**20 + 1]
    refusal(document, data)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b'{"inputs": 3}',
        b'{"inputs": [{"name": "\xff"}]}',
        b"[" * 100_000,
        b'{"ignored": ' + b"[" * 5000 + b"]" * 5000 + b', "inputs": []}',
        b'{"inputs":[{"name":"X","shape":[1],"datatype":"INT8"}]}',
        b'{"inputs":[{"name":"X","shape":[1],"datatype":"INT8","data":'
        + b"[" * 60
        + b"1"
        + b"]" * 60
        + b"}]}",
        b'{"inputs":[{"name":"\\ud800","shape":[1],"datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"X","shape":[1],"datatype":"BYTES","data":["\\udfff"]}]}',
    ],
)
def test_broken_json_is_refused(body: bytes) -> None:
    refusal(body)


@pytest.mark.parametrize("priority", [-1, 2**40, 2.0, "high", True, None])
def test_an_odd_priority_is_refused(priority: Any) -> None:
    document = {"inputs": [tensor([1], "INT8", [1])], "parameters": {"priority": priority}}
    assert "priority" in refusal(document)


@pytest.mark.parametrize(
    "parameters",
    [
        {"timeout": -1},
        {"timeout": 1.5},
        {"timeout": True},
        {"binary_data_output": 1},
        {"x": 2**64},
        {"x": {"y": [-(2**63) - 1]}},
        {"x": "y" * 70_000},
        3,
    ],
)
def test_odd_parameters_are_refused(parameters: Any) -> None:
    refusal({"inputs": [tensor([1], "INT8", [1])], "parameters": parameters})


def test_what_is_not_supported_says_so() -> None:
    refusal(
        {"inputs": [tensor(None, "INT8", [1], parameters={"shared_memory_region": "r"})]},
    )
    assert "classification" in refusal(
        {
            "inputs": [tensor([1], "INT8", [1])],
            "outputs": [{"name": "O", "parameters": {"classification": 3}}],
        }
    )


def test_an_output_the_model_did_not_give_is_no_crash() -> None:
    request = v2.InferRequest(parts=(), rows=1, outputs=(v2.Wanted("Z", None),))
    with pytest.raises(InvalidInput, match="gave no output 'Z'"):
        v2.encode([Part("O", b"\1", "UINT8", (1,))], request, "m", "1")


def test_an_opaque_answer_becomes_one_string() -> None:
    request = v2.InferRequest(parts=(), rows=1)
    part = Part("body", b'{"class":1}', content_type="application/json")
    said = json.loads(v2.encode([part], request, "m", "1").json)["outputs"]
    assert said == [{"name": "body", "datatype": "BYTES", "shape": [1], "data": ['{"class":1}']}]


# -- anything at all ------------------------------------------------------------------------------

NAMES = st.sampled_from(["X", "Y", "", "é"])
DATATYPES = st.sampled_from([*SIZES, "BYTES", "fp32", "", "FP99"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)
SHAPES = st.lists(st.integers(-1, 5) | st.integers(), max_size=4) | VALUES
PARAMETERS = st.dictionaries(
    st.sampled_from(
        ["binary_data_size", "binary_data", "binary_data_output", "priority", "timeout", "k"]
    ),
    st.integers(0, 40) | VALUES,
    max_size=3,
)
TENSORS = st.fixed_dictionaries(
    {"name": NAMES, "datatype": DATATYPES, "shape": SHAPES},
    optional={"data": VALUES | st.lists(LEAVES, max_size=6), "parameters": PARAMETERS},
)
DOCUMENTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS | VALUES, max_size=3)},
    optional={
        "id": st.text(max_size=4) | VALUES,
        "parameters": PARAMETERS | VALUES,
        "outputs": st.lists(
            st.fixed_dictionaries({"name": NAMES}, optional={"parameters": PARAMETERS}), max_size=2
        )
        | VALUES,
    },
)
LENGTHS = st.none() | st.integers(0, 400).map(str) | st.text(max_size=5)
SPECS = st.sampled_from(
    [[], [spec("FP32", (-1,))], [spec("BYTES", (1,))], [spec("BOOL", ()), spec("INT8", (2,), "Y")]]
)


def survives(body: bytes, length: str | None, specs: list[TensorSpec]) -> None:
    refused: ProxyError | None = None
    try:
        request = v2.decode(body, length, inputs=specs, limit=4096)
        for binary in (True, False):
            request.binary = binary
            v2.encode(request.parts, request, "m", "1")
    except ProxyError as error:
        refused = error
    if refused is not None:
        assert refused.status in (400, 413)
        assert len(str(refused)) < 1000
        refused.body("id")


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200), length=LENGTHS, specs=SPECS)
def test_any_bytes_are_decoded_or_refused(
    body: bytes, length: str | None, specs: list[TensorSpec]
) -> None:
    survives(body, length, specs)


@settings(max_examples=400, deadline=None)
@given(document=DOCUMENTS, tail=st.binary(max_size=40), exact=st.booleans(), specs=SPECS)
def test_any_document_is_decoded_or_refused(
    document: Any, tail: bytes, exact: bool, specs: list[TensorSpec]
) -> None:
    text = json.dumps(document).encode()
    survives(text + tail, str(len(text)) if exact else None, specs)


def test_the_inputs_are_counted() -> None:
    def document(count: int) -> dict[str, Any]:
        inputs = [
            {"name": f"i{n}", "shape": [1], "datatype": "UINT8", "data": [n % 256]}
            for n in range(count)
        ]
        return {"inputs": inputs}

    assert len(decode(document(v2.MOST_INPUTS)).parts) == v2.MOST_INPUTS
    with pytest.raises(InvalidInput, match="257 inputs, 256 are allowed"):
        decode(document(v2.MOST_INPUTS + 1))
    declared = [TensorSpec(name=f"i{n}", datatype="UINT8", shape=()) for n in range(300)]
    assert len(decode(document(300), inputs=declared).parts) == 300

"""Raw bodies in every form, and answers in the form asked for."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.proxy import accept, npy, raw_codec
from gpusup.proxy.datatypes import NUMPY
from gpusup.proxy.errors import InputTooLarge, InvalidInput, NotAcceptable, ProxyError
from gpusup.worker.wire import Part, TensorSpec

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
BOMB = PNG[:16] + (12_000).to_bytes(4, "big") * 2 + PNG[24:]


def decode(body: bytes, content_type: str | None = None, **options: Any) -> raw_codec.RawRequest:
    return raw_codec.decode(
        body,
        content_type,
        cut=lambda start, end: body[start:end],
        limit=2**20,
        pixels=10**6,
        **options,
    )


def saved(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def spec(datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name="X", datatype=datatype, shape=shape)


# -- in -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        (None, "application/octet-stream"),
        ("image/png", "image/png"),
        ("Image/PNG; x=y", "image/png"),
        ("application/x-www-form-urlencoded", "application/octet-stream"),
    ],
)
def test_bytes_are_one_opaque_input(content_type: str | None, kind: str) -> None:
    assert decode(PNG, content_type).parts == (Part("body", PNG, content_type=kind),)


def test_json_goes_as_it_is_even_where_curl_calls_it_a_form() -> None:
    for content_type in (
        "application/json",
        "application/json; charset=utf-8",
        "application/x-www-form-urlencoded",
        "application/vnd.x+json",
    ):
        (part,) = decode(b'{"x": 1}', content_type).parts
        assert (part.data, part.content_type) == (b'{"x": 1}', "application/json")
    (part,) = decode(b"{a=b", "application/x-www-form-urlencoded").parts
    assert part.content_type == "application/octet-stream"


def test_base64_in_json_becomes_bytes() -> None:
    text = base64.b64encode(PNG).decode()
    (part,) = decode(json.dumps({"b64": text}).encode(), "application/json").parts
    assert part.data == PNG
    body = {"image": {"b64": f"data:image/png;base64,{text}", "content_type": "image/png"}, "k": 5}
    image, k = decode(json.dumps(body).encode(), "application/json").parts
    assert (image.name, image.data, image.content_type) == ("image", PNG, "image/png")
    assert (k.name, k.data, k.content_type) == ("k", b"5", "application/json")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[" * 100_000,
        b'{"b64": "%%%"}',
        b'{"b64": 3}',
        b'{"b64": "' + b"A" * 50_001 + b'"}',
        b'{"b64": "\xc3\xa9"}',
        b'[{"b64": "AA=="}]',
        b'{"image": {"b64": "AA==", "unknown": 1}}',
        b'{"x": NaN}',
    ],
)
def test_broken_json_and_base64_are_refused_in_one_short_line(body: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(body, "application/json")
    assert len(str(caught.value)) < 400


def test_a_bomb_is_refused_in_each_form() -> None:
    for body, content_type in (
        (BOMB, "image/png"),
        (BOMB, None),
        (json.dumps({"b64": base64.b64encode(BOMB).decode()}).encode(), "application/json"),
    ):
        with pytest.raises(InputTooLarge, match="144000000 pixels, 1000000 are allowed"):
            decode(body, content_type)


def test_pickles_are_never_taken() -> None:
    with pytest.raises(ProxyError, match="not taken"):
        decode(b"\x80\x04N.", "application/x-pickle")
    objects = io.BytesIO()
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInput):
        decode(objects.getvalue(), "application/x-npy")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype="<f8").reshape(2, 3)),
        np.arange(6, dtype=">i4").reshape(3, 2),
        np.array([True, False]),
        np.arange(3, dtype="u1"),
        np.zeros((0, 3), "f2"),
        np.float32(3.5),
        np.asfortranarray(np.arange(24, dtype=">f4").reshape(2, 3, 4)),
    ],
)
def test_npy_arrays_are_read_in_any_order(array: Any) -> None:
    (part,) = decode(saved(array), "application/x-npy").parts
    assert isinstance(part.data, bytes)
    dtype = NUMPY[part.datatype]
    got = np.frombuffer(part.data, dtype).reshape(part.shape)
    np.testing.assert_array_equal(got.reshape(np.shape(array)), array)


def test_an_array_of_one_item_gets_its_row() -> None:
    one = decode(saved(np.zeros((2, 3), "f4")), "application/x-npy", inputs=[spec("FP32", 2, 3)])
    assert (one.parts[0].shape, one.rows, one.lead, one.parts[0].name) == ((1, 2, 3), 1, True, "X")
    many = decode(
        saved(np.zeros((5, 2, 3), "f4")), "application/x-npy", inputs=[spec("FP32", 2, -1)]
    )
    assert (many.parts[0].shape, many.rows, many.lead) == ((5, 2, 3), 5, False)
    for bad in (np.zeros((4, 3), "f4"), np.zeros((2, 3), "f8"), np.zeros(3, "f4")):
        with pytest.raises(InvalidInput):
            decode(saved(bad), "application/x-npy", inputs=[spec("FP32", 2, 3)])


def header(text: bytes, data: bytes = b"") -> bytes:
    return npy.MAGIC + b"\1\0" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00\x10\x00",
        saved(np.zeros(4))[:-1],
        saved(np.zeros(4)) + b"x",
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 100 + b"), }"),
        header(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", b"1234"),
        header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"12345678"),
        header(b"{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }", b"12345678"),
        header(b"__import__('os').system('true')"),
        npy.MAGIC + b"\1\0\xff\xff{}",
    ],
)
def test_a_broken_npy_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(body, "application/x-npy")


@settings(max_examples=300, deadline=None)
@given(
    body=st.binary(max_size=150),
    kind=st.sampled_from(["application/json", "application/x-npy", "image/png", None]),
    start=st.sampled_from([b"", b'{"b64":"', npy.MAGIC + b"\1\0\x40\0", b"{", b"\xff\xd8\xff"]),
)
def test_any_bytes_are_taken_or_refused(body: bytes, kind: str | None, start: bytes) -> None:
    refused: ProxyError | None = None
    try:
        decode(start + body, kind)
    except ProxyError as error:
        refused = error
    assert refused is None or refused.status in (400, 413, 415)


# -- out ------------------------------------------------------------------------------------------

SCORES = Part("scores", np.array([[1, 2.5]], "<f4").tobytes(), "FP32", (1, 2))
CLASS = Part("body", b'{"class":3}', content_type="application/json")
LIST = Part("body", b"[[1.0,2.5]]", content_type="application/json")


def test_json_is_the_default() -> None:
    for wanted in (None, "*/*", "application/json", "text/html, */*;q=0.1"):
        assert raw_codec.encode([CLASS], wanted).body == b'{"class":3}'
        answer = raw_codec.encode([SCORES], wanted)
        assert (answer.body, answer.content_type) == (
            b'{"scores":[[1.0,2.5]]}',
            "application/json",
        )
        assert answer.varies


def test_a_tensor_comes_as_npy_or_bytes_where_asked() -> None:
    for parts in ([SCORES], [LIST]):
        answer = raw_codec.encode(parts, "application/x-npy")
        assert answer.content_type == "application/x-npy"
        loaded = np.load(io.BytesIO(answer.body), allow_pickle=False)
        assert loaded.tolist() == [[1.0, 2.5]]
    answer = raw_codec.encode([SCORES], "application/octet-stream")
    assert answer.body == SCORES.data
    lead = raw_codec.encode([SCORES], "application/x-npy", lead=True)
    assert np.load(io.BytesIO(lead.body)).shape == (2,)
    assert raw_codec.encode([SCORES], None, lead=True).body == b'{"scores":[1.0,2.5]}'


def test_an_image_comes_as_an_image() -> None:
    image = Part("body", PNG, content_type="image/png")
    for wanted in (None, "image/*", "image/png", "image/webp, image/png;q=0.5"):
        assert raw_codec.encode([image], wanted).content_type == "image/png"
    with pytest.raises(NotAcceptable):
        raw_codec.encode([image], "application/json")


def test_nothing_acceptable_is_406() -> None:
    for parts, wanted in (
        ([CLASS], "image/png"),
        ([CLASS], "application/x-npy"),
        ([SCORES], "text/html"),
        ([SCORES, SCORES], "application/x-npy"),
        ([SCORES], "application/json;q=0"),
    ):
        with pytest.raises(NotAcceptable):
            raw_codec.encode(parts, wanted)


def test_several_outputs_are_an_object() -> None:
    label = Part("label", b"\3\0\0\0cat", "BYTES", (1,))
    picture = Part("picture", b"\xff", content_type="image/png")
    said = json.loads(raw_codec.encode([SCORES, label, CLASS, picture], None).body)
    assert said == {
        "scores": [[1.0, 2.5]],
        "label": ["cat"],
        "body": {"class": 3},
        "picture": {"b64": "/w==", "content_type": "image/png"},
    }


def test_npy_is_written_as_numpy_reads_it() -> None:
    for datatype, dtype in NUMPY.items():
        array = np.zeros((2, 1), dtype)
        got = np.load(io.BytesIO(npy.write(datatype, (2, 1), array.tobytes())), allow_pickle=False)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
    bf16 = np.load(io.BytesIO(npy.write("BF16", (1,), b"\x80\x3f")))
    assert bf16.tolist() == [1.0]
    strings = np.load(io.BytesIO(npy.write("BYTES", (2,), b"\2\0\0\0hi\0\0\0\0")))
    assert strings.tolist() == [b"hi", b""]
    with pytest.raises(NotAcceptable):
        npy.write("BYTES", (1,), b"\1\0\0\0\0")


def test_the_most_specific_range_counts() -> None:
    assert accept.rank("application/*;q=0.3, application/json;q=0.8", "application/json") == 0.8
    assert accept.rank("*/*;q=0.1, image/*", "image/png") == 1.0
    assert accept.choose("garbage", ["a/b", "c/d"]) == "a/b"
    assert accept.choose("c/d, a/b;q=0.9", ["a/b", "c/d"]) == "c/d"
    assert accept.wants_events("text/event-stream")
    assert not accept.wants_events("*/*")
    assert not accept.wants_events(None)


def test_fields_and_their_names_are_bounded() -> None:
    """What is no bulk travels inside a frame, and a frame has a limit."""
    more = {f"f{n}": n for n in range(255)}
    body = {"image": {"b64": "QQ=="}, **more}
    assert len(decode(json.dumps(body).encode(), "application/json").parts) == 256
    body["last"] = {}
    with pytest.raises(InvalidInput, match="257 fields, 256 are allowed"):
        decode(json.dumps(body).encode(), "application/json")
    long = "n" * 20_000
    for said in (
        {long: 1, "image": {"b64": "QQ=="}},
        {"b64": "QQ==", "content_type": long},
        {"image": {"b64": "QQ==", "filename": long}},
    ):
        with pytest.raises(InvalidInput, match=r"have 200\d\d characters, 16384 are allowed"):
            decode(json.dumps(said).encode(), "application/json")

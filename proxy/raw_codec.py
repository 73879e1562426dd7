"""Raw requests: opaque bytes, JSON with base64 in it, .npy; and the answer in the form asked for.

A JSON object's values of the form {"b64": "..."} are inputs of bytes; an object that is nothing
but that is one opaque body. All other JSON goes to the model as it is. A form's content type is
what bare `curl -d` claims for everything, so it is not believed: JSON is taken for JSON, the rest
for bytes.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from gpusup.worker.wire import Block, Part, TensorSpec

from . import accept, images, npy
from .datatypes import NUMPY, to_values
from .errors import InvalidInput, NotAcceptable, UnsupportedMedia
from .jsoncheck import DEPTH, check, parse
from .multipart import MOST_FIELDS
from .v2 import Cut
from .v2_checks import check_declared

JSON: Final = "application/json"
NPY: Final = "application/x-npy"
OCTETS: Final = "application/octet-stream"
FORM: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"

#: Characters of a field's name, type and filename together: they travel inside a frame.
_HEAD_LIMIT: Final = 16 * 1024

#: Name of the part that is a whole body.
BODY: Final = "body"

_NPY_TYPES: Final = (NPY, "application/npy", "application/x-numpy")
_REFUSED: Final = ("application/x-pickle", "application/pickle", "application/python-pickle",
                   "application/x-python-pickle", "application/zip")  # fmt: skip
_raw: Final = msgspec.json.Decoder(msgspec.Raw)
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any: Final = msgspec.json.Decoder()
_encode: Final = msgspec.json.Encoder().encode


class _Base64(msgspec.Struct, forbid_unknown_fields=True):
    b64: str
    content_type: str = ""
    filename: str = ""


_base64: Final = msgspec.json.Decoder(_Base64)


@dataclass(slots=True, kw_only=True)
class RawRequest:
    """`lead`: one row was put in front of the client's array; it is taken off the answer again."""

    parts: tuple[Part, ...]
    rows: int = 1
    lead: bool = False


@lru_cache(maxsize=256)
def media_type(header: str | None) -> str:
    """Lower case, without parameters; octet-stream if there is none."""
    if not header:
        return OCTETS
    return header.partition(";")[0].strip().lower() or OCTETS


def is_read(kind: str) -> bool:
    """Whether a body of that media type is read here; any other goes to the model as it is."""
    return kind in (JSON, FORM) or kind.endswith("+json") or kind in (*_NPY_TYPES, *_REFUSED)


def decode(
    body: bytes | memoryview,
    content_type: str | None,
    *,
    inputs: Sequence[TensorSpec] = (),
    cut: Cut,
    limit: int,
    depth: int = DEPTH,
    pixels: int = 2**62,
) -> RawRequest:
    """Anything but multipart. Raises InvalidInput, InputTooLarge, UnsupportedMedia."""
    if content_type == JSON and type(body) is bytes:  # the usual one
        return _json(body, depth, pixels)
    kind = media_type(content_type)
    if kind == JSON or kind.endswith("+json"):
        return _json(bytes(body), depth, pixels)
    if kind in _NPY_TYPES:
        return _npy(body, inputs, cut, limit)
    if kind in _REFUSED:
        raise UnsupportedMedia(f"{kind} is not taken; send .npy, JSON or the file itself")
    if kind == FORM:
        if bytes(body[:1]) in (b"{", b"["):
            text = bytes(body)
            if _is_json(text):
                return _json(text, depth, pixels)
        kind = OCTETS
    images.check(body, pixels)
    return RawRequest(parts=(Part(BODY, cut(0, len(body)), content_type=kind),))


def _is_json(text: bytes) -> bool:
    try:
        _raw.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _json(text: bytes, depth: int, pixels: int) -> RawRequest:
    check(text, depth=depth)
    if b'"b64"' not in text:
        parse(text, _raw)  # only that it is JSON; the model reads it
        return RawRequest(parts=(Part(BODY, text, content_type=JSON),))
    if text.lstrip()[:1] != b"{":
        raise InvalidInput('{"b64": ...} is understood in an object, not in a list')
    fields = parse(text, _object)
    if "b64" in fields:
        return RawRequest(parts=(_binary(parse(text, _base64), BODY, pixels),))
    if len(fields) > MOST_FIELDS:
        raise InvalidInput(f"the request has {len(fields)} fields, {MOST_FIELDS} are allowed")
    parts = []
    for name, raw in fields.items():
        _check_head(name)
        value = bytes(raw)
        if value.startswith(b"{") and b'"b64"' in value:
            found = parse(value, _base64, f"field {name[:80]!r}")
            parts.append(_binary(found, name, pixels))
        else:
            parts.append(Part(name, value, content_type=JSON))
    return RawRequest(parts=tuple(parts))


def _check_head(name: str, *more: str) -> None:
    if (size := len(name) + sum(map(len, more))) > _HEAD_LIMIT:
        raise InvalidInput(
            f"the name, type and filename of field {name[:80]!r} have {size} characters, "
            f"{_HEAD_LIMIT} are allowed"
        )


def _binary(found: _Base64, name: str, pixels: int) -> Part:
    _check_head(name, found.content_type, found.filename)
    text = found.b64
    if text.startswith("data:"):  # a browser's data: URL
        text = text.partition(",")[2]
    try:
        data = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        said = "it has characters that are none of base64's"
        why = said if isinstance(error, UnicodeEncodeError) else str(error)
        raise InvalidInput(f"field {name[:80]!r} is not base64: {why}") from None
    images.check(data, pixels, name)
    return Part(name, data, content_type=found.content_type or OCTETS, filename=found.filename)


def _npy(
    body: bytes | memoryview, inputs: Sequence[TensorSpec], cut: Cut, limit: int
) -> RawRequest:
    array = npy.read(body, limit)
    if len(inputs) > 1:
        raise InvalidInput(
            f"an .npy body is one input, the model has {len(inputs)}; use v2 or multipart"
        )
    shape, lead = array.shape, False
    name = inputs[0].name if inputs else BODY
    if (inputs and len(shape) == len(inputs[0].shape)) or not shape:
        shape, lead = (1, *shape), True
    if inputs:
        check_declared(name, array.datatype, shape, {name: inputs[0]}, 1)
    data: bytes | Block
    data = cut(array.start, len(body)) if array.plain else npy.convert(body, array)
    return RawRequest(parts=(Part(name, data, array.datatype, shape),), rows=shape[0], lead=lead)


def field(name: str, data: bytes | Block, content_type: str, filename: str) -> Part:
    """One field of a form. Without a type, a named file is bytes and a plain field is text."""
    kind = content_type.partition(";")[0].strip().lower()
    return Part(
        name,
        data,
        content_type=kind or (OCTETS if filename else "text/plain"),
        filename=filename,
    )


@dataclass(slots=True)
class RawAnswer:
    body: bytes
    content_type: str
    varies: bool  # by Accept


def encode(parts: Sequence[Part], wanted: str | None, *, lead: bool = False) -> RawAnswer:
    """The model's answer in the form that Accept (`wanted`) asks for.

    Raises NotAcceptable, and InvalidInput where JSON can't carry a tensor.
    """
    if len(parts) == 1:
        (part,) = parts
        data = part.data
        assert not isinstance(data, Block)
        if part.datatype:
            return _tensor(part, data, wanted, lead)
        native = part.content_type or OCTETS
        if native != JSON:
            return RawAnswer(data, accept.choose(wanted, (native,)), varies=False)
        if wanted is None or wanted == "*/*" or accept.rank(wanted, JSON) > 0:
            return RawAnswer(data, JSON, varies=True)
        form = accept.choose(wanted, (JSON, NPY, OCTETS))
        datatype, shape, data = _array_of(data)
        return RawAnswer(
            npy.write(datatype, shape, data) if form == NPY else data, form, varies=True
        )
    form = accept.choose(wanted, (JSON,))
    return RawAnswer(_encode({part.name: _value(part, lead) for part in parts}), form, False)


def _tensor(part: Part, data: bytes, wanted: str | None, lead: bool) -> RawAnswer:
    form = accept.choose(wanted, (JSON, NPY, OCTETS))
    shape = part.shape[1:] if lead and part.shape[:1] == (1,) else part.shape
    if form == OCTETS:
        return RawAnswer(data, form, varies=True)
    if form == NPY:
        return RawAnswer(npy.write(part.datatype, shape, data), form, varies=True)
    return RawAnswer(_encode({part.name: _value(part, lead)}), form, varies=True)


def _value(part: Part, lead: bool) -> Any:
    assert not isinstance(part.data, Block)
    if not part.datatype:
        if part.content_type == JSON:
            return msgspec.Raw(part.data)
        return {"b64": binascii.b2a_base64(part.data, newline=False).decode(),
                "content_type": part.content_type or OCTETS}  # fmt: skip
    values = to_values(part.data, part.datatype, part.name)
    shape = part.shape[1:] if lead and part.shape[:1] == (1,) else part.shape
    for size in reversed(shape[1:]):
        if size == 0:
            return np.empty(shape).tolist()
        values = [values[i : i + size] for i in range(0, len(values), size)]
    return values if shape else values[0]


def _array_of(text: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """A JSON answer that is numbers in lists of equal length, as a tensor."""
    try:
        array = np.asarray(_any.decode(text))
        if array.dtype.kind not in "bif":
            raise ValueError
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise NotAcceptable("this answer is no array and can only be application/json") from None
    datatype = {"b": "BOOL", "i": "INT64", "f": "FP64"}[array.dtype.kind]
    return datatype, array.shape, array.astype(NUMPY[datatype]).tobytes()

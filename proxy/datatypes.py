"""The Open Inference Protocol's datatypes: sizes, and the way between JSON values and bytes.

Little-endian and row-major everywhere. Nothing is changed silently: a value that does not fit its
datatype is refused with its index. FP16 and BF16 may travel as JSON numbers: widened exactly on
the way out, rounded to nearest on the way in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from .errors import InputTooLarge, InvalidInput
from .jsoncheck import MAX_VALUES, parse

#: Bytes of one element; BYTES elements vary.
SIZES: Final = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2,
    "INT32": 4, "INT64": 8, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
DATATYPES: Final = frozenset(SIZES) | {"BYTES"}

#: numpy's names, where numpy has the type.
NUMPY: Final = {
    "BOOL": "|b1", "UINT8": "|u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "INT8": "|i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip

#: Elements of one BYTES tensor: each costs a step of ours, and four bytes of the client's.
MAX_STRINGS: Final = 2**20
MAX_DIMENSIONS: Final = 32

_FORMATS: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b",
    "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
_RANGES: Final = {
    name: (0, 2**bits - 1) if name[0] == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for name, bits in ((n, 8 * s) for n, s in SIZES.items() if "INT" in n)
}
_BF16_MAX: Final = 3.3895313892515355e38

_floats: Final = msgspec.json.Decoder(list[float])
_ints: Final = msgspec.json.Decoder(list[int])
_bools: Final = msgspec.json.Decoder(list[bool])
_strings: Final = msgspec.json.Decoder(list[str])
_any: Final = msgspec.json.Decoder()
_FLAT: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    **{name: _ints for name in _RANGES},
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), _floats),
    "BOOL": _bools,
    "BYTES": _strings,
}
_KIND: Final = {
    **dict.fromkeys(_RANGES, ("an integer", frozenset({int}))),
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), ("a number", frozenset({int, float}))),
    "BOOL": ("true or false", frozenset({bool})),
    "BYTES": ("a string", frozenset({str})),
}


def elements(shape: Sequence[int]) -> int:
    """How many elements; Python integers, so that nothing wraps round."""
    count = 1
    for dimension in shape:
        count *= dimension
    return count


def parse_json(raw: bytes, datatype: str, shape: Sequence[int], name: str) -> bytes:
    """A tensor's JSON `data`, flat or nested as `shape` says, to bytes.

    Raises InvalidInput, InputTooLarge.
    """
    count = elements(shape)
    if count > MAX_VALUES:
        raise InputTooLarge(
            f"input {name!r} has {count} elements as JSON, {MAX_VALUES} are allowed; "
            "send it as binary data"
        )
    try:
        values: list[Any] = _FLAT[datatype].decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        values = _flatten(parse(raw, _any, f"data of input {name!r}"), datatype, shape, name)
    if len(values) != count:
        raise InvalidInput(
            f"data of input {name!r} has {len(values)} values, its shape {list(shape)} "
            f"wants {count}"
        )
    return pack(values, datatype, name)


def pack(values: list[Any], datatype: str, name: str) -> bytes:
    """Values of the right kind to bytes. Raises InvalidInput that names the index of a bad one."""
    if datatype == "BYTES":
        if len(values) > MAX_STRINGS:
            raise InputTooLarge(
                f"input {name!r} has {len(values)} BYTES elements, {MAX_STRINGS} are allowed"
            )
        pieces = []
        for value in values:
            encoded = value.encode()
            pieces.append(len(encoded).to_bytes(4, "little"))
            pieces.append(encoded)
        return b"".join(pieces)
    if datatype == "BF16":
        return _pack_bf16(values, name)
    try:
        return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    except (struct.error, OverflowError):
        raise _misfit(values, datatype, name) from None


def _pack_bf16(values: list[Any], name: str) -> bytes:
    if values and max(map(abs, values)) > _BF16_MAX:
        raise _misfit(values, "BF16", name)
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return rounded.astype("<u2").tobytes()


def _misfit(values: list[Any], datatype: str, name: str) -> InvalidInput:
    low, high = _RANGES.get(datatype, (0, 0))
    for index, value in enumerate(values):
        if datatype in _RANGES:
            fits = low <= value <= high
        elif datatype == "BF16":
            fits = abs(value) <= _BF16_MAX
        else:
            try:
                struct.pack("<" + _FORMATS[datatype], value)
                fits = True
            except (struct.error, OverflowError):
                fits = False
        if not fits:
            limits = f" ({low} to {high})" if datatype in _RANGES else ""
            return InvalidInput(
                f"value {index} of input {name!r} is {say(value)}, "
                f"which does not fit into {datatype}{limits}"
            )
    return InvalidInput(f"data of input {name!r} does not fit into {datatype}")


def say(value: Any) -> str:
    """A value for an error's text, cut short."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _flatten(data: Any, datatype: str, shape: Sequence[int], name: str) -> list[Any]:
    """Nested lists to one list; each level must be as long as `shape` says, or all be flat."""
    what, kinds = _KIND[datatype]
    if not isinstance(data, list):
        if not shape and type(data) in kinds:
            return [data]
        raise InvalidInput(f"data of input {name!r} is {say(data)} and not a list")
    level: list[Any] = data
    if data and isinstance(data[0], list):
        if len(data) != (shape[0] if shape else 1):
            raise _ragged(name, shape, 0, len(data))
        for axis in range(1, len(shape)):
            deeper: list[Any] = []
            for part in level:
                if type(part) is not list or len(part) != shape[axis]:
                    raise _ragged(name, shape, axis, len(part) if type(part) is list else None)
                deeper += part
            level = deeper
    for index, value in enumerate(level):
        if type(value) not in kinds:
            raise InvalidInput(
                f"value {index} of input {name!r} is {say(value)}, {datatype} wants {what}"
            )
    return level


def _ragged(name: str, shape: Sequence[int], axis: int, got: int | None) -> InvalidInput:
    have = "a single value" if got is None else f"{got} entries"
    return InvalidInput(
        f"data of input {name!r} has {have} along dimension {axis}, "
        f"its shape {list(shape)} wants {shape[axis] if shape else 1}"
    )


def check_binary(data: bytes | memoryview, datatype: str, shape: Sequence[int], name: str) -> None:
    """Raises InvalidInput unless `data` is a tensor of that datatype and shape."""
    count = elements(shape)
    if datatype == "BYTES":
        _check_strings(data, count, name)
        return
    if (want := count * SIZES[datatype]) != len(data):
        raise InvalidInput(
            f"input {name!r} has {len(data)} bytes, its shape {list(shape)} of {datatype} "
            f"wants {want}"
        )
    if datatype == "BOOL" and (bad := bytes(data).translate(None, b"\0\1")):
        raise InvalidInput(f"input {name!r} holds a byte {bad[0]}, BOOL wants 0 or 1")


def _check_strings(data: bytes | memoryview, count: int, name: str) -> None:
    if count > MAX_STRINGS:
        raise InvalidInput(f"input {name!r} has {count} BYTES elements, {MAX_STRINGS} are allowed")
    at, end = 0, len(data)
    if 4 * count > end:
        raise InvalidInput(
            f"input {name!r} has {end} bytes, {count} BYTES elements need at least {4 * count}"
        )
    for index in range(count):
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4 + length
        if at > end:
            raise InvalidInput(
                f"element {index} of input {name!r} announces {length} bytes, "
                f"{max(0, end - at + length)} are there"
            )
    if at != end:
        raise InvalidInput(f"input {name!r} has {end - at} bytes after its last element")


def split_strings(data: bytes | memoryview) -> list[bytes]:
    """The elements of a BYTES tensor. Raises ValueError where it is cut short."""
    found: list[bytes] = []
    at, end = 0, len(data)
    while at < end:
        length = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + length > end:
            raise ValueError(f"element {len(found)} is cut short")
        found.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def to_values(data: bytes | memoryview, datatype: str, name: str) -> list[Any]:
    """An output's bytes to JSON values. NaN stays NaN, which JSON writes as null.

    Raises InvalidInput where JSON can't say it: infinities, and BYTES that are no UTF-8.
    """
    if datatype == "BYTES":
        try:
            return [element.decode() for element in split_strings(data)]
        except UnicodeDecodeError:
            raise InvalidInput(
                f"output {name!r} holds bytes that are not UTF-8, which JSON can't carry; "
                'ask for it with "binary_data": true'
            ) from None
    values: list[Any]
    if datatype == "BF16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        values = wide.view(np.float32).tolist()
    else:
        count = len(data) // SIZES[datatype]
        values = list(struct.unpack(f"<{count}{_FORMATS[datatype]}", data))
    if "F" in datatype and (_INF in values or -_INF in values):
        raise InvalidInput(
            f"output {name!r} holds an infinity, which JSON can't carry; "
            'ask for it with "binary_data": true'
        )
    return values


_INF: Final = float("inf")

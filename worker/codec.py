"""Between what is on the wire (parts) and what a model sees (requests, tensors, rows).

Every size is checked with Python's integers: a product that wraps around would let an empty
body pass for a huge tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from . import wire
from .model import InvalidInput, Request, Response, Upload

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<I")


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def element_count(name: str, shape: Sequence[int]) -> int:
    """Raises InvalidInput on a negative dimension."""
    if any(side < 0 for side in shape):
        raise InvalidInput(f"tensor {name!r} has a negative dimension in {list(shape)}")
    return math.prod(shape)


def tensor_of(part: wire.Part, data: memoryview | bytes) -> Any:
    """The part as a tensor of its shape (rows first); BYTES as a numpy array of bytes objects.

    Writable memory is not copied: the tensor is a view of the arena. Raises InvalidInput.
    """
    count = element_count(part.name, part.shape)
    if part.datatype == "BYTES":
        return bytes_of(part.name, data, count).reshape(part.shape)
    dtype = DTYPES.get(part.datatype)
    if dtype is None:
        raise InvalidInput(f"tensor {part.name!r} has the unknown datatype {part.datatype!r}")
    size = count * dtype.itemsize
    if len(data) != size:
        raise InvalidInput(
            f"tensor {part.name!r} of shape {list(part.shape)} and {part.datatype} takes "
            f"{size} bytes, {len(data)} came"
        )
    return view_of(part.name, data, dtype, part.shape)


def view_of(
    name: str, data: memoryview | bytes, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """`data`, whose length is right, as a tensor. Raises InvalidInput on a BOOL above 1."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    # torch has no read-only tensors, so a view of `bytes` would let a model change them.
    source = bytearray(data) if isinstance(data, bytes) or data.readonly else data
    if dtype is torch.bool:
        raw = torch.frombuffer(source, dtype=torch.uint8)
        if int(raw.max()) > 1:
            raise InvalidInput(f"BOOL tensor {name!r} has a byte of {int(raw.max())}, not 0 or 1")
        return raw.view(torch.bool).reshape(tuple(shape))
    return torch.frombuffer(source, dtype=dtype).reshape(tuple(shape))


def bytes_of(name: str, data: memoryview | bytes, count: int) -> np.ndarray[Any, Any]:
    """`count` elements, each a 4-byte little-endian length and its bytes. Raises InvalidInput."""
    if count * 4 > len(data):
        raise InvalidInput(
            f"BYTES tensor {name!r} has {count} elements, which take at least {count * 4} bytes, "
            f"{len(data)} came"
        )
    elements = np.empty(count, dtype=object)
    at = 0
    for index in range(count):
        if at + 4 > len(data):
            raise InvalidInput(f"BYTES tensor {name!r} ends before element {index} of {count}")
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4
        if at + length > len(data):
            raise InvalidInput(
                f"element {index} of BYTES tensor {name!r} says {length} bytes, "
                f"{len(data) - at} are left"
            )
        elements[index] = bytes(data[at : at + length])
        at += length
    if at != len(data):
        raise InvalidInput(
            f"BYTES tensor {name!r} has {count} elements in {at} bytes, {len(data)} came"
        )
    return elements


def part_of(name: str, value: Any, datatype: str = "") -> wire.Part:
    """An output with its rows as a part; cast to the declared `datatype` if it has another one."""
    return sliced_part(name, *for_wire(name, value, datatype))


def for_wire(name: str, value: Any, datatype: str = "") -> tuple[str, np.ndarray[Any, Any]]:
    """The datatype's name, and an array of which any rows may be written by `sliced_part`."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        return "BYTES", value
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    wanted = DTYPES.get(datatype)
    if wanted is not None and tensor.dtype is not wanted:
        tensor = tensor.to(wanted)
    known = NAMES.get(tensor.dtype)
    if known is None:
        raise TypeError(f"output {name!r} is {tensor.dtype}, which has no name on the wire")
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)  # numpy knows no bfloat16
    return known, tensor.numpy()


def sliced_part(name: str, datatype: str, array: np.ndarray[Any, Any]) -> wire.Part:
    """`array`: what `for_wire` gave, or some of its rows."""
    if datatype == "BYTES":
        return _bytes_part(name, array)
    return wire.Part(name, array.tobytes(), datatype, array.shape)


def _bytes_part(name: str, value: np.ndarray[Any, Any]) -> wire.Part:
    chunks: list[bytes] = []
    for element in value.ravel():
        data = element.encode() if isinstance(element, str) else bytes(element)
        chunks += (_LENGTH.pack(len(data)), data)
    return wire.Part(name, b"".join(chunks), datatype="BYTES", shape=tuple(value.shape))


def request_of(item: wire.Item, data: Callable[[wire.Part], memoryview]) -> Request:
    """The request as the handler sees it. Raises InvalidInput on JSON that is none."""
    request = Request(item.request_id, item.params, degrade=item.degrade)
    parts = item.parts
    if len(parts) == 1 and not parts[0].datatype:  # the usual one
        (part,) = parts
        content = part.data if isinstance(part.data, bytes) else data(part)
        request.upload = upload = Upload(content, part.content_type, part.filename)
        request.fields = {part.name: upload}
        request.content_type = part.content_type
        if is_json(part.content_type):
            request.json = parse_json(upload.data)
        return request
    fields: dict[str, Upload] = {}
    tensors: dict[str, Any] = {}
    body: Upload | None = None
    for part in item.parts:
        if part.datatype:
            tensors[part.name] = array_of(tensor_of(part, data(part)))
            continue
        content = part.data if isinstance(part.data, bytes) else data(part)
        upload = Upload(content, part.content_type, part.filename)
        fields[part.name] = upload
        if body is None or (part.filename and not body.filename):
            body = upload
    request.fields = fields
    request.tensors = tensors
    if body is not None:
        request.upload = body
        request.content_type = body.content_type
        if is_json(body.content_type):
            request.json = parse_json(body.data)
    return request


def is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    if not content_type:
        return False
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def parse_json(data: bytes) -> Any:
    """Raises InvalidInput."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput("the body is not JSON: it is not UTF-8") from error
    except RecursionError as error:
        raise InvalidInput("the body is JSON nested too deeply") from error


def array_of(value: Any) -> np.ndarray[Any, Any]:
    """For handlers that read numpy arrays: BF16 comes as float32."""
    if isinstance(value, torch.Tensor):
        value = value.float() if value.dtype is torch.bfloat16 else value
        return value.numpy()  # type: ignore[no-any-return]
    return value  # type: ignore[no-any-return]


def encoded(value: Any) -> wire.Part:
    """What `encode` returned, as the answer's body.

    Raises ValueError if it is no JSON: NaN and infinities would both become null.
    """
    if isinstance(value, Response):
        return wire.Part("", bytes(value.data), content_type=value.content_type)
    if isinstance(value, bytes | bytearray | memoryview):
        return wire.Part("", bytes(value), content_type="application/octet-stream")
    try:
        data = msgspec.json.encode(value, enc_hook=_plain)
        # Only a non-finite number or None is written as null, and None is rare.
        if b"null" in data and has_non_finite(value):
            raise ValueError("the result has NaN or an infinity, which JSON can't hold")
    except RecursionError as error:
        raise ValueError("the result is nested too deeply for JSON") from error
    return wire.Part("", data, content_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} can't be written as JSON")


def has_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(has_non_finite(inner) for inner in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(has_non_finite(inner) for inner in value)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return has_non_finite(value.tolist())
    return False

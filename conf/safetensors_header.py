"""The header of a safetensors file: which tensors, how large, and whether the file is whole.

Nothing is loaded: 8 bytes give the header's length, the header gives every tensor's place. So a
truncated copy is found before anything is drained for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LENGTH_BYTES: Final = 8
#: What the format allows; a larger number means that this is some other kind of file.
MOST_HEADER_BYTES: Final = 100_000_000

_ITEM_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class BrokenWeights(ValueError):
    """The file is no safetensors file, or not all of one."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`start` and `end`: bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """`data_bytes`: of all tensors together, which is what they take on a device as they are."""

    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]
    data_bytes: int
    data_offset: int


def header_length(start: bytes, file_bytes: int, name: str = "file") -> int:
    """From the first 8 bytes. Raises BrokenWeights."""
    if len(start) < _LENGTH_BYTES:
        raise BrokenWeights(f"{name} has {file_bytes} bytes, too few for a safetensors file")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > MOST_HEADER_BYTES:
        raise BrokenWeights(f"{name} is no safetensors file: a header of {length} bytes")
    if _LENGTH_BYTES + length > file_bytes:
        raise BrokenWeights(
            f"{name} is incomplete: {file_bytes} bytes, its header alone needs "
            f"{_LENGTH_BYTES + length}"
        )
    return length


def parse_header(raw: bytes, file_bytes: int, name: str = "file") -> Header:
    """`raw`: the header without its length. Raises BrokenWeights that names what is wrong."""
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenWeights(f"{name} is no safetensors file: its header is no JSON") from error
    if not isinstance(table, dict):
        raise BrokenWeights(f"{name} is no safetensors file: its header is no table")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise BrokenWeights(f"{name}: its metadata is no table")
    tensors = {key: _place(key, entry, name) for key, entry in table.items()}
    data_bytes = 0
    for key, place in sorted(tensors.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if place.start != data_bytes:
            raise BrokenWeights(f"{name}: tensor {key!r} starts at {place.start}, not {data_bytes}")
        data_bytes = place.end
    offset = _LENGTH_BYTES + len(raw)
    if offset + data_bytes != file_bytes:
        what = "incomplete" if file_bytes < offset + data_bytes else "longer than its tensors"
        raise BrokenWeights(f"{name} is {what}: {file_bytes} bytes, {offset + data_bytes} expected")
    return Header(
        tensors=tensors,
        metadata={str(k): str(v) for k, v in metadata.items()},
        data_bytes=data_bytes,
        data_offset=offset,
    )


def _place(key: str, entry: Any, name: str) -> TensorPlace:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = _ITEM_BITS.get(dtype)
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise BrokenWeights(f"{name}: tensor {key!r} is not described in full") from error
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers) or end < start:
        raise BrokenWeights(f"{name}: tensor {key!r} has an impossible shape or place")
    if bits is not None:
        items = 1
        for n in shape:
            items *= n  # Python's integers don't overflow, numpy's product would
        if (items * bits + 7) // 8 != end - start:
            raise BrokenWeights(
                f"{name}: tensor {key!r} of shape {list(shape)} needs {(items * bits + 7) // 8} "
                f"bytes, it has {end - start}"
            )
    return TensorPlace(str(dtype), tuple(shape), start, end)


def read_header(path: Path) -> Header:
    """Raises BrokenWeights, and OSError where the file can't be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = header_length(file.read(_LENGTH_BYTES), size, path.name)
        return parse_header(file.read(length), size, path.name)


def weights_bytes(path: Path) -> int:
    """Of a safetensors file, or of all of them in a folder (shards). Raises as `read_header`."""
    if not path.is_dir():
        return read_header(path).data_bytes
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BrokenWeights(f"{path} holds no .safetensors file")
    return sum(read_header(file).data_bytes for file in files)

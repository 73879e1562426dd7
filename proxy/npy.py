"""The .npy format, read and written by hand: the header is checked before anything is allocated,
and nothing in it is ever executed or unpickled."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

from .datatypes import MAX_DIMENSIONS, NUMPY, SIZES, elements, split_strings
from .errors import InvalidInput, NotAcceptable
from .v2_checks import check_size

MAGIC: Final = b"\x93NUMPY"
_HEADER_LIMIT: Final = 8192
_DESCR: Final = re.compile(rb"""['"]descr['"]\s*:\s*['"]([<>|=]?)([a-zA-Z]\w*)['"]""")
_ORDER: Final = re.compile(rb"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE: Final = re.compile(rb"""['"]shape['"]\s*:\s*\(([\d,\sL]*)\)""")
_DATATYPES: Final = {code[1:]: name for name, code in NUMPY.items()}
_LETTERS: Final = {"?": "b1", "b": "i1", "B": "u1"}


class Array(NamedTuple):
    """Where an array's data lies: `plain` says that it is little-endian and row-major already."""

    datatype: str
    shape: tuple[int, ...]
    start: int
    plain: bool
    descr: str
    fortran: bool


def read(data: bytes | memoryview, limit: int = 2**62) -> Array:
    """The header, checked against `limit` and the length of `data`.

    Raises InvalidInput, ShapeRefused.
    """
    head = bytes(data[:12])
    if not head.startswith(MAGIC):
        raise InvalidInput("the body is no .npy file (it does not begin with \\x93NUMPY)")
    major = head[6] if len(head) > 6 else 0
    if major not in (1, 2, 3) or len(head) < 10:
        raise InvalidInput(f".npy version {major} is not known, there are 1, 2 and 3")
    wide = major > 1
    length = int.from_bytes(head[8 : 12 if wide else 10], "little")
    start = (12 if wide else 10) + length
    if length > _HEADER_LIMIT or start > len(data):
        raise InvalidInput(
            f"the .npy header announces {length} bytes, {min(_HEADER_LIMIT, len(data))} are allowed"
        )
    header = bytes(data[12 if wide else 10 : start])
    descr, order, dims = _DESCR.search(header), _ORDER.search(header), _SHAPE.search(header)
    if descr is None or order is None or dims is None:
        raise InvalidInput("the .npy header is not understood (arrays of records are not taken)")
    kind = descr[2].decode("ascii", "replace")
    kind = _LETTERS.get(kind, kind)
    datatype = _DATATYPES.get(kind)
    if datatype is None:
        raise InvalidInput(
            f".npy arrays of type {kind[:20]!r} are not taken; numbers and booleans are"
        )
    digits = [d.strip() for d in dims[1].replace(b"L", b"").split(b",") if d.strip()]
    if len(digits) > MAX_DIMENSIONS or any(len(d) > 18 or not d.isdigit() for d in digits):
        raise InvalidInput(f"the .npy array has an impossible shape of {len(digits)} dimensions")
    shape = tuple(map(int, digits))
    check_size("npy", datatype, shape, limit)
    want = elements(shape) * SIZES[datatype]
    if want != len(data) - start:
        raise InvalidInput(
            f"the .npy header announces {list(shape)} of {kind}, {want} bytes; "
            f"{len(data) - start} follow"
        )
    byte_order = "<" if descr[1] in (b"<", b"=", b"|", b"") or SIZES[datatype] == 1 else ">"
    fortran = order[1] == b"True" and sum(d > 1 for d in shape) > 1
    return Array(
        datatype, shape, start, byte_order == "<" and not fortran, byte_order + kind, fortran
    )


def convert(data: bytes | memoryview, array: Array) -> bytes:
    """The elements, little-endian and row-major."""
    values = np.frombuffer(data, array.descr, offset=array.start)
    if array.fortran:
        values = values.reshape(array.shape, order="F")
    return np.ascontiguousarray(values, NUMPY[array.datatype]).tobytes()


def write(datatype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """One tensor as .npy (version 1). BF16 is widened to FP32, which numpy has; BYTES become
    fixed-width byte strings. Raises NotAcceptable where those would lose trailing zeros."""
    if datatype == "BF16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        datatype, data = "FP32", wide.astype("<u4").tobytes()
    if datatype == "BYTES":
        strings = split_strings(data)
        width = max((len(s) for s in strings), default=1) or 1
        if any(s.endswith(b"\0") for s in strings) or width * len(strings) > 2**28:
            raise NotAcceptable("this answer's strings have no .npy form; ask for JSON or v2")
        descr, data = f"|S{width}", b"".join(s.ljust(width, b"\0") for s in strings)
    else:
        descr = NUMPY[datatype]
    dims = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return MAGIC + b"\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data

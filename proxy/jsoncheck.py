"""JSON from strangers: depth, number of values and size of numbers are bounded before they cost.

Decoding is msgspec's. What it leaves open is closed here: its recursion ends in a RecursionError
(no DecodeError), a comma can cost forty bytes of objects, and an integer beyond 64 bits decodes
but can't travel to a worker.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from .errors import InputTooLarge, InvalidInput

#: Values (commas) in one document. Four million cost at most a few hundred MB for a moment.
MAX_VALUES: Final = 4 * 2**20
DEPTH: Final = 64

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
_STRING: Final = re.compile(rb'"(?>[^"\\]+|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(b for b in range(256) if b not in b"[]{}")
_TOKEN: Final = re.compile(rb"\b(?:NaN|Infinity)\b")

T = TypeVar("T")


def check(text: bytes, *, depth: int = DEPTH, values: int = MAX_VALUES) -> None:
    """Refuse `text` if it nests deeper than `depth` or holds more than `values` commas.

    Says nothing about whether it is JSON. Raises InvalidInput, InputTooLarge.
    """
    if len(text) > values and (commas := text.count(b",")) > values:
        raise InputTooLarge(
            f"the JSON holds {commas + 1} values, {values} are allowed; send tensors as binary data"
        )
    # Most requests have a handful of brackets: then nothing needs to be looked at closely.
    if text.count(b"[") + text.count(b"{") > depth and (deep := _depth(text)) > depth:
        raise InvalidInput(f"the JSON is nested {deep} deep, {depth} levels are allowed")


def _depth(text: bytes) -> int:
    if b'"' in text:
        text = _STRING.sub(b"", text)
    brackets = np.frombuffer(text.translate(None, _NOT_BRACKETS), np.uint8)
    if not len(brackets):
        return 0
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1), dtype=np.int64).max())


def parse(text: bytes, decoder: msgspec.json.Decoder[T], what: str = "the request") -> T:
    """Decode checked text. Raises InvalidInput with one line that says where it fails."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{what} is not as expected: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _TOKEN.search(text):
            raise InvalidInput(
                f"{what} is not JSON: NaN and Infinity have no JSON form; "
                "send such tensors as binary data (binary_data_size)"
            ) from None
        raise InvalidInput(f"{what} is not JSON: {_short(str(error))}") from None
    except RecursionError:
        raise InvalidInput(f"{what} is nested too deep") from None


_any: Final = msgspec.json.Decoder()


def load(text: bytes, *, depth: int = DEPTH, what: str = "the request") -> Any:
    """Any JSON value; every integer in it fits into 64 bits. Raises InvalidInput, InputTooLarge."""
    check(text, depth=depth)
    value = parse(text, _any, what)
    check_numbers(value, what)
    return value


def check_numbers(value: Any, what: str = "the request") -> None:
    """Refuse integers that do not fit into 64 bits. Raises InvalidInput."""
    kind = type(value)
    if kind is int:
        if not _INT_MIN <= value <= _INT_MAX:
            raise InvalidInput(f"{what} holds an integer that does not fit into 64 bits")
    elif kind is list:
        for element in value:
            check_numbers(element, what)
    elif kind is dict:
        for element in value.values():
            check_numbers(element, what)


def _short(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "..."

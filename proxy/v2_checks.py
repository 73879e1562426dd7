"""Checks of single things in a v2 request: shapes, parameters, flags. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gpusup.supervisor.wire import ModelInfo
from gpusup.worker.wire import TensorSpec

from .datatypes import DATATYPES, MAX_DIMENSIONS, SIZES, elements, say
from .errors import InputTooLarge, InvalidInput
from .jsoncheck import check_numbers, parse

#: Bytes of JSON that one `parameters` object may take, and one `shape`.
PARAMETERS_LIMIT: Final = 64 * 1024
SHAPE_LIMIT: Final = 1024

#: Bytes on the wire of what goes to a model beside its input: it has to travel inside a frame.
PARAMS_LIMIT: Final = 2**20

#: Priorities are the protocol's uint32: 0 default, 1 highest.
PRIORITY_LIMIT: Final = 2**32 - 1

_shape: Final = msgspec.json.Decoder(list[int])
_object: Final = msgspec.json.Decoder(dict[str, Any])
_pack: Final = msgspec.msgpack.Encoder().encode


def check_rows(model: ModelInfo, rows: int) -> None:
    """Raises InvalidInput for more than a batch takes: no worker would ever have room for it."""
    if rows > model.max_rows and model.state == "ready":
        raise InvalidInput(
            f"the request has {rows} rows, model {model.name!r} takes at most {model.max_rows}"
        )


class ShapeRefused(InvalidInput):
    """A shape that asks for more than any body could hold. `fields` are for the log."""

    def __init__(self, text: str, fields: dict[str, Any]) -> None:
        super().__init__(text)
        self.fields = fields


def read_shape(raw: msgspec.Raw, name: str) -> list[int]:
    """Non-negative 63-bit dimensions, at most MAX_DIMENSIONS. Raises InvalidInput."""
    text = bytes(raw)
    if len(text) > SHAPE_LIMIT:
        raise InvalidInput(
            f"the shape of input {name!r} takes {len(text)} bytes, {SHAPE_LIMIT} are allowed"
        )
    shape = parse(text, _shape, f"the shape of input {name!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidInput(
            f"the shape of input {name!r} has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed"
        )
    for dimension in shape:
        if not 0 <= dimension < 2**63:
            raise InvalidInput(f"the shape of input {name!r} has a dimension of {dimension}")
    return shape


def check_declared(
    name: str,
    datatype: str,
    shape: Sequence[int],
    specs: dict[str, TensorSpec],
    declared: int,
) -> None:
    """Datatype known; name, datatype and shape as declared. Raises InvalidInput."""
    if datatype not in DATATYPES:
        hint = f"; it is spelt {datatype.upper()}" if datatype.upper() in DATATYPES else ""
        raise InvalidInput(f"input {name!r} has the unknown datatype {datatype[:40]!r}{hint}")
    if not declared:
        return
    spec = specs.get(name)
    if spec is None:
        raise InvalidInput(
            f"the model has no input {name[:80]!r}, it has {', '.join(map(repr, specs))}"
        )
    if spec.datatype != datatype:
        raise InvalidInput(f"input {name!r} is {datatype}, the model wants {spec.datatype}")
    if len(shape) != len(spec.shape) + 1 or any(
        want not in (-1, got) for want, got in zip(spec.shape, shape[1:], strict=True)
    ):
        raise InvalidInput(
            f"input {name!r} has the shape {list(shape)}, the model wants {[-1, *spec.shape]}"
        )


def check_size(name: str, datatype: str, shape: Sequence[int], limit: int) -> None:
    """No tensor may claim more bytes than a body may have. Raises ShapeRefused."""
    size = elements(shape) * SIZES.get(datatype, 4)
    if size > limit:
        said = str(size) if size < 2**80 else f"2^{size.bit_length() - 1}"
        raise ShapeRefused(
            f"input {name!r} of shape {list(shape)} would take {said} bytes, {limit} are allowed",
            {
                "input": name[:80],
                "datatype": datatype,
                "shape": "x".join(map(str, shape)),
                "bytes": said,
                "limit": limit,
                "ratio": size // max(1, limit) if size < 2**80 else "over 2^40",
            },
        )


def read_parameters(raw: msgspec.Raw, what: str) -> dict[str, Any]:
    """One `parameters` object. Raises InvalidInput."""
    text = bytes(raw)
    if text == b"null":
        return {}
    if len(text) > PARAMETERS_LIMIT:
        raise InvalidInput(f"{what} take {len(text)} bytes, {PARAMETERS_LIMIT} are allowed")
    found = parse(text, _object, what)
    check_numbers(found, what)
    return found


def check_params(params: dict[str, Any]) -> None:
    """What a model is given beside its text. Raises InputTooLarge."""
    if params and (size := len(_pack(params))) > PARAMS_LIMIT:
        raise InputTooLarge(
            f"the request's parameters take {size} bytes, {PARAMS_LIMIT} are allowed"
        )


def take_timing(params: dict[str, Any]) -> tuple[int, float]:
    """Takes priority and timeout (as seconds) out; 0 where none is given. Raises InvalidInput."""
    priority = read_priority(params.pop("priority")) if "priority" in params else 0
    micros = params.pop("timeout", 0)
    if type(micros) is not int or micros < 0:
        raise InvalidInput(f"timeout is {say(micros)} and not a number of microseconds")
    return priority, micros / 1e6


def read_priority(value: Any) -> int:
    """The protocol's priority: 1 is the highest, 0 the default. Raises InvalidInput."""
    if type(value) is not int or not 0 <= value <= PRIORITY_LIMIT:
        raise InvalidInput(
            f"priority is {say(value)}; it is an integer, 1 the highest, 0 the default, "
            f"{PRIORITY_LIMIT} the lowest"
        )
    return value


def read_flag(value: Any, name: str) -> bool:
    """Raises InvalidInput."""
    if type(value) is not bool:
        raise InvalidInput(f"{name} is {say(value)} and neither true nor false")
    return value

"""The Open Inference Protocol v2: bytes in, parts and options out; answers in, a body out. No I/O.

A request is checked against the model's declared tensors before anything is allocated for it.
Models that declare nothing accept anything. Rows are the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gpusup.worker.wire import Block, Part, TensorSpec

from .datatypes import SIZES, check_binary, elements, parse_json, say, to_values
from .errors import InputTooLarge, InvalidInput
from .jsoncheck import DEPTH, check, parse
from .v2_checks import (
    check_declared,
    check_size,
    read_flag,
    read_parameters,
    read_shape,
    take_timing,
)

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

#: Characters of a tensor's name: it may come back in an error.
NAME_LIMIT: Final = 256
#: Inputs of one request, unless the model declares more: their heads travel inside a frame.
MOST_INPUTS: Final = 256

#: Gives the bytes [start, end) of the body the form in which they travel to a worker.
Cut = Callable[[int, int], bytes | Block]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output asked for by name. `binary` None: as `binary_data_output` says."""

    name: str
    binary: bool | None


@dataclass(slots=True, kw_only=True)
class InferRequest:
    parts: tuple[Part, ...]
    rows: int
    id: str = ""
    params: dict[str, Any] = field(default_factory=dict)  # what is for the model
    priority: int = 0
    timeout_s: float = 0.0  # 0: none given
    outputs: tuple[Wanted, ...] = ()  # empty: all
    binary: bool = False  # unless an output says otherwise


class _Input(msgspec.Struct):
    name: str
    shape: msgspec.Raw
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Output(msgspec.Struct):
    name: str
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Document(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    outputs: list[_Output] | None = None


_document: Final = msgspec.json.Decoder(_Document)
_encode: Final = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")


def decode(
    body: bytes | memoryview,
    header_length: str | None,
    *,
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    cut: Cut | None = None,
    limit: int = 2**62,
    depth: int = DEPTH,
) -> InferRequest:
    """One infer request. `header_length` is the header of that name, None if absent.

    `limit` is the largest body in bytes: no tensor may claim to be larger. `cut` makes the data
    of binary tensors; without it they are copied out. Raises InvalidInput, InputTooLarge.
    """
    if cut is None:

        def cut(start: int, end: int) -> bytes:
            return bytes(body[start:end])

    if header_length is None:
        split = len(body)
    else:
        split = _header_length(header_length, len(body))
        if split == 0:
            return _raw(body, inputs, cut)
    text = body if split == len(body) and type(body) is bytes else bytes(body[:split])
    check(text, depth=depth)
    document = parse(text, _document)
    if (count := len(document.inputs)) > (most := max(MOST_INPUTS, len(inputs))):
        raise InvalidInput(f"the request has {count} inputs, {most} are allowed")

    request = InferRequest(parts=(), rows=0, id=document.id or "")
    if document.parameters is not msgspec.UNSET:
        _read_parameters(request, document.parameters)
    if document.outputs:
        request.outputs = _read_outputs(document.outputs, outputs)

    specs = {spec.name: spec for spec in inputs}
    parts: list[Part] = []
    at, rows = split, -1
    for tensor in document.inputs:
        name = tensor.name
        if len(name) > NAME_LIMIT:
            raise InvalidInput(
                f"an input's name has {len(name)} characters, {NAME_LIMIT} are allowed"
            )
        shape = read_shape(tensor.shape, name)
        check_declared(name, tensor.datatype, shape, specs, len(inputs))
        check_size(name, tensor.datatype, shape, limit)
        first = shape[0] if shape else 1
        if rows < 0:
            rows = first
        elif first != rows:
            raise InvalidInput(
                f"input {name!r} has {first} rows (its first dimension), "
                f"input {parts[0].name!r} has {rows}"
            )
        binary = -1
        if tensor.parameters is not msgspec.UNSET:
            binary = _binary_size(tensor.parameters, name)
        given = tensor.data is not msgspec.UNSET and (binary < 0 or tensor.data != _NULL)
        if given == (binary >= 0):
            raise InvalidInput(
                f"input {name!r} has both data and binary_data_size"
                if given
                else f"input {name!r} has neither data nor binary_data_size"
            )
        data: bytes | Block
        if binary >= 0:
            end = at + binary
            if end > len(body):
                raise InvalidInput(
                    f"input {name!r} announces {binary} bytes of binary data, "
                    f"{len(body) - at} are left in the body"
                )
            check_binary(memoryview(body)[at:end], tensor.datatype, shape, name)
            data, at = cut(at, end), end
        else:
            assert tensor.data is not msgspec.UNSET
            data = parse_json(bytes(tensor.data), tensor.datatype, shape, name)
            if len(data) > limit:  # strings grow by four bytes each
                raise InputTooLarge(f"input {name!r} takes {len(data)} bytes, {limit} are allowed")
        parts.append(Part(name, data, tensor.datatype, tuple(shape)))
    if at != len(body):
        raise InvalidInput(
            f"{len(body) - at} bytes are left in the body after the last binary tensor"
        )
    _check_names(parts, specs)
    request.parts, request.rows = tuple(parts), rows
    return request


def _header_length(text: str, length: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise InvalidInput(f"{HEADER_LENGTH} is {text[:40]!r} and not a number of bytes")
    if (split := int(text)) > length:
        raise InvalidInput(f"{HEADER_LENGTH} is {split}, the body has {length} bytes")
    return split


def _check_names(parts: list[Part], specs: dict[str, TensorSpec]) -> None:
    if len(parts) == 1 and len(specs) <= 1:
        return
    if not parts:
        raise InvalidInput("the request has no inputs")
    names = {part.name for part in parts}
    if len(names) != len(parts):
        twice = next(p.name for i, p in enumerate(parts) if p.name in {q.name for q in parts[:i]})
        raise InvalidInput(f"input {twice!r} is there twice")
    if missing := [name for name in specs if name not in names]:
        raise InvalidInput(f"the model also wants the input {missing[0]!r}")


def _raw(body: bytes | memoryview, inputs: Sequence[TensorSpec], cut: Cut) -> InferRequest:
    """The whole body is the one input, of one row; its variable dimension follows from its size."""
    if len(inputs) != 1:
        raise InvalidInput(
            f"{HEADER_LENGTH} 0 sends the only input as the whole body, "
            f"this model declares {len(inputs)} inputs"
        )
    (spec,) = inputs
    if spec.datatype == "BYTES":
        if spec.shape not in ((1,), (-1,), ()):
            raise InvalidInput(
                f"a BYTES input can be the whole body only where its shape is [1] or [-1], "
                f"{spec.name!r} has {list(spec.shape)}"
            )
        data: bytes | Block = len(body).to_bytes(4, "little") + bytes(body)
        shape = (1,) * (1 + len(spec.shape))
    else:
        if spec.shape.count(-1) > 1:
            raise InvalidInput(
                f"the shape of input {spec.name!r}, {list(spec.shape)}, can't be told from the "
                "size of the body: more than one dimension varies"
            )
        unit = elements([d for d in spec.shape if d != -1]) * SIZES[spec.datatype]
        varies = -1 in spec.shape
        count, over = divmod(len(body), unit) if unit else (0, len(body))
        if over or (not varies and count != 1):
            raise InvalidInput(
                f"the body has {len(body)} bytes, input {spec.name!r} of shape "
                f"{[1, *spec.shape]} wants {'a multiple of ' if varies else ''}{unit}"
            )
        shape = (1, *(count if d == -1 else d for d in spec.shape))
        check_binary(memoryview(body), spec.datatype, shape, spec.name)
        data = cut(0, len(body))
    return InferRequest(parts=(Part(spec.name, data, spec.datatype, shape),), rows=1, binary=True)


def _read_parameters(request: InferRequest, raw: msgspec.Raw) -> None:
    params = read_parameters(raw, "the request's parameters")
    if "binary_data_output" in params:
        request.binary = read_flag(params.pop("binary_data_output"), "binary_data_output")
    request.priority, request.timeout_s = take_timing(params)
    request.params = params


def _binary_size(raw: msgspec.Raw, name: str) -> int:
    """-1: not binary."""
    params = read_parameters(raw, f"the parameters of input {name!r}")
    if "shared_memory_region" in params:
        raise InvalidInput(f"input {name!r} is in shared memory, which is not supported")
    size = params.get("binary_data_size")
    if size is None:
        return -1
    if type(size) is not int or size < 0:
        raise InvalidInput(
            f"binary_data_size of input {name!r} is {say(size)} and not a number of bytes"
        )
    return size


def _read_outputs(wanted: list[_Output], specs: Sequence[TensorSpec]) -> tuple[Wanted, ...]:
    found: dict[str, Wanted] = {}
    known = {spec.name for spec in specs}
    for output in wanted:
        name = output.name
        if name in found:
            raise InvalidInput(f"output {name[:80]!r} is asked for twice")
        if known and name not in known:
            raise InvalidInput(
                f"the model has no output {name[:80]!r}, it has {', '.join(map(repr, known))}"
            )
        binary = None
        if output.parameters is not msgspec.UNSET:
            params = read_parameters(output.parameters, f"the parameters of output {name[:80]!r}")
            if "classification" in params or "shared_memory_region" in params:
                what = "classification" if "classification" in params else "shared memory"
                raise InvalidInput(f"output {name!r} asks for {what}, which is not supported")
            if "binary_data" in params:
                binary = read_flag(params["binary_data"], "binary_data")
        found[name] = Wanted(name, binary)
    return tuple(found.values())


@dataclass(slots=True)
class Body:
    """An answer. `header_length` None: all JSON. Else JSON of that length, then `tensors`."""

    json: bytes
    tensors: tuple[bytes, ...] = ()
    header_length: int | None = None


def encode(parts: Sequence[Part], request: InferRequest, model: str, version: str) -> Body:
    """The answer to `request`. Parts that are no tensors become BYTES tensors of one element.

    Raises InvalidInput where an output can't be said in JSON or was not given by the model.
    """
    chosen = parts if not request.outputs else _choose(parts, request.outputs)
    asked = {w.name: w.binary for w in request.outputs}
    outputs: list[dict[str, Any]] = []
    tensors: list[bytes] = []
    for part in chosen:
        assert not isinstance(part.data, Block)
        data, datatype, shape = part.data, part.datatype, part.shape
        if not datatype:
            data, datatype, shape = len(data).to_bytes(4, "little") + data, "BYTES", (1,)
        output: dict[str, Any] = {"name": part.name, "datatype": datatype, "shape": shape}
        binary = asked.get(part.name)
        if request.binary if binary is None else binary:
            output["parameters"] = {"binary_data_size": len(data)}
            tensors.append(data)
        else:
            output["data"] = to_values(data, datatype, part.name)
        outputs.append(output)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if request.id:
        document["id"] = request.id
    text = _encode(document)
    if not tensors:
        return Body(text)
    return Body(text, tuple(tensors), len(text))


def _choose(parts: Sequence[Part], wanted: Sequence[Wanted]) -> list[Part]:
    given = {part.name: part for part in parts}
    for output in wanted:
        if output.name not in given:
            raise InvalidInput(
                f"the model gave no output {output.name!r}, it gave {', '.join(map(repr, given))}"
            )
    return [given[output.name] for output in wanted]


def empty_answer(
    request: InferRequest, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[Part, ...]:
    """The answer to a request of no rows, which no worker need see. Raises InvalidInput.

    A variable dimension of an output is that of the input with the same pattern, else 0.
    """
    if not outputs:
        raise InvalidInput("the request has no rows (its first dimension is 0)")
    same = {spec.shape: part.shape for spec, part in zip(inputs, request.parts, strict=False)}
    return tuple(
        Part(
            spec.name,
            b"",
            spec.datatype,
            (0, *same.get(spec.shape, (0, *(max(0, d) for d in spec.shape)))[1:]),
        )
        for spec in outputs
    )

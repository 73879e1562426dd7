"""A whole program from a file: `torch.export` (.pt2) or TorchScript (.pt, .ts). Needs no code.

    [models.scorer]
    handler = "gpusup.worker.builtin_exported:Exported"
    weights = "scorer-{version}.pt2"
    inputs = [{ name = "features", datatype = "FP32", shape = [12] }]
    outputs = [{ name = "score", datatype = "FP32", shape = [1] }]

Requests are tensors (`/v2/models/scorer/infer`, `.npy`), or JSON `{"features": [...]}`, one item.
A program that was exported for a fixed number of rows is fed that many at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .model import ConfigProblem, InvalidInput, Model, Request


class Exported(Model):
    """`forward(batch)` is the program. Its outputs are encoded as nested lists."""

    platform = "pytorch_exported"

    def load(self, device: torch.device, version: str) -> None:
        if not self.weights:
            raise ConfigProblem("weights: names no file")
        self.program = load_program(Path(self.weights), device)
        # A script's file says nothing of its inputs: then there are none.
        self.examples = self.program.examples

    def state_dict(self) -> Mapping[str, torch.Tensor] | None:
        return dict(self.program.state_dict())

    def decode(self, request: Request) -> Any:
        if not isinstance(request.json, Mapping | list):
            raise InvalidInput("this model takes tensors, or JSON with one item's values")
        if isinstance(request.json, Mapping):
            if len(request.json) != 1:
                names = ", ".join(map(str, request.json)) or "nothing"
                raise InvalidInput(f"expected one input by its name, got {names}")
            (values,) = request.json.values()
        else:
            values = request.json
        kind = self.examples[0].dtype if self.examples else torch.float32
        try:
            item = torch.tensor(values, dtype=kind)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise InvalidInput(f"cannot make a tensor of the values: {error}") from error
        wanted = self.program.shapes[0] if self.program.shapes else None
        if wanted is not None and not fits(tuple(item.shape), wanted):
            raise InvalidInput(f"expected shape {list(wanted)}, got {list(item.shape)}")
        return item

    def forward(self, batch: Any) -> Any:
        inputs = tuple(batch.values()) if isinstance(batch, Mapping) else (batch,)
        return self.program(*inputs)

    def warm_up(self) -> Sequence[Any]:
        return self.examples if len(self.examples) == 1 else ()


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """-1 in `wanted` takes any size."""
    return len(shape) == len(wanted) and all(
        want in (-1, have) for have, want in zip(shape, wanted, strict=True)
    )


class Program(torch.nn.Module):  # type: ignore[misc]
    """The loaded module. `rows`: how many it takes at a time; 0: any number. `shapes` and
    `examples`: of its inputs without rows, as far as the file says."""

    def __init__(
        self,
        inner: torch.nn.Module,
        rows: int = 0,
        examples: Sequence[torch.Tensor] = (),
        shapes: Sequence[tuple[int, ...]] = (),
    ) -> None:
        super().__init__()
        self.inner = inner
        self.rows = rows
        self.examples = tuple(examples)
        self.shapes = tuple(shapes)

    def forward(self, *inputs: torch.Tensor) -> Any:
        count = inputs[0].shape[0]
        if not self.rows or count == self.rows:
            return self.inner(*inputs)
        pieces = []
        for first in range(0, count, self.rows):
            part = [value[first : first + self.rows] for value in inputs]
            real = part[0].shape[0]
            if real < self.rows:
                part = [_padded(value, self.rows) for value in part]
            pieces.append((self.inner(*part), real))
        return _joined(pieces)


def load_program(path: Path, device: torch.device) -> Program:
    """Raises ConfigProblem on a file that is neither kind."""
    if not path.is_file():
        raise ConfigProblem(f"cannot read {path}: there is no such file")
    try:
        if path.suffix == ".pt2":
            return _exported(path, device)
        script = torch.jit.load(str(path), map_location=device)
    except ConfigProblem:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        form = "an exported program" if path.suffix == ".pt2" else "TorchScript"
        text = f"{type(error).__name__}: {first[0] if first else ''}"
        raise ConfigProblem(f"cannot read {path} as {form}: {text}") from error
    for parameter in script.parameters():
        parameter.requires_grad_(False)
    return Program(script.eval())


def _exported(path: Path, device: torch.device) -> Program:
    with torch.device("cpu"):  # where the file's tensors are put together, whatever the default
        program = torch.export.load(str(path))
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    wanted = set(program.graph_signature.user_inputs)
    tensors = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in wanted
    ]
    tensors = [value for value in tensors if isinstance(value, torch.Tensor) and value.ndim]
    # A dimension that may vary is symbolic here, and no int.
    sides = [tuple(n if isinstance(n, int) else -1 for n in value.shape) for value in tensors]
    fixed = {shape[0] for shape in sides} - {-1}
    if len(fixed) > 1:
        raise ConfigProblem(f"{path}: its inputs are exported for different rows: {sorted(fixed)}")
    examples = [
        torch.zeros([abs(n) for n in shape[1:]], dtype=value.dtype)
        for shape, value in zip(sides, tensors, strict=True)
    ]
    return Program(
        program.module(),
        rows=min(fixed, default=0),
        examples=examples,
        shapes=[shape[1:] for shape in sides],
    )


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    more = value.new_zeros((rows - value.shape[0], *value.shape[1:]))
    return torch.cat([value, more])


def _joined(pieces: Sequence[tuple[Any, int]]) -> Any:
    """The outputs of several calls below each other, in whatever form the program has them."""
    first = pieces[0][0]
    if isinstance(first, torch.Tensor):
        return torch.cat([value[:real] for value, real in pieces])
    if isinstance(first, Mapping):
        return {key: _joined([(value[key], real) for value, real in pieces]) for key in first}
    return tuple(
        _joined([(value[index], real) for value, real in pieces]) for index in range(len(first))
    )

"""What `forward` returned: checked, cut into rows, put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from . import wire
from .codec import for_wire, sliced_part


class WrongRows(Exception):
    """`forward` returned another number of rows than it was given. Nobody gets any of them."""


@dataclass(slots=True)
class Outputs:
    """Values by name, each with the batch's rows first: torch tensors on the CPU, or numpy arrays.

    `form` is what `forward` returned, so that `encode` sees rows of the same kind.
    """

    form: Literal["tensor", "tuple", "dict"]
    names: tuple[str, ...]
    values: list[Any]

    def cut(self, first: int, rows: int) -> Outputs:
        last = first + rows
        return Outputs(self.form, self.names, [value[first:last] for value in self.values])

    @property
    def nbytes(self) -> int:
        return sum(int(value.nbytes) for value in self.values)

    def copied(self) -> Outputs:
        values = [v.clone() if isinstance(v, torch.Tensor) else v.copy() for v in self.values]
        return Outputs(self.form, self.names, values)

    def each_row(self) -> list[Any]:
        """Rows as `encode` gets them."""
        if self.form == "tensor":
            return list(self.values[0])
        by_row = zip(*self.values, strict=True)
        if self.form == "tuple":
            return list(by_row)
        return [dict(zip(self.names, row, strict=True)) for row in by_row]

    def arrays(self, declared: Mapping[str, str]) -> list[tuple[str, str, Any]]:
        """(name, datatype, array) ready for the wire; `declared`: datatype by output name, cast
        to where it differs."""
        return [
            (name, *for_wire(name, value, declared.get(name, "")))
            for name, value in zip(self.names, self.values, strict=True)
        ]

    def parts(self, declared: Mapping[str, str]) -> tuple[wire.Part, ...]:
        return tuple(sliced_part(*ready) for ready in self.arrays(declared))

    def trimmed(self, bucket: Sequence[int], true_size: Sequence[int]) -> Outputs:
        """Cut back what has the bucket's shape to the size the item had before it was padded."""
        window = (slice(None), *(slice(0, side) for side in true_size))
        shape = tuple(bucket)
        return Outputs(
            self.form,
            self.names,
            [value[window] if tuple(value.shape[1:]) == shape else value for value in self.values],
        )


def outputs_of(returned: Any, rows: int, declared: Sequence[str]) -> Outputs:
    """Name the outputs and check their rows. Raises WrongRows; TypeError on what is no output."""
    if isinstance(returned, torch.Tensor | np.ndarray):
        form: Literal["tensor", "tuple", "dict"] = "tensor"
        values = [returned]
        names: tuple[str, ...] = (declared[0] if declared else "output0",)
    elif isinstance(returned, Mapping):
        form = "dict"
        names = tuple(map(str, returned))
        values = list(returned.values())
    elif isinstance(returned, list | tuple):
        form = "tuple"
        values = list(returned)
        if declared and len(declared) == len(values):
            names = tuple(declared)
        else:
            names = tuple(f"output{index}" for index in range(len(values)))
    else:
        raise TypeError(
            f"forward returned {type(returned).__name__}, not a tensor, tuple or dict of tensors"
        )
    if not values:
        raise TypeError("forward returned no output")
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise TypeError(f"forward's output {name!r} is {type(value).__name__}, not a tensor")
        got = value.shape[0] if value.ndim else 0
        if got != rows or not value.ndim:
            raise WrongRows(f"the model returned {got} rows of {name!r} for a batch of {rows}")
    return Outputs(form, names, values)


def joined(pieces: Sequence[Outputs]) -> Outputs:
    """One item's portions, in order, as if they had been computed together."""
    first = pieces[0]
    values: list[Any] = []
    for index in range(len(first.values)):
        column = [piece.values[index] for piece in pieces]
        if isinstance(column[0], torch.Tensor):
            values.append(torch.cat(column))
        else:
            values.append(np.concatenate(column))
    return Outputs(first.form, first.names, values)

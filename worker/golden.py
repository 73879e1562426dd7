"""The golden example: an input whose output is known, compared before a model gets traffic.

A `.npz` holds the inputs by name and the outputs as `out.<name>`; a `.json` holds
`{"inputs": {name: nested lists}, "outputs": {name: nested lists}}`. Rows come first in both.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .entry import LoadProblem
from .outputs import Outputs

_OUT: Final = "out."
#: What reading raises where a file is none of these, or is cut or broken.
_UNREADABLE: Final = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    zipfile.BadZipFile,
    zlib.error,
)

Arrays = dict[str, Any]


def read(path: str) -> tuple[Arrays, Arrays]:
    """Inputs and outputs as torch tensors. Raises LoadProblem("config") on a file that is none."""
    try:
        if path.endswith(".json"):
            return _read_json(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name].copy()) for name in file.files}
    except _UNREADABLE as error:
        raise LoadProblem("config", f"cannot read the golden example {path}: {error}") from error
    inputs = {name: value for name, value in arrays.items() if not name.startswith(_OUT)}
    outputs = {
        name.removeprefix(_OUT): value for name, value in arrays.items() if name.startswith(_OUT)
    }
    return _checked(path, inputs, outputs)


def _read_json(path: str) -> tuple[Arrays, Arrays]:
    said = json.loads(Path(path).read_text())
    inputs = {name: torch.tensor(value) for name, value in said["inputs"].items()}
    outputs = {name: torch.tensor(value) for name, value in said["outputs"].items()}
    return _checked(path, inputs, outputs)


def _checked(path: str, inputs: Arrays, outputs: Arrays) -> tuple[Arrays, Arrays]:
    if not inputs or not outputs:
        raise LoadProblem(
            "config",
            f"the golden example {path} has {len(inputs)} inputs and {len(outputs)} outputs "
            f"(named {_OUT}<name>); it takes one of each at least",
        )
    if any(not value.ndim or not value.shape[0] for value in inputs.values()):
        raise LoadProblem("config", f"an input of the golden example {path} has no rows")
    return inputs, outputs


def compare(outputs: Outputs, expected: Arrays, tolerance: float) -> None:
    """Raises LoadProblem("golden") with the largest difference and the limit."""
    got = dict(zip(outputs.names, outputs.values, strict=True))
    if len(got) == 1 and len(expected) == 1:
        # One output needs no name.
        got = dict(zip(expected, got.values(), strict=True))
    for name, want in expected.items():
        if name not in got:
            raise LoadProblem(
                "golden", f"the golden example wants output {name!r}, the model gives {list(got)}"
            )
        have = torch.as_tensor(got[name])
        if tuple(have.shape) != tuple(want.shape):
            raise LoadProblem(
                "golden",
                f"golden output {name!r} has shape {list(want.shape)}, the model gives "
                f"{list(have.shape)}",
            )
        have = have.double()
        if not bool(torch.isfinite(have).all()):
            raise LoadProblem("golden", f"output {name!r} of the golden example is not finite")
        difference = float((have - want.double()).abs().max()) if have.numel() else 0.0
        if not difference <= tolerance:
            raise LoadProblem(
                "golden",
                f"output {name!r} of the golden example is off by {difference:.6g}, "
                f"the limit is {tolerance:.6g}",
            )

"""A model whose versions can be told apart by what they answer, and words for swapping it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .service import HANDLERS, Service


def weights(folder: Path, version: int, factor: Sequence[float] = ()) -> Path:
    """A version's file: its number is what the model multiplies by."""
    path = folder / f"w-{version}.safetensors"
    number = torch.tensor(list(factor) or [float(version)])
    save_file({"factor": number, "filler": torch.zeros(1000)}, path)
    return path


def model(folder: Path, name: str, *lines: str) -> str:
    """A section of the configuration; version N multiplies by N."""
    for version in range(1, 4):
        weights(folder, version)
    return "\n".join(
        (
            f"[models.{name}]",
            f'handler = "{HANDLERS}:Stored"',
            f'weights = "{folder}/w-{{version}}.safetensors"',
            *lines,
            "",
        )
    )


def reload(service: Service, name: str, version: int, **wish: Any) -> dict[str, Any]:
    """The change, when it has ended."""
    return service.change(f"/models/{name}/reload", {"version": str(version), **wish})


def version_of(service: Service, name: str) -> str:
    for found in service.status()["models"]:
        if found["name"] == name:
            return str(found["version"])
    raise AssertionError(f"no model {name}")


def steps(change: dict[str, Any]) -> str:
    return "\n".join(text for _, text in change["steps"])

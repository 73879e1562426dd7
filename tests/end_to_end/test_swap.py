"""Swaps under clients: nobody notices; and whatever goes wrong, the old version goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .service import HANDLERS, Service, running
from .swap_clients import Clients

#: More than half of a CPU slot's memory, as declared: old and new do not fit beside each other.
LARGE = 'static = "1200MiB"'


def weights(folder: Path, version: int, factor: float | None = None) -> Path:
    """A version's file: its number is what the model multiplies by."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"w-{version}.safetensors"
    number = torch.tensor([float(version) if factor is None else factor])
    save_file({"factor": number, "filler": torch.zeros(1000)}, path)
    return path


def model(folder: Path, name: str, *lines: str) -> str:
    """A section of the configuration; version N multiplies by N."""
    for version in range(1, 9):
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


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    config = (
        model(folder, "pair")
        + model(folder, "only", 'devices = ["cpu0"]', 'hold = "20s"')
        + model(folder, "big", 'devices = ["cpu1"]', 'hold = "20s"')
    )
    with running(folder, config) as service:
        yield service


def reload(service: Service, name: str, version: int | str, **wish: Any) -> dict[str, Any]:
    return service.change(f"/models/{name}/reload", {"version": str(version), **wish})


def version_of(service: Service, name: str) -> str:
    for found in service.status()["models"]:
        if found["name"] == name:
            return str(found["version"])
    raise AssertionError(f"no model {name}")


def words(change: dict[str, Any]) -> str:
    return "\n".join(text for _, text in change["steps"])


@pytest.mark.parametrize(
    ("name", "strategy"), [("pair", "auto"), ("pair", "in-place"), ("only", "in-place")]
)
def test_swaps_back_and_forth_under_sixteen_clients_lose_nothing(
    service: Service, name: str, strategy: str
) -> None:
    with Clients(service, name) as clients:
        for version in (2, 1, 2, 1):
            change = reload(service, name, version, strategy=strategy)
            assert change["state"] == "done", words(change)
    assert not clients.problems()
    assert clients.versions() == {"1", "2"}
    if name == "pair":
        assert clients.longest_silence_s() < 2

"""Weights come in whole, in parallel, and as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpusup.worker import loader
from gpusup.worker.model import ConfigProblem


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(300, 700, generator=chance),
        "b": torch.randn(5, generator=chance).to(torch.bfloat16),
        "c": torch.arange(7, dtype=torch.uint8),
        "d": torch.randn(3, generator=chance).half(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


@pytest.fixture
def path(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    place = tmp_path / "m.safetensors"
    save_file(tensors, str(place))
    return place


@pytest.mark.parametrize("chunk", [1000, 1 << 25])
def test_every_tensor_is_as_it_was_saved(
    path: Path, tensors: dict[str, torch.Tensor], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "CHUNK", chunk)
    loaded = loader.load_weights(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_progress_counts_every_byte_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK", 4096)
    moved: list[int] = []
    loader.on_moved(moved.append)
    try:
        loaded = loader.load_weights(path)
    finally:
        loader.on_moved(None)
    assert sum(moved) == sum(tensor.nbytes for tensor in loaded.values())
    assert len(moved) > 100


def test_on_the_meta_device_only_the_header_is_read(
    path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    loaded = loader.load_weights(path, "meta")
    assert all(tensor.is_meta for tensor in loaded.values())
    assert {n: t.shape for n, t in loaded.items()} == {n: t.shape for n, t in tensors.items()}


def test_a_truncated_file_is_refused(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(ConfigProblem, match=r"m\.safetensors"):
        loader.load_weights(path)


@pytest.mark.parametrize("read", [loader.load_weights, loader.prefetch])
def test_a_missing_file_is_named(tmp_path: Path, read: Any) -> None:
    with pytest.raises(ConfigProblem, match=r"gone\.safetensors: No such file"):
        read(tmp_path / "gone.safetensors")


def test_prefetch_reads_all_of_it(path: Path) -> None:
    assert loader.prefetch(path) == path.stat().st_size

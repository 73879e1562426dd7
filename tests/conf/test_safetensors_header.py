from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpusup.conf.safetensors_header import BrokenWeights, parse_header, read_header, weights_bytes


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    arrays = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.int64)}
    save_file(arrays, path, metadata={"version": "3"})
    return path


def test_the_bytes_of_the_weights_are_read_without_loading_them(weights: Path) -> None:
    header = read_header(weights)
    assert header.data_bytes == 3 * 5 * 4 + 7 * 8
    assert header.tensors["a"].shape == (3, 5)
    assert header.metadata == {"version": "3"}


def test_a_truncated_copy_is_found_with_both_numbers(weights: Path) -> None:
    whole = weights.read_bytes()
    for cut in (4, 12, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(BrokenWeights, match=rf"{cut} bytes"):
            read_header(weights)


def test_a_file_with_something_behind_its_tensors_is_refused(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes() + b"x")
    with pytest.raises(BrokenWeights, match="longer than its tensors"):
        read_header(weights)


def test_another_kind_of_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"PK\x03\x04" + b"\xff" * 100)
    with pytest.raises(BrokenWeights, match="no safetensors file"):
        read_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2, -3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        7,
    ],
)
def test_impossible_tensors_are_refused(entry: object) -> None:
    raw = json.dumps({"t": entry}).encode()
    with pytest.raises(BrokenWeights, match="'t'"):
        parse_header(raw, 8 + len(raw) + 8)


@pytest.mark.parametrize("raw", [b"[]", b"{", b"[" * 100_000, b'{"__metadata__": 5}'])
def test_a_header_that_is_no_table_is_refused(raw: bytes) -> None:
    with pytest.raises(BrokenWeights):
        parse_header(raw, 8 + len(raw))


def test_a_folder_of_shards_is_added_up(weights: Path) -> None:
    (weights.parent / "second.safetensors").write_bytes(weights.read_bytes())
    assert weights_bytes(weights.parent) == 2 * 116
    empty = weights.parent / "empty"
    empty.mkdir()
    with pytest.raises(BrokenWeights, match="holds no"):
        weights_bytes(empty)

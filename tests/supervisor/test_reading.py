"""Cases of drivers that refuse, shift or lie; the fake stands in for NVML."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusup.supervisor.nvml import NvmlTrouble
from gpusup.supervisor.reading import DeviceReader, find_devices, text_of

GIB = 2**30

_spec = importlib.util.spec_from_file_location("fake_nvml", Path(__file__).parent / "fake_nvml.py")
assert _spec is not None
assert _spec.loader is not None
fake_nvml = importlib.util.module_from_spec(_spec)
sys.modules["fake_nvml"] = fake_nvml
_spec.loader.exec_module(fake_nvml)


@contextlib.contextmanager
def calling(label: str) -> Iterator[None]:
    yield


def reader(world: dict[str, Any], handle: tuple[int, ...] = (0,)) -> DeviceReader:
    library = fake_nvml.Fake(world)
    return DeviceReader(library, handle, name="gpu0", uuid="GPU-a", index=0, calling=calling)


def world(**more: Any) -> dict[str, Any]:
    return {"devices": [fake_nvml.gpu(0, **more)]}


def test_everything_a_healthy_card_tells() -> None:
    sample = reader(world(processes=[[7, GIB], [8, None]], power=250_000)).read(1.0)
    assert (sample.total, sample.free, sample.error) == (24 * GIB, 20 * GIB, "")
    assert sample.processes is not None
    assert [(p.pid, p.used) for p in sample.processes] == [(7, GIB), (8, None)]
    assert (sample.utilisation, sample.power, sample.recovery_action) == (0.5, 250.0, 0)


@pytest.mark.parametrize(
    "trouble",
    [
        {},
        {"memory v2": "unsupported"},
        {"memory v2": "unknown"},  # every other time
    ],
)
def test_the_figures_are_the_same_by_either_version_of_the_call(trouble: dict[str, str]) -> None:
    one = reader(world(trouble=trouble, free=int(2.2 * GIB)))
    for turn in range(6):
        sample = one.read(float(turn) / 10)
        assert (sample.total, sample.free, sample.error) == (24 * GIB, int(2.2 * GIB), "")


@pytest.mark.parametrize("kind", ["unsupported", "permission"])
def test_memory_that_cannot_be_had_is_absent_and_said(kind: str) -> None:
    one = reader(world(trouble={"memory v1": kind, "memory v2": kind}))
    for turn in range(2):
        sample = one.read(float(turn))
        assert (sample.total, sample.free) == (None, None)
        assert "not supported" in sample.error


@pytest.mark.parametrize("figures", [(0, 0), (5, 6), (2**60, 1)])
def test_absurd_figures_are_absent_and_quoted(figures: tuple[int, int]) -> None:
    sample = reader(world(total=figures[0], free=figures[1])).read(0.0)
    assert sample.total is None
    assert f"{figures[0]} total, {figures[1]} free" in sample.error


def test_missing_sensors_are_absent_not_zero() -> None:
    refused = dict.fromkeys(
        ("utilisation", "temperature", "power", "ecc", "remapped", "recovery action"),
        "unsupported",
    )
    sample = reader(world(trouble={**refused, "processes": "permission"})).read(0.0)
    assert sample.error == ""
    assert sample.processes is None
    assert sample.utilisation is sample.temperature is sample.power is None
    assert sample.ecc_uncorrected is sample.recovery_action is sample.remap_failed is None


def test_a_lost_card_is_a_reading_and_a_lost_driver_is_not() -> None:
    assert reader(world(all_trouble="lost")).read(0.0).lost
    assert reader(world(all_trouble="reset")).read(0.0).recovery_action == 1
    with pytest.raises(NvmlTrouble, match="driver not loaded"):
        reader({**world(), "gone": True}).read(0.0)


def test_a_cut_card_is_there_as_its_slices_only() -> None:
    parent = fake_nvml.gpu(
        0,
        trouble={"memory v2": "permission", "memory v1": "permission"},
        slices=[
            {"uuid": "MIG-1", "total": 20 * GIB, "free": 19 * GIB, "processes": []},
            {"uuid": "MIG-2", "total": 20 * GIB, "free": 18 * GIB, "processes": [],
             "trouble": {"utilisation": "unsupported"}},
        ],
    )  # fmt: skip
    cut = {"devices": [parent, fake_nvml.gpu(1)]}
    found = find_devices(fake_nvml.Fake(cut), calling)
    assert [(d.name, d.uuid[:5]) for d in found] == [
        ("gpu0-mig0", "MIG-1"),
        ("gpu0-mig1", "MIG-2"),
        ("gpu1", "GPU-0"),
    ]
    sample = reader(cut, found[1].handle).read(0.0)
    assert (sample.total, sample.free, sample.utilisation) == (20 * GIB, 18 * GIB, None)


def test_texts_may_be_bytes() -> None:
    found = find_devices(fake_nvml.Fake({**world(), "bytes": True}), calling)
    assert found[0].uuid.startswith("GPU-")
    assert text_of(b"NVIDIA H200\0\0") == "NVIDIA H200"


def test_a_card_that_cannot_be_opened_keeps_its_number() -> None:
    cards = {"devices": [fake_nvml.gpu(0, closed=True), fake_nvml.gpu(1)]}
    found = find_devices(fake_nvml.Fake(cards), calling)
    assert [(d.name, d.handle is None) for d in found] == [("gpu0", True), ("gpu1", False)]

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpusup.conf.schema import DevicesConfig
from gpusup.supervisor.devices import (
    Baselines,
    CpuDevice,
    context_bytes,
    cpu_devices,
    cpu_sample,
    device_info,
    unknown_devices,
    used_devices,
    visible_devices,
)
from gpusup.supervisor.placement import CONTEXT_BYTES
from gpusup.supervisor.probe_wire import DeviceSample, ProcessUse
from gpusup.worker.wire import Memory

GIB = 2**30


@dataclass
class Found:
    uuid: str
    index: int
    slice_index: int = -1

    @property
    def name(self) -> str:
        return f"gpu{self.index}"


CARDS = [Found("GPU-aaaa-1", 0), Found("GPU-aabb-2", 1), Found("GPU-cccc-3", 2)]
CUT = [Found("MIG-1111", 0, 0), Found("MIG-2222", 0, 1), Found("GPU-dddd", 1)]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["gpu0", "gpu1", "gpu2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["gpu0", "gpu2"]),
        ("0,0", ["gpu0"]),
        ("1,7,2", ["gpu1"]),
        ("GPU-cccc-3", ["gpu2"]),
        ("gpu-cc", ["gpu2"]),
        ("GPU-aa", []),
        ("GPU-aab, 0", ["gpu0", "gpu1"]),
        ("void", []),
    ],
)
def test_an_inherited_choice_is_read_as_cuda_reads_it(
    visible: str | None, names: list[str]
) -> None:
    assert [d.name for d in visible_devices(CARDS, visible)] == names


def test_slices_are_chosen_by_their_own_uuid() -> None:
    assert [d.uuid for d in visible_devices(CUT, "MIG-2222")] == ["MIG-2222"]
    assert [d.uuid for d in visible_devices(CUT, "0")] == ["MIG-1111"]


def test_devices_in_use_go_by_name_or_uuid_and_what_names_nothing_is_told() -> None:
    assert [d.name for d in used_devices(CARDS, ["gpu2", "gpu-aaaa-1"])] == ["gpu0", "gpu2"]
    assert unknown_devices(CARDS, ["gpu0", "gpu9", "cpu", "cpu1"]) == ["gpu9"]
    assert unknown_devices(CARDS, None) == []


def test_cpu_slots_stand_in_where_there_is_no_gpu_or_where_they_are_named() -> None:
    auto = DevicesConfig(cpu_slots=2, memory={"cpu1": GIB})
    assert cpu_devices(auto, gpus=1) == []
    assert [(d.name, d.total) for d in cpu_devices(auto, gpus=0)] == [
        ("cpu0", 2 * GIB),
        ("cpu1", GIB),
    ]
    assert [d.name for d in cpu_devices(DevicesConfig(use=("gpu0", "cpu0")), gpus=1)] == ["cpu0"]
    assert len(cpu_devices(DevicesConfig(use=("cpu",), cpu_slots=3), gpus=1)) == 3


def sample(**more: object) -> DeviceSample:
    figures: dict[str, object] = {"total": 24 * GIB, "free": 10 * GIB, "processes": ()}
    return DeviceSample(
        **{"name": "gpu0", "uuid": "GPU-a", "index": 0, "at": 100.0, **figures, **more}  # type: ignore[arg-type]
    )


def test_a_fresh_reading_is_known_and_counts_the_cache_as_free() -> None:
    worker = Memory(allocated=3 * GIB, reserved=11 * GIB, static=2 * GIB, context=GIB // 2)
    info = device_info(sample(), {"gpu0": worker}, {"p0": 5}, 100.5)
    assert info.known
    assert info.source == "nvml"
    assert info.reclaimable == 8 * GIB
    assert info.watermark == pytest.approx(1 - 18 / 24)
    assert info.dynamic == GIB
    assert info.leased == {"p0": 5}
    assert info.age_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "bad",
    [
        {"at": 90.0},
        {"total": None, "free": None},
        {"total": 0, "free": 0},
        {"free": 30 * GIB},
        {"lost": True},
    ],
)
def test_old_missing_absurd_or_lost_is_unknown(bad: dict[str, object]) -> None:
    info = device_info(sample(**bad), [Memory()], {}, 101.0)
    assert not info.known
    assert info.source == "none"


def test_where_the_driver_refuses_the_workers_own_figures_serve() -> None:
    worker = Memory(device_total=20 * GIB, device_free=5 * GIB)
    info = device_info(sample(total=None, free=None), [worker], {}, 101.0)
    assert (info.known, info.source, info.total) == (True, "worker", 20 * GIB)
    assert info.watermark == pytest.approx(0.75)


def test_a_lost_device_is_unknown_whatever_its_workers_say() -> None:
    worker = Memory(device_total=20 * GIB, device_free=5 * GIB)
    assert not device_info(sample(lost=True), [worker], {}, 101.0).known


def test_strangers_are_counted_by_pid_and_in_containers_by_what_is_left() -> None:
    worker = Memory(allocated=4 * GIB, reserved=4 * GIB, context=GIB)
    listed = sample(processes=(ProcessUse(7, 5 * GIB), ProcessUse(8, 6 * GIB)))
    assert device_info(listed, [worker], {}, 101.0, our_pids=[7]).foreign == 6 * GIB
    # In a container the driver's numbers are the host's: 14 used, 5 ours, 1 idle.
    info = device_info(listed, [worker], {}, 101.0, our_pids=[12], baseline=GIB)
    assert info.foreign == 8 * GIB


def test_a_context_is_what_the_driver_counts_and_torch_does_not() -> None:
    worker = Memory(allocated=3 * GIB, reserved=4 * GIB, device_total=24 * GIB)
    assert context_bytes(worker, 7, [ProcessUse(8, GIB), ProcessUse(7, 5 * GIB)]) == GIB
    # A reading that is older than a worker's growth.
    assert context_bytes(worker, 7, [ProcessUse(7, 3 * GIB)]) == 0
    for silent in (None, [], [ProcessUse(7, None)], [ProcessUse(12, 5 * GIB)]):
        assert context_bytes(worker, 7, silent) == CONTEXT_BYTES
    assert context_bytes(Memory(), 7, [ProcessUse(7, GIB)]) == 0


def test_a_held_worker_has_its_context_before_it_ever_spoke_of_memory() -> None:
    assert context_bytes(Memory(), 7, [ProcessUse(7, GIB)], opened=True) == GIB
    assert context_bytes(Memory(), 7, None, opened=True) == CONTEXT_BYTES


def test_a_budget_is_the_device() -> None:
    worker = Memory(allocated=4 * GIB, reserved=4 * GIB, context=GIB)
    info = device_info(sample(total=140 * GIB, free=30 * GIB), [worker], {}, 101.0, budget=24 * GIB)
    assert (info.total, info.free, info.foreign) == (24 * GIB, 19 * GIB, 0)
    # Strangers left less than the budget.
    info = device_info(sample(total=140 * GIB, free=10 * GIB), [worker], {}, 101.0, budget=24 * GIB)
    assert (info.free, info.foreign) == (10 * GIB, 9 * GIB)


def test_a_cpu_slot_is_a_device_of_its_own_limit() -> None:
    worker = Memory(allocated=GIB, reserved=GIB)
    reading = cpu_sample(CpuDevice(name="cpu0", total=4 * GIB), [worker], 100.0)
    info = device_info(reading, [worker], {}, 100.0)
    assert (info.kind, info.source, info.watermark) == ("cpu", "resident", 0.25)
    over = cpu_sample(CpuDevice(name="cpu0", total=4 * GIB), [Memory(allocated=9 * GIB)], 1.0)
    assert over.free == 0


def test_the_idle_baseline_is_learned_only_while_nobody_of_ours_is_there() -> None:
    baselines = Baselines()
    for turn in range(5):
        baselines.note(sample(at=float(turn)), 1)
    assert baselines.idle_at("gpu0") is None
    for _ in range(9):  # the same reading, over and over
        baselines.note(sample(free=23 * GIB), 0)
    assert baselines.idle_at("gpu0") is None
    for turn in range(3):
        baselines.note(sample(at=float(turn), free=23 * GIB), 0)
    assert baselines.baseline("gpu0") == GIB
    assert baselines.idle_at("gpu0") == GIB + 2**28


def test_a_stranger_that_starts_between_two_reads_does_not_spoil_the_baseline() -> None:
    baselines = Baselines()
    stranger = (ProcessUse(9, 5 * GIB),)
    baselines.note(sample(at=1.0, free=23 * GIB), 0)
    baselines.note(sample(at=2.0, free=23 * GIB, processes=stranger), 0)
    baselines.note(sample(at=3.0, free=18 * GIB, processes=stranger), 0)
    assert baselines.baseline("gpu0") is None
    for turn in (4.0, 5.0):
        baselines.note(sample(at=turn, free=18 * GIB, processes=stranger), 0)
    assert baselines.baseline("gpu0") == GIB

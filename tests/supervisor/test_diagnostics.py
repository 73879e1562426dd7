from __future__ import annotations

import json

from gpusup.supervisor.diagnostics import head, memory_record
from gpusup.supervisor.probe_wire import DeviceSample, ProcessUse
from gpusup.supervisor.wire import DeviceInfo, Shed
from gpusup.worker.wire import Counters, Load, Memory, Pong

GIB = 2**30
SHED = Shed(
    device="gpu0", before="queue", after="shed", watermark=0.91, projected=0.935, model="m",
    request_id="r-9", cost=GIB, leased=2 * GIB, in_flight=3,
)  # fmt: skip
INFO = DeviceInfo(
    name="gpu0", uuid="GPU-a", kind="cuda", total=24 * GIB, free=2 * GIB, reclaimable=0,
    dynamic=0, watermark=0.91, known=True, age_s=0.12345, foreign=8 * GIB, source="nvml",
)  # fmt: skip


def pong(*running: str) -> Pong:
    memory = Memory(allocated=12 * GIB, reserved=13 * GIB, context=GIB)
    return Pong(1, memory, Counters(), Load(0, 1, 1, 0.0), running=list(running))


def test_the_record_says_who_had_the_memory_and_what_ran() -> None:
    sample = DeviceSample(
        name="gpu0",
        uuid="GPU-a",
        index=0,
        at=0.0,
        processes=(ProcessUse(11, None), ProcessUse(12, 14 * GIB), ProcessUse(99, 8 * GIB)),
    )
    record = memory_record(
        SHED,
        info=INFO,
        sample=sample,
        workers={"gpu0": pong("r-1", "r-2")},
        pids={12: "gpu0"},
        names={99: "python train.py"},
        summaries={"gpu0": "|====|\n| Allocated | 12 GiB |\n"},
        at=1.0,
    )
    json.dumps(record)
    assert record["running"] == ["r-1", "r-2"]
    assert record["processes"][0] == {
        "pid": 12, "name": "", "slot": "gpu0", "foreign": False, "used": 14 * GIB,
    }  # fmt: skip
    assert record["processes"][1]["foreign"]
    assert record["processes"][1]["name"] == "python train.py"
    assert record["workers"][0]["reserved"] == 13 * GIB
    assert record["top_allocations"] == {"gpu0": ["| Allocated | 12 GiB |"]}


def test_a_blind_record_is_a_record_too() -> None:
    record = memory_record(SHED, info=None, sample=None, workers={}, pids={}, names={})
    assert record["after"] == "shed"
    assert "processes" not in record


def test_a_long_summary_is_cut() -> None:
    assert len(head("\n".join(f"line {n}" for n in range(500)))) == 40

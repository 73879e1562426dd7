"""Which devices are ours, and what the rest of gpusup is told about each. Pure.

A GPU is known by its UUID; "gpu0" is what people call it, numbered as the driver numbers. An
inherited CUDA_VISIBLE_DEVICES is the whole universe: what it hides is somebody else's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

from gpusup.conf.schema import DevicesConfig
from gpusup.worker.wire import Memory

from .layout import DevicePlace
from .ledger import IDLE_TOLERANCE_BYTES, IDLE_TOLERANCE_SHARE
from .placement import CONTEXT_BYTES
from .probe_wire import DeviceSample, ProcessUse
from .watermark import plausible, reclaimable, watermark
from .wire import DeviceInfo


class Candidate(Protocol):
    """A GPU or slice on offer. `slice_index` -1: a whole GPU."""

    @property
    def name(self) -> str: ...

    uuid: str
    index: int
    slice_index: int


C = TypeVar("C", bound=Candidate)

_CPU: Final = re.compile(r"^cpu\d*$")


def visible_devices(found: Sequence[C], visible: str | None) -> list[C]:
    """What CUDA_VISIBLE_DEVICES leaves, in NVML's order: indices, UUIDs or unambiguous prefixes.

    As CUDA reads it: what follows the first entry that names nothing is ignored. An index means a
    whole GPU, or the first slice of one that is cut.
    """
    if visible is None:
        return list(found)
    chosen: list[C] = []
    for word in visible.split(","):
        matches = _named(found, word.strip())
        if not matches:
            break
        chosen += [device for device in matches if device not in chosen]
    return [device for device in found if device in chosen]


def _named(found: Sequence[C], word: str) -> list[C]:
    if word.isdecimal():
        return [d for d in found if d.index == int(word)][:1]
    if not word.upper().startswith(("GPU-", "MIG-")):
        return []
    matches = [d for d in found if d.uuid.lower().startswith(word.lower())]
    if len(matches) > 1 and not any(d.uuid.lower() == word.lower() for d in matches):
        return []  # ambiguous, which is as good as naming nothing
    return matches[:1]


def used_devices(found: Sequence[C], use: Collection[str] | None) -> list[C]:
    """Those that the configuration's `devices.use` names (by name or UUID); None: all."""
    if use is None:
        return list(found)
    wanted = {word.lower() for word in use}
    return [d for d in found if {d.name.lower(), d.uuid.lower()} & wanted]


def unknown_devices(found: Sequence[C], use: Collection[str] | None) -> list[str]:
    """Words of `devices.use` that name no device here."""
    known = {d.name.lower() for d in found} | {d.uuid.lower() for d in found}
    return [word for word in use or () if word.lower() not in known and not _CPU.match(word)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDevice:
    """A slot on the host CPU that stands in for a device. `total`: bytes its workers may take."""

    name: str
    total: int


#: By name: the device, and what a CPU slot has of the host's.
Places = dict[str, tuple[DevicePlace, CpuDevice | None]]


def cpu_devices(config: DevicesConfig, *, gpus: int) -> list[CpuDevice]:
    """The CPU slots: those named in `devices.use` ("cpu": all of them), or, with "auto", all of
    them when there is no GPU."""
    names = [f"cpu{n}" for n in range(config.cpu_slots)]
    if config.use == "auto":
        wanted = [] if gpus else names
    elif "cpu" in config.use:
        wanted = names
    else:
        wanted = [word for word in config.use if _CPU.match(word)]
    return [
        CpuDevice(name=name, total=config.memory.get(name, config.cpu_memory)) for name in wanted
    ]


def cpu_sample(device: CpuDevice, workers: Iterable[Memory], now: float) -> DeviceSample:
    """A CPU slot as a device: used is what its workers hold resident, the rest is free."""
    used = sum(max(0, memory.allocated) for memory in workers)
    return DeviceSample(
        name=device.name,
        uuid="",
        index=int(device.name.removeprefix("cpu") or 0),
        at=now,
        kind="cpu",
        product="host CPU",
        total=device.total,
        free=max(0, device.total - used),
    )


Source = Literal["nvml", "worker", "resident", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bytes of a device, from the best source there is. `source` "none": nobody can tell."""

    total: int
    free: int
    source: Source


def figures(
    sample: DeviceSample | None, workers: Sequence[Memory], *, fresh: bool, budget: int = 0
) -> Figures:
    """NVML's figures while they are fresh and make sense, else those of the workers' own runtime.

    With a `budget` (devices.memory) the device is taken to be that large: what our workers hold
    counts against the budget, and no more is free than is really free.
    """
    total = free = 0
    source: Source = "none"
    if sample is not None and fresh and not sample.lost and plausible(sample.total, sample.free):
        total, free = sample.total or 0, sample.free or 0
        source = "nvml" if sample.kind == "cuda" else "resident"
    else:
        told = [m for m in workers if plausible(m.device_total, m.device_free)]
        if told and not (sample is not None and sample.lost):
            # They may have asked at different moments; the most careful answer is the right one.
            total = min(m.device_total for m in told)
            free = min(m.device_free for m in told)
            source = "worker"
        elif sample is not None and sample.total and plausible(sample.total, sample.free):
            total, free = sample.total, sample.free or 0
    if 0 < budget < total:
        free = min(free, max(0, budget - held(workers)))
        total = budget
    return Figures(total=total, free=free, source=source)


def held(workers: Iterable[Memory]) -> int:
    """Bytes of the device that our workers hold: their contexts and what torch has reserved."""
    return sum(max(0, m.context) + max(m.reserved, m.allocated, 0) for m in workers)


def context_bytes(
    memory: Memory, pid: int, processes: Sequence[ProcessUse] | None, *, opened: bool = False
) -> int:
    """What a worker holds of a GPU beside what torch counts: its CUDA context and its kernels.

    By the driver's list, where it gives sizes and knows the worker by the same number (in a
    container it may not); else as large as such a context is. 0: the worker has none yet.
    `opened`: it has one before it ever spoke of its memory (a held worker).
    """
    if not memory.device_total and not opened:
        return 0
    used = next((p.used for p in processes or () if p.pid == pid), None)
    return CONTEXT_BYTES if used is None else max(0, used - max(memory.reserved, memory.allocated))


def foreign_bytes(
    total: int,
    free: int,
    workers: Sequence[Memory],
    *,
    baseline: int = 0,
    processes: Sequence[ProcessUse] | None = None,
    our_pids: Collection[int] = (),
) -> int:
    """Bytes held by processes that are none of ours.

    By the driver's list where it gives sizes and knows our processes by the same numbers (in a
    container it may not), else by what is left when ours and the idle baseline are taken off.
    """
    if processes is not None and (not our_pids or {p.pid for p in processes} & set(our_pids)):
        others = [p.used for p in processes if p.pid not in our_pids]
        if all(used is not None for used in others):
            return sum(used or 0 for used in others)
    return max(0, total - free - baseline - held(workers))


def device_info(
    sample: DeviceSample,
    workers_memory: Mapping[str, Memory] | Sequence[Memory],
    leased: Mapping[str, int],
    now: float,
    *,
    stale_after: float = 3.0,
    budget: int = 0,
    baseline: int = 0,
    our_pids: Collection[int] = (),
) -> DeviceInfo:
    """What proxies are told about a device. `workers_memory`: the latest word of each worker on it.

    Not `known`: too old, unreadable or lost; then admission counts requests instead.
    """
    workers = (
        list(workers_memory.values())
        if isinstance(workers_memory, Mapping)
        else list(workers_memory)
    )
    age = max(0.0, now - sample.at)
    got = figures(sample, workers, fresh=age <= stale_after, budget=budget)
    # On the CPU allocated and reserved are the same resident memory: nothing can be trimmed away.
    reclaim = reclaimable(workers) if sample.kind == "cuda" else 0
    mark = watermark(got.total, got.free, reclaim) if got.source != "none" else None
    foreign = 0
    if sample.kind == "cuda" and plausible(sample.total, sample.free):
        foreign = foreign_bytes(
            sample.total or 0,
            sample.free or 0,
            workers,
            baseline=baseline,
            processes=sample.processes,
            our_pids=our_pids,
        )
        if 0 < budget == got.total:
            # Strangers matter only as far as they eat into what we may have.
            foreign = max(0, got.total - got.free - held(workers))
    return DeviceInfo(
        name=sample.name,
        uuid=sample.uuid,
        kind=sample.kind,
        total=got.total,
        free=got.free,
        reclaimable=min(reclaim, max(0, got.total - got.free)),
        dynamic=sum(max(0, m.allocated - m.static) for m in workers),
        watermark=0.0 if mark is None else mark,
        known=mark is not None,
        age_s=age,
        leased=dict(leased),
        foreign=foreign,
        source=got.source,
    )


class IdleWatch:
    """Finds out what is in use on a device when nobody computes there.

    Memory and process list are read one after the other, and a process that starts in between
    would spoil the difference; so several readings in a row must agree.
    """

    AGREE: Final = 3
    WITHIN_BYTES: Final = 64 * 2**20

    def __init__(self) -> None:
        self._readings: list[int] = []
        self._at = -1.0

    def note(self, sample: DeviceSample, our_workers: int) -> int | None:
        """Bytes in use without any process, once that is certain; else None.

        `our_workers`: how many of ours there are, dead ones whose memory is not back included.
        """
        if sample.lost or not plausible(sample.total, sample.free) or our_workers:
            self._readings.clear()
            return None
        if sample.at == self._at:
            return None  # seen already; it can't agree with itself
        self._at = sample.at
        sizes = [process.used for process in sample.processes or ()]
        if any(size is None for size in sizes):
            self._readings.clear()
            return None
        used = (sample.total or 0) - (sample.free or 0) - sum(size or 0 for size in sizes)
        self._readings = [*self._readings, used][-self.AGREE :]
        if len(self._readings) < self.AGREE:
            return None
        low, high = min(self._readings), max(self._readings)
        return high if low >= 0 and high - low <= self.WITHIN_BYTES else None


class Baselines:
    """Per device: what is in use there when it is idle. The device's own figures, never a budget's.

    The lowest that was ever certain counts: what lies above it has a holder, known or not.
    """

    def __init__(self) -> None:
        self._watches: dict[str, IdleWatch] = {}
        self._lowest: dict[str, int] = {}
        self._totals: dict[str, int] = {}

    def note(self, sample: DeviceSample, our_workers: int) -> None:
        """Call for every sample, or often with the latest; `our_workers` as in IdleWatch.note."""
        idle = self._watches.setdefault(sample.name, IdleWatch()).note(sample, our_workers)
        if idle is not None:
            self._lowest[sample.name] = min(idle, self._lowest.get(sample.name, idle))
            self._totals[sample.name] = sample.total or 0

    def export(self) -> dict[str, tuple[int, int]]:
        return {name: (lowest, self._totals[name]) for name, lowest in self._lowest.items()}

    def restore(self, exported: Mapping[str, Sequence[int]]) -> None:
        """With workers on it a device is never seen idle again."""
        for name, (lowest, total) in exported.items():
            self._lowest[name], self._totals[name] = lowest, total

    def baseline(self, device: str) -> int | None:
        return self._lowest.get(device)

    def idle_at(self, device: str) -> int | None:
        """Bytes in use up to which the device counts as idle; None: never seen idle."""
        if device not in self._lowest:
            return None
        return self._lowest[device] + max(
            IDLE_TOLERANCE_BYTES, int(IDLE_TOLERANCE_SHARE * self._totals[device])
        )

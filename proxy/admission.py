"""Whether a device can take a request now: what it costs, what is promised, which band that makes.

Pure. Bytes and shares of a device; DESIGN's formulas:

    projected = watermark + (leased, not yet allocated + cost of this request) / total
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpusup.conf.schema import WatermarkConfig
from gpusup.supervisor.wire import Band, DeviceInfo

#: What a shape that was never measured may cost beyond its share of one that was.
MARGIN: Final = 1.2


class Peak(NamedTuple):
    shape: tuple[int, ...]
    datatype: str
    rows: int
    bytes: int


def parse_peaks(peaks: Mapping[str, int]) -> list[Peak]:
    """ "224x224x3/uint8/8" -> Peak. What can't be read is left out; a scalar's shape is empty."""
    found = []
    for key, size in peaks.items():
        shape, _, rest = key.partition("/")
        datatype, _, rows = rest.rpartition("/")
        try:
            dims = tuple(int(d) for d in shape.split("x") if d)
            found.append(Peak(dims, datatype.lower(), int(rows), size))
        except ValueError:
            continue
    return found


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= max(1, dim)
    return count


class Costs:
    """Device bytes of a request, by the peaks measured for its model."""

    def __init__(self, peaks: Mapping[str, int]) -> None:
        self._peaks = [p for p in parse_peaks(peaks) if p.bytes > 0]
        self._known: dict[tuple[tuple[int, ...] | None, str, int], int] = {}
        #: The most that one batch of this model was seen to take: a worker computes one at a time.
        self.batch = max((p.bytes for p in self._peaks), default=0)

    def of(self, shape: tuple[int, ...] | None, datatype: str, rows: int) -> int:
        """`shape` without the rows, None for opaque bytes, which may turn out as any bucket."""
        if not self._peaks:
            return 0
        key = (shape, datatype, rows)
        cost = self._known.get(key)
        if cost is None:
            if len(self._known) > 4096:
                self._known.clear()  # clients choose shapes
            cost = self._known[key] = self._work_out(shape, datatype.lower(), rows)
        return cost

    def _work_out(self, shape: tuple[int, ...] | None, datatype: str, rows: int) -> int:
        if shape is None:
            groups = {(p.shape, p.datatype) for p in self._peaks}
            return max(self._bucket(s, d, rows) for s, d in groups)
        same = [p for p in self._peaks if p.shape == shape]
        if same:
            dtypes = {p.datatype for p in same}
            chosen = datatype if datatype in dtypes else max(dtypes)
            return self._bucket(shape, chosen, rows)
        # By elements from the nearest measured shape, and a margin: kernels may need work space.
        wanted = _elements(shape)
        near = min(self._peaks, key=lambda p: (abs(_elements(p.shape) - wanted), p.shape))
        measured = self._bucket(near.shape, near.datatype, rows)
        return int(measured * max(1.0, wanted / _elements(near.shape)) * MARGIN)

    def _bucket(self, shape: tuple[int, ...], datatype: str, rows: int) -> int:
        """The next larger measured batch of this bucket, or the largest one scaled up."""
        mine = [p for p in self._peaks if p.shape == shape and p.datatype == datatype]
        larger = [p for p in mine if p.rows >= rows]
        if larger:
            return min(larger, key=lambda p: p.rows).bytes
        most = max(mine, key=lambda p: p.rows)
        return int(most.bytes * rows / max(1, most.rows) * MARGIN)


class _Held:
    __slots__ = ("biggest", "cap", "count", "effective", "total")

    def __init__(self) -> None:
        self.total = 0
        self.count = 0
        self.biggest = 0
        self.cap = 0  # 0: none
        self.effective = 0


def _effective(total: int, biggest: int, cap: int) -> int:
    """A worker computes one batch at a time: beyond the largest one, work there waits."""
    if not cap:
        return total
    most = max(cap, biggest)
    return most if total > most else total


class Ledger:
    """Leases for this proxy's work in flight, per device and worker. `total`: of all devices."""

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[str, dict[str, _Held]] = {}
        self._sums: dict[str, int] = {}

    def leased(self, device: str) -> int:
        return self._sums.get(device, 0)

    def all(self) -> dict[str, int]:
        return {device: size for device, size in self._sums.items() if size}

    def take(self, device: str, worker: str, cost: int, *, cap: int, total: int) -> bool:
        """Lease `cost` bytes. False, and nothing changed, if that is more than the device has.

        `cap`: the most this worker's batch takes; `total`: of the device. 0: unknown.
        """
        if cost <= 0:
            return True
        workers = self._held.get(device)
        if workers is None:
            workers = self._held[device] = {}
        held = workers.get(worker)
        if held is None:
            held = _Held()
        biggest = max(held.biggest, cost)
        effective = _effective(held.total + cost, biggest, cap)
        more = effective - held.effective
        leased = self._sums.get(device, 0) + more
        if total and leased > total:
            return False
        workers[worker] = held
        held.total += cost
        held.count += 1
        held.biggest = biggest
        held.cap = cap
        held.effective = effective
        self._sums[device] = leased
        self.total += more
        return True

    def give(self, device: str, worker: str, cost: int) -> None:
        """Raises ValueError for what was not taken."""
        if cost <= 0:
            return
        held = self._held.get(device, {}).get(worker)
        if held is None or held.total < cost:
            raise ValueError(f"{cost} bytes on {device} were not leased for {worker}")
        held.total -= cost
        held.count -= 1
        if held.count:
            effective = _effective(held.total, held.biggest, held.cap)
        else:
            del self._held[device][worker]
            effective = 0
        less = held.effective - effective
        held.effective = effective
        self._sums[device] -= less
        self.total -= less


@dataclass(frozen=True, slots=True)
class BandChange:
    device: str
    before: Band
    after: Band
    watermark: float
    projected: float


class Bands:
    """The bands of all devices; a band is left `hysteresis` below where it began."""

    def __init__(self, config: WatermarkConfig, ledger: Ledger, proxy: str) -> None:
        self._config = config
        self._ledger = ledger
        self._proxy = proxy
        self.devices: dict[str, DeviceInfo] = {}
        self.bands: dict[str, Band] = {}
        self._easy_below = math.inf

    def update(self, devices: Iterable[DeviceInfo]) -> list[BandChange]:
        self.devices = {d.name: d for d in devices}
        self.bands = {name: band for name, band in self.bands.items() if name in self.devices}
        return self.refresh()

    def refresh(self) -> list[BandChange]:
        """Where each device stands with what is leased now. To be told to the supervisor."""
        changes = []
        for name, info in self.devices.items():
            before = self.bands.get(name, "normal")
            after = self.bands[name] = self.judge(name, 0)
            if after != before:
                changes.append(
                    BandChange(name, before, after, info.watermark, self.projected(name, 0))
                )
        self._easy_below = min((self._slack(name) for name in self.devices), default=math.inf)
        return changes

    def easy(self, cost: int) -> bool:
        """Whether every device stays in its normal band with `cost` more, wherever our leases are:
        then none has to be looked at."""
        return self._ledger.total + cost < self._easy_below

    def _slack(self, device: str) -> float:
        """Bytes of our leases up to which it surely stays in the normal band."""
        band = self.bands[device]
        if band != "normal":
            return math.inf if band == "unknown" else 0.0
        info = self.devices[device]
        seen = max(0, self._others(info) - info.dynamic)
        return int((self._config.queue - info.watermark) * info.total) - seen

    def _others(self, info: DeviceInfo) -> int:
        return sum(size for proxy, size in info.leased.items() if proxy != self._proxy)

    def pending(self, device: str) -> int:
        """Leased by all proxies and not yet seen as allocated."""
        info = self.devices[device]
        return max(0, self._ledger.leased(device) + self._others(info) - info.dynamic)

    def projected(self, device: str, cost: int) -> float:
        info = self.devices.get(device)
        if info is None or info.total <= 0:
            return 0.0
        return info.watermark + (self.pending(device) + cost) / info.total

    def headroom(self, device: str) -> float:
        return 1.0 - self.projected(device, 0)

    def judge(self, device: str, cost: int) -> Band:
        """The band that a request of `cost` bytes would make."""
        info = self.devices.get(device)
        if info is None or not info.known or info.total <= 0:
            return "unknown"
        at = self.bands.get(device, "normal")
        config = self._config
        share = self.projected(device, cost)
        if share >= config.shed - (config.hysteresis if at == "shed" else 0.0):
            return "shed"
        if share >= config.queue - (config.hysteresis if at in ("queue", "shed") else 0.0):
            return "queue"
        return "normal"

    def eases(self, device: str, cost: int, *, settling: bool = False) -> bool:
        """Whether it would be below the shed mark once what runs now is done: waiting helps.

        `settling`: something ended so recently that the figures may still be of before.
        """
        info = self.devices.get(device)
        if info is None or info.total <= 0:
            return False
        if not (settling or self._ledger.leased(device) or any(info.leased.values())):
            return False  # nothing runs: what is held there is not going to be given back by itself
        return info.watermark + (cost - info.dynamic) / info.total < self._config.shed

    def can_ever(self, device: str, cost: int) -> bool:
        """Whether it would fit if all our work were done and all caches trimmed."""
        info = self.devices.get(device)
        if info is None or not info.known or info.total <= 0:
            return True
        return cost <= info.free + info.reclaimable + info.dynamic

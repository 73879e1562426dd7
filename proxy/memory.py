"""What the dispatcher asks about device memory, and what it tells the supervisor about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from gpusup.conf.schema import WatermarkConfig
from gpusup.supervisor.wire import Band, DeviceInfo, FromProxy, Shed

from .admission import BandChange, Bands, Ledger
from .counts import Counts
from .errors import InputTooLarge, ShedLoad
from .workers import Entry, Worker

#: Records of shedding asked of the supervisor, per device and second; all are counted.
_SHEDS_TOLD = 20
#: A worker's figures reach us a few times a second: so long they may be of before its last batch.
_SETTLE_S = 1.0


class Memory:
    """`in_flight` says how many requests there are, for the records."""

    def __init__(
        self,
        config: WatermarkConfig,
        name: str,
        counts: Counts,
        tell: Callable[[FromProxy], None],
        in_flight: Callable[[], int],
    ) -> None:
        self._config = config
        self._counts = counts
        self._tell = tell
        self._in_flight = in_flight
        self._ledger = Ledger()
        self._bands = Bands(config, self._ledger, name)
        self._told: dict[str, tuple[int, int]] = {}
        self._given: dict[str, float] = {}  # device -> when a lease there last ended

    def on_devices(self, devices: Sequence[DeviceInfo]) -> None:
        self._changes(self._bands.update(devices))

    def _changes(self, changes: list[BandChange]) -> None:
        for change in changes:
            self._tell(
                Shed(
                    device=change.device,
                    before=change.before,
                    after=change.after,
                    watermark=change.watermark,
                    projected=change.projected,
                    leased=self._ledger.leased(change.device),
                    in_flight=self._in_flight(),
                )
            )

    def easy(self, cost: int) -> bool:
        """Whether a request of `cost` bytes may go to any device, without a look at each."""
        return self._bands.easy(cost)

    def band(self, cost: int, worker: Worker) -> Band:
        return self._bands.judge(worker.route.device, cost)

    def headroom(self, worker: Worker) -> float:
        return self._bands.headroom(worker.route.device)

    def best(self, devices: Collection[str], cost: int) -> Band:
        """The band of the device that can take it best. Raises InputTooLarge if none ever could."""
        found = {self._bands.judge(device, cost) for device in devices}
        if not found.isdisjoint(("normal", "unknown")):
            return "normal"
        if "queue" in found:
            return "queue"
        if not any(self._bands.can_ever(device, cost) for device in devices):
            infos = [self._bands.devices[device] for device in devices]
            most = max(d.free + d.reclaimable + d.dynamic for d in infos)
            raise InputTooLarge(
                f"the request needs about {cost} bytes on the device, "
                f"at most {most} can become free there"
            )
        return "shed"

    def eases(self, devices: Collection[str], cost: int) -> bool:
        """Whether only our own work in flight is in the way on one of them."""
        now = time.monotonic()
        return any(
            self._bands.eases(d, cost, settling=now - self._given.get(d, -_SETTLE_S) < _SETTLE_S)
            for d in devices
        )

    def take(self, worker: Worker, entry: Entry, cap: int) -> bool:
        """Lease the entry's cost there; False if the device has not so much to promise."""
        if not entry.cost:
            return True
        device = worker.route.device
        info = self._bands.devices.get(device)
        total = info.total if info is not None and info.known else 0
        return self._ledger.take(device, worker.key, entry.cost, cap=cap, total=total)

    def give(self, worker: Worker, entry: Entry) -> None:
        if entry.cost:
            self._ledger.give(worker.route.device, worker.key, entry.cost)
            self._given[worker.route.device] = time.monotonic()

    def shed(self, model: str, entry: Entry, devices: Sequence[str], soon: int) -> ShedLoad:
        """The refusal, after it was counted and told."""
        device = min(devices, key=lambda d: self._bands.projected(d, entry.cost))
        info = self._bands.devices[device]
        projected = self._bands.projected(device, entry.cost)
        self._counts.add("gpusup_shed_total", (model, device))
        self._changes(self._bands.refresh())
        self.tell_shed(model, entry, device)
        return ShedLoad(
            f"device {device} is at {projected:.1%} of {info.total} bytes with this request, "
            f"the limit is {self._config.shed:.1%}",
            retry_after_s=soon,
            extra={
                "device": device,
                "watermark": round(info.watermark, 4),
                "projected": round(projected, 4),
                "limit": self._config.shed,
                "free_bytes": info.free,
                "reclaimable_bytes": info.reclaimable,
                "total_bytes": info.total,
                "needed_bytes": entry.cost,
            },
        )

    def tell_shed(self, model: str, entry: Entry, device: str) -> None:
        """So that the supervisor trims and writes down how things stood."""
        second = int(entry.arrived)
        at, told = self._told.get(device, (0, 0))
        told = told + 1 if at == second else 1
        self._told[device] = (second, told)
        info = self._bands.devices.get(device)
        if told > _SHEDS_TOLD or info is None:
            return
        self._tell(
            Shed(
                device=device,
                before=self._bands.bands.get(device, "normal"),
                after=self._bands.judge(device, entry.cost),
                watermark=info.watermark,
                projected=self._bands.projected(device, entry.cost),
                model=model,
                request_id=entry.call.request_id,
                cost=entry.cost,
                leased=self._ledger.leased(device),
                in_flight=self._in_flight(),
            )
        )

    def leased(self) -> dict[str, int]:
        return self._ledger.all()

    def bands(self) -> dict[str, Band]:
        return dict(self._bands.bands)

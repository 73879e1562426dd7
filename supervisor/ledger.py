"""Who holds which bytes of a device, and whether another worker would fit. Pure.

Each worker is entered with what it may take (rest and peak). Before its first load that is an
estimate, `reserve`; afterwards it is measured, `settle`. NVML says what is in use now, the ledger
what has been promised: a worker that is still loading uses little and has been promised much. So a
device has room for what is neither in use nor promised.

Bytes that work in flight has leased live in the proxies and in the workers' own budgets; here is
only what the proxies last reported, for the eye.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpusup.conf.units import format_size

#: An idle device is back at its baseline when it is this close to it.
IDLE_TOLERANCE_BYTES: Final = 256 * 2**20
IDLE_TOLERANCE_SHARE: Final = 0.01


class OverCommitted(Exception):
    """More was asked for than the device has left."""


class Holding(NamedTuple):
    """What a worker may take. `settled`: measured, not an estimate."""

    device: str
    slot: str
    generation: int
    static: int
    peak: int
    settled: bool

    @property
    def bytes(self) -> int:
        return self.static + self.peak


@dataclass(slots=True)
class _Account:
    total: int
    baseline: int = 0
    baseline_seen: bool = False
    foreign: int = 0
    leased: dict[str, int] = field(default_factory=dict)


class Ledger:
    def __init__(self, *, safety: int = 0, share: float = 1.0) -> None:
        """Never promised: `safety` bytes of each device, and what lies above `share` of it."""
        self.safety = safety
        self.share = share
        self._accounts: dict[str, _Account] = {}
        self._holdings: dict[tuple[str, int], Holding] = {}

    # -- devices ----------------------------------------------------------------------------------

    def add_device(self, device: str, total: int, baseline: int = 0) -> None:
        """Enter a device, or correct its total (a budget changed, a MIG slice was cut anew)."""
        account = self._accounts.get(device)
        if account is None:
            self._accounts[device] = _Account(max(0, total), max(0, baseline), baseline > 0)
        else:
            account.total = max(0, total)

    # -- what the device shows --------------------------------------------------------------------

    def sample(self, device: str, used: int, ours: int) -> None:
        """Bytes in use on the device, and how many are our workers'. The rest is foreign."""
        account = self._accounts[device]
        account.foreign = max(0, used - ours - account.baseline)

    def idle(self, device: str, used: int) -> None:
        """Nobody computes on the device and `used` bytes are taken: that is its idle baseline.

        Absolute, so a wait for memory to come back does not depend on when it began. The lowest
        ever seen counts: what lies above it has a holder, known or not.
        """
        account = self._accounts[device]
        if not account.baseline_seen or used < account.baseline:
            account.baseline = max(0, used)
            account.baseline_seen = True

    def foreign(self, device: str) -> int:
        return self._accounts[device].foreign

    # -- what is promised -------------------------------------------------------------------------

    def free(self, device: str) -> int:
        """Bytes that could still be promised; never below 0."""
        account = self._accounts[device]
        plannable = int(self.share * account.total) - self.safety
        return max(0, plannable - account.baseline - account.foreign - self.promised(device))

    def promised(self, device: str) -> int:
        return sum(h.bytes for h in self._holdings.values() if h.device == device)

    def holders(self, device: str) -> tuple[Holding, ...]:
        return tuple(h for h in self._holdings.values() if h.device == device)

    def holding(self, slot: str, generation: int) -> Holding | None:
        return self._holdings.get((slot, generation))

    def reserve(
        self, device: str, slot: str, generation: int, static: int, peak: int = 0
    ) -> Holding:
        """Promise bytes to a worker about to start. Raises OverCommitted with both numbers."""
        if static < 0 or peak < 0:
            raise ValueError(f"{slot} can't hold {static} + {peak} bytes")
        previous = self._holdings.pop((slot, generation), None)
        if static + peak > (free := self.free(device)):
            if previous is not None:
                self._holdings[slot, generation] = previous
            raise OverCommitted(
                f"{slot} wants {format_size(static + peak)} on {device}, "
                f"{format_size(free)} are free"
            )
        holding = Holding(device, slot, generation, static, peak, settled=False)
        self._holdings[slot, generation] = holding
        return holding

    def settle(self, slot: str, generation: int, static: int, peak: int = 0) -> Holding | None:
        """The worker was measured: rest is a fact, its peak is cut to what is left.

        The result's `bytes` is the worker's cap. None: the worker is not entered (it is gone).
        """
        before = self._holdings.get((slot, generation))
        if before is None:
            return None
        account = self._accounts[before.device]
        others = self.promised(before.device) - before.bytes
        room = max(0, account.total - others)
        static = min(max(0, static), room)
        after = before._replace(static=static, peak=min(max(0, peak), room - static), settled=True)
        self._holdings[slot, generation] = after
        return after

    def release(self, slot: str, generation: int) -> None:
        """The worker's memory is back. Twice does no harm: ends are sometimes reported twice."""
        self._holdings.pop((slot, generation), None)

    # -- what the proxies say they have leased ----------------------------------------------------

    def leased(self, proxy: str, by_device: dict[str, int]) -> None:
        """The whole of what `proxy` has leased now; {} when it is gone."""
        for device, account in self._accounts.items():
            size = by_device.get(device, 0)
            if size > 0:
                account.leased[proxy] = size
            else:
                account.leased.pop(proxy, None)

    def leases(self, device: str) -> dict[str, int]:
        return dict(self._accounts[device].leased)

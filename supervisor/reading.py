"""Reads one device through a `Library` into a `DeviceSample`, whatever the driver refuses.

What a device doesn't support is asked once and then left out: absent, never 0. The figures that
admission lives by are read every time, the others now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, ParamSpec, TypeVar

from .nvml import Library, NvmlTrouble
from .probe_wire import DeviceSample, ProcessUse
from .watermark import plausible

P = ParamSpec("P")
T = TypeVar("T")

#: Notes the driver call that begins and, on leaving, that it came back.
Calling = Callable[[str], AbstractContextManager[None]]

OFTEN_S: Final = 1.0
SELDOM_S: Final = 5.0


def text_of(value: str | bytes) -> str:
    """Bindings differ: bytes, or str; some with the C string's padding."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text.rstrip("\0").strip()


class DeviceReader:
    def __init__(
        self,
        library: Library,
        handle: Any,
        *,
        name: str,
        uuid: str,
        index: int,
        calling: Calling,
        product: str = "",
        bus: str = "",
        mig: bool = False,
    ) -> None:
        self.handle = handle
        self.name = name
        self._library = library
        self._calling = calling
        self._fixed: dict[str, Any] = {
            "name": name,
            "uuid": uuid,
            "index": index,
            "product": product,
            "bus": bus,
            "mig": mig,
        }
        self._refused: set[str] = set()
        self._kept: dict[str, Any] = {}
        self._often_at = -OFTEN_S
        self._seldom_at = -SELDOM_S

    def read(self, now: float) -> DeviceSample:
        """Raises NvmlTrouble only for "gone": then no call of this process can succeed any more."""
        errors: list[str] = []
        try:
            figures: dict[str, Any] = self._memory(errors)
            figures["processes"] = self._processes()
            if now - self._often_at >= OFTEN_S:
                self._often_at = now
                self._read_often(errors)
            if now - self._seldom_at >= SELDOM_S:
                self._seldom_at = now
                self._read_seldom(errors)
        except NvmlTrouble as trouble:
            if trouble.kind == "lost":
                return DeviceSample(**self._fixed, at=now, lost=True, error=str(trouble))
            if trouble.kind == "reset":
                return DeviceSample(**self._fixed, at=now, recovery_action=1, error=str(trouble))
            raise
        return DeviceSample(**self._fixed, at=now, error="; ".join(errors), **figures, **self._kept)

    def hurry(self) -> None:
        """A fault was reported: read everything at the next turn."""
        self._often_at = self._seldom_at = float("-inf")

    def _memory(self, errors: list[str]) -> dict[str, Any]:
        failures: list[str] = []
        versions: tuple[Literal[1, 2], ...] = (2, 1)
        for version in versions:
            figures = self._ask(
                f"memory v{version}", failures, self._library.memory, self.handle, version
            )
            if figures is None:
                continue
            total, free = figures
            if plausible(total, free):
                return {"total": total, "free": free}
            failures.append(f"memory figures make no sense: {total} total, {free} free")
        errors += failures or ["memory is not supported"]
        return {}

    def _processes(self) -> tuple[ProcessUse, ...] | None:
        # Often refused for slices and in containers; that is no error of the device.
        rows = self._ask("processes", [], self._library.processes, self.handle)
        return None if rows is None else tuple(ProcessUse(pid, used) for pid, used in rows)

    def _read_often(self, errors: list[str]) -> None:
        library, handle, kept = self._library, self.handle, self._kept
        busy = self._ask("utilisation", errors, library.utilisation, handle)
        kept["utilisation"] = None if busy is None else busy / 100
        kept["temperature"] = self._ask("temperature", errors, library.temperature, handle)
        power = self._ask("power", errors, library.power, handle)
        kept["power"] = None if power is None else power / 1000

    def _read_seldom(self, errors: list[str]) -> None:
        library, handle, kept = self._library, self.handle, self._kept
        kept["ecc_uncorrected"] = self._ask("ECC", errors, library.ecc_uncorrected, handle)
        rows = self._ask("remapped rows", errors, library.remapped, handle)
        if rows is not None:
            kept["remapped"], kept["remap_pending"], kept["remap_failed"] = rows
        kept["recovery_action"] = self._ask(
            "recovery action", errors, library.recovery_action, handle
        )
        kept["persistence"] = self._ask("persistence", errors, library.persistence, handle)

    def _ask(
        self, what: str, errors: list[str], call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        if what in self._refused:
            return None
        try:
            with self._calling(f"{what} of {self.name}"):
                return call(*args, **kwargs)
        except NvmlTrouble as trouble:
            if trouble.kind in ("lost", "reset", "gone"):
                raise
            if trouble.kind in ("unsupported", "permission"):
                self._refused.add(what)
            else:
                errors.append(f"{what}: {trouble}")
            return None


# -- which devices there are ----------------------------------------------------------------------


class FoundDevice:
    """A GPU or MIG slice, before it is chosen and named. `handle` None: it could not be opened."""

    def __init__(
        self, handle: Any, *, uuid: str, index: int, product: str, bus: str, slice_index: int = -1
    ) -> None:
        self.handle = handle
        self.uuid = uuid
        self.index = index
        self.product = product
        self.bus = bus
        self.slice_index = slice_index

    @property
    def name(self) -> str:
        """gpu0, or gpu0-mig1 for a slice: as `nvidia-smi` numbers them."""
        base = f"gpu{self.index}"
        return base if self.slice_index < 0 else f"{base}-mig{self.slice_index}"


def find_devices(library: Library, calling: Calling) -> list[FoundDevice]:
    """All GPUs; one that is cut into slices is there only as its slices.

    Raises NvmlTrouble where not even the list can be had.
    """

    def ask(what: str, call: Callable[[Any], str | bytes], handle: Any) -> str:
        try:
            with calling(what):
                return text_of(call(handle))
        except NvmlTrouble as trouble:
            if trouble.kind == "gone":
                raise
            return ""

    def is_cut(handle: Any) -> bool:
        try:
            with calling("MIG mode"):
                return library.mig_mode(handle)
        except NvmlTrouble as trouble:
            if trouble.kind == "gone":
                raise
            return False

    with calling("list of devices"):
        handles = library.devices()
    found: list[FoundDevice] = []
    for index, handle in enumerate(handles):
        if handle is None:
            # Listed all the same, so that the ones after it keep their names.
            found.append(FoundDevice(None, uuid="", index=index, product="", bus=""))
            continue
        uuid = ask(f"UUID of gpu{index}", library.uuid, handle)
        product = ask(f"name of gpu{index}", library.product, handle)
        bus = ask(f"bus of gpu{index}", library.bus, handle)
        if not is_cut(handle):
            found.append(FoundDevice(handle, uuid=uuid, index=index, product=product, bus=bus))
            continue
        for number, part in enumerate(library.slices(handle)):
            what = f"gpu{index}-mig{number}"
            found.append(
                FoundDevice(
                    part,
                    uuid=ask(f"UUID of {what}", library.uuid, part),
                    index=index,
                    product=ask(f"name of {what}", library.product, part) or product,
                    bus=bus,
                    slice_index=number,
                )
            )
    return found

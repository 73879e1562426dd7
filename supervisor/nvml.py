"""The one door to NVML. Only the probe process opens it: calls in here may block for ever.

`Library` is what the probe needs, so that a stand-in can take NVML's place. Handles are opaque.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

#: unsupported: this device has no such figure · permission: not for us (a MIG slice's parent, a
#: container) · lost: off the bus · reset: needs a reset · gone: the driver was unloaded or
#: exchanged under us · absent: there is no NVML here · unknown: anything else
Trouble = Literal["unsupported", "permission", "lost", "reset", "gone", "absent", "unknown"]


class NvmlTrouble(Exception):
    def __init__(self, kind: Trouble, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Library(Protocol):
    """Every method may raise NvmlTrouble. Texts may be bytes: older bindings return those."""

    def init(self) -> None: ...
    def versions(self) -> tuple[str | bytes, str | bytes]:
        """Of driver and NVML."""
        ...

    def devices(self) -> Sequence[Any]:
        """Handles of the whole GPUs, in NVML's order. One that can't be opened is None."""
        ...

    def slices(self, handle: Any) -> Sequence[Any]:
        """Handles of its MIG slices; empty without MIG."""
        ...

    def mig_mode(self, handle: Any) -> bool: ...
    def uuid(self, handle: Any) -> str | bytes: ...
    def product(self, handle: Any) -> str | bytes: ...
    def bus(self, handle: Any) -> str | bytes: ...
    def memory(self, handle: Any, version: Literal[1, 2]) -> tuple[int, int]:
        """Total and free bytes."""
        ...

    def processes(self, handle: Any) -> Sequence[tuple[int, int | None]]:
        """Pid and bytes of those that compute or draw."""
        ...

    def utilisation(self, handle: Any) -> float:
        """Percent."""
        ...

    def temperature(self, handle: Any) -> float: ...
    def power(self, handle: Any) -> float:
        """Milliwatts."""
        ...

    def ecc_uncorrected(self, handle: Any) -> int: ...
    def remapped(self, handle: Any) -> tuple[int, bool, bool]:
        """Rows remapped; whether more are pending; whether one failed."""
        ...

    def recovery_action(self, handle: Any) -> int: ...
    def persistence(self, handle: Any) -> bool: ...
    def watch(self, handles: Sequence[Any]) -> Any:
        """Begin to collect the faults of these devices."""
        ...

    def wait(self, watch: Any, limit_s: float) -> tuple[str | bytes, int | None, bool] | None:
        """A fault as (UUID, Xid or None, whether the recovery action changed), or None in time."""
        ...

    def unwatch(self, watch: Any) -> None: ...


#: NVML error codes by what they mean to us.
_KINDS: dict[int, Trouble] = {
    1: "gone",  # uninitialized
    3: "unsupported",
    4: "permission",
    6: "unsupported",  # not found: no such slice, no such sensor
    9: "gone",  # driver not loaded
    12: "absent",  # library not found
    13: "unsupported",  # function not found: an older library
    15: "lost",
    16: "reset",
    18: "gone",  # library and kernel module differ: the driver was exchanged
    25: "unsupported",  # argument version mismatch: an older library
    28: "lost",  # no such GPU any more
}

_XID_EVENT = 0x8
_ECC_EVENT = 0x2
_UNAVAILABLE_EVENT = 0x4000
_ACTION_EVENT = 0x8000
_RECOVERY_ACTION_FIELD = 230


class Nvml:
    """The real one, through nvidia-ml-py (or an older `pynvml` that shadows it)."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlTrouble("absent", f"cannot import pynvml: {error}") from error
        self._nvml: Any = pynvml

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise NvmlTrouble("unsupported", f"{name} is not in this pynvml")
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            code = getattr(error, "value", None)
            kind = _KINDS.get(code, "unknown") if isinstance(code, int) else "unknown"
            raise NvmlTrouble(kind, f"{name}: {error}") from error
        except (OSError, AttributeError, TypeError, ValueError) as error:
            # ctypes and mismatched bindings fail in their own ways.
            raise NvmlTrouble("unknown", f"{name}: {error}") from error

    def init(self) -> None:
        try:
            self._call("nvmlInit")
        except NvmlTrouble as trouble:
            # At this point it is not gone, it was never there; a later try may find it.
            if trouble.kind == "unsupported":
                raise NvmlTrouble("absent", str(trouble)) from trouble
            raise

    def versions(self) -> tuple[str | bytes, str | bytes]:
        return self._call("nvmlSystemGetDriverVersion"), self._call("nvmlSystemGetNVMLVersion")

    def devices(self) -> Sequence[Any]:
        handles: list[Any] = []
        for index in range(int(self._call("nvmlDeviceGetCount"))):
            try:
                handles.append(self._call("nvmlDeviceGetHandleByIndex", index))
            except NvmlTrouble as trouble:
                if trouble.kind == "gone":
                    raise
                handles.append(None)
        return handles

    def slices(self, handle: Any) -> Sequence[Any]:
        found: list[Any] = []
        try:
            most = int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))
        except NvmlTrouble:
            return found
        for index in range(most):
            try:
                found.append(self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))
            except NvmlTrouble as trouble:
                if trouble.kind == "gone":
                    raise
        return found

    def mig_mode(self, handle: Any) -> bool:
        return bool(self._call("nvmlDeviceGetMigMode", handle)[0])

    def uuid(self, handle: Any) -> str | bytes:
        return self._text("nvmlDeviceGetUUID", handle)

    def product(self, handle: Any) -> str | bytes:
        return self._text("nvmlDeviceGetName", handle)

    def bus(self, handle: Any) -> str | bytes:
        info = self._call("nvmlDeviceGetPciInfo", handle)
        bus: str | bytes = info.busId
        return bus

    def _text(self, name: str, handle: Any) -> str | bytes:
        text: str | bytes = self._call(name, handle)
        return text

    def memory(self, handle: Any, version: Literal[1, 2]) -> tuple[int, int]:
        if version == 2:
            layout = getattr(self._nvml, "nvmlMemory_v2", None)
            if layout is None:
                raise NvmlTrouble("unsupported", "this pynvml has no second version of memory info")
            info = self._call("nvmlDeviceGetMemoryInfo", handle, layout)
        else:
            info = self._call("nvmlDeviceGetMemoryInfo", handle)
        return int(info.total), int(info.free)

    def processes(self, handle: Any) -> Sequence[tuple[int, int | None]]:
        found: dict[int, int | None] = {}
        refused: NvmlTrouble | None = None
        for name in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            try:
                rows = self._call(name, handle)
            except NvmlTrouble as trouble:
                if trouble.kind in ("gone", "lost"):
                    raise
                refused = trouble
                continue
            for row in rows:
                used = row.usedGpuMemory
                # "Not available" comes as None or as all bits set.
                known = isinstance(used, int) and used < 2**60
                found[int(row.pid)] = int(used) if known else None
        if refused is not None and not found and refused.kind == "permission":
            raise refused
        return list(found.items())

    def utilisation(self, handle: Any) -> float:
        return float(self._call("nvmlDeviceGetUtilizationRates", handle).gpu)

    def temperature(self, handle: Any) -> float:
        return float(self._call("nvmlDeviceGetTemperature", handle, 0))

    def power(self, handle: Any) -> float:
        return float(self._call("nvmlDeviceGetPowerUsage", handle))

    def ecc_uncorrected(self, handle: Any) -> int:
        return int(self._call("nvmlDeviceGetTotalEccErrors", handle, 1, 1))

    def remapped(self, handle: Any) -> tuple[int, bool, bool]:
        corrected, uncorrected, pending, failed = self._call("nvmlDeviceGetRemappedRows", handle)
        return int(corrected) + int(uncorrected), bool(pending), bool(failed)

    def recovery_action(self, handle: Any) -> int:
        (value,) = self._call("nvmlDeviceGetFieldValues", handle, [_RECOVERY_ACTION_FIELD])
        if value.nvmlReturn != 0:
            kind = _KINDS.get(int(value.nvmlReturn), "unknown")
            raise NvmlTrouble(kind, "the driver has no recovery action")
        return int(value.value.uiVal)

    def persistence(self, handle: Any) -> bool:
        return bool(self._call("nvmlDeviceGetPersistenceMode", handle))

    def watch(self, handles: Sequence[Any]) -> Any:
        want = _XID_EVENT | _ECC_EVENT | _UNAVAILABLE_EVENT | _ACTION_EVENT
        watch = self._call("nvmlEventSetCreate")
        watched = 0
        for handle in handles:
            try:
                can = int(self._call("nvmlDeviceGetSupportedEventTypes", handle))
                self._call("nvmlDeviceRegisterEvents", handle, can & want, watch)
                watched += 1
            except NvmlTrouble as trouble:
                if trouble.kind == "gone":
                    raise
        if not watched:
            self.unwatch(watch)
            raise NvmlTrouble("unsupported", "no device reports events")
        return watch

    def wait(self, watch: Any, limit_s: float) -> tuple[str | bytes, int | None, bool] | None:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(watch, int(limit_s * 1000))
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == 10:  # nothing happened in time: the healthy case
                return None
            code = getattr(error, "value", None)
            kind = _KINDS.get(code, "unknown") if isinstance(code, int) else "unknown"
            raise NvmlTrouble(kind, f"nvmlEventSetWait: {error}") from error
        xid = int(event.eventData) if event.eventType == _XID_EVENT else None
        return self.uuid(event.device), xid, bool(event.eventType & _ACTION_EVENT)

    def unwatch(self, watch: Any) -> None:
        self._call("nvmlEventSetFree", watch)

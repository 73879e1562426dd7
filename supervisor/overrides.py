"""Faults on demand for a box whose GPUs are well: wraps a `Library` and bends what it says.

`GPUSUP_PROBE_OVERRIDES` names a JSON file, read again whenever it changes:

    {"gpu0": {"lost": true},                           every call: lost
     "GPU-1234...": {"free": "1GiB", "total": 0},      figures
     "*": {"unsupported": ["memory v2", "power"]},     what is refused
     "gpu1": {"hang_s": 60, "hang_in": "memory"},      a call that does not come back
     "gpu2": {"xid": 79},                              one event each time the file is written
     "driver": {"gone": true}}                         as if the driver were unloaded

Devices go by index name ("gpu0"), UUID or "*".
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from gpusup.conf.units import parse_size

from .nvml import Library, NvmlTrouble
from .reading import text_of

VARIABLE: Final = "GPUSUP_PROBE_OVERRIDES"


class Overridden:
    """A `Library`; handles are those of the inner one."""

    def __init__(self, inner: Library, path: str) -> None:
        self._inner = inner
        self._path = path
        self._stamp: tuple[int, int] = (0, 0)
        self._rules: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}  # UUID -> gpu0
        self._told: tuple[int, int] = (0, 0)

    def _read(self) -> None:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            with open(self._path, encoding="utf-8") as file:
                rules = json.load(file)
            if isinstance(rules, dict):
                self._rules = {k: v for k, v in rules.items() if isinstance(v, dict)}
                self._stamp = stamp
        except FileNotFoundError:
            self._rules = {}
        except (OSError, ValueError):
            pass  # half written; the next call reads it again

    def _rule(self, handle: Any) -> dict[str, Any]:
        self._read()
        uuid = text_of(self._inner.uuid(handle))
        rule = dict(self._rules.get("*", {}))
        rule.update(self._rules.get(self._names.get(uuid, ""), {}))
        rule.update(self._rules.get(uuid, {}))
        return rule

    def _bend(self, handle: Any, what: str) -> dict[str, Any]:
        self._driver()
        rule = self._rule(handle)
        if rule.get("hang_s") and str(rule.get("hang_in", "memory")) in what:
            time.sleep(float(rule["hang_s"]))
        if rule.get("lost"):
            raise NvmlTrouble("lost", f"{what}: GPU is lost (override)")
        if rule.get("reset_required"):
            raise NvmlTrouble("reset", f"{what}: GPU requires reset (override)")
        if what in rule.get("unsupported", ()):
            raise NvmlTrouble("unsupported", f"{what} (override)")
        if what in rule.get("failing", ()):
            raise NvmlTrouble("unknown", f"{what}: unknown error (override)")
        return rule

    def _driver(self) -> None:
        self._read()
        if self._rules.get("driver", {}).get("gone"):
            raise NvmlTrouble("gone", "driver not loaded (override)")

    def init(self) -> None:
        self._driver()
        self._inner.init()

    def versions(self) -> tuple[str | bytes, str | bytes]:
        return self._inner.versions()

    def devices(self) -> Sequence[Any]:
        self._driver()
        handles = self._inner.devices()
        for index, handle in enumerate(handles):
            if handle is not None:
                self._names[text_of(self._inner.uuid(handle))] = f"gpu{index}"
        return handles

    def slices(self, handle: Any) -> Sequence[Any]:
        return self._inner.slices(handle)

    def mig_mode(self, handle: Any) -> bool:
        return self._inner.mig_mode(handle)

    def uuid(self, handle: Any) -> str | bytes:
        return self._inner.uuid(handle)

    def product(self, handle: Any) -> str | bytes:
        return self._inner.product(handle)

    def bus(self, handle: Any) -> str | bytes:
        return self._inner.bus(handle)

    def memory(self, handle: Any, version: Literal[1, 2]) -> tuple[int, int]:
        rule = self._bend(handle, f"memory v{version}")
        if "total" in rule and "free" in rule:
            return _bytes(rule["total"]), _bytes(rule["free"])
        total, free = self._inner.memory(handle, version)
        return _bytes(rule.get("total", total)), _bytes(rule.get("free", free))

    def processes(self, handle: Any) -> Sequence[tuple[int, int | None]]:
        rule = self._bend(handle, "processes")
        rows = list(self._inner.processes(handle))
        return [*rows, *((int(pid), int(size)) for pid, size in rule.get("processes", ()))]

    def utilisation(self, handle: Any) -> float:
        self._bend(handle, "utilisation")
        return self._inner.utilisation(handle)

    def temperature(self, handle: Any) -> float:
        rule = self._bend(handle, "temperature")
        return float(rule.get("temperature", self._inner.temperature(handle)))

    def power(self, handle: Any) -> float:
        self._bend(handle, "power")
        return self._inner.power(handle)

    def ecc_uncorrected(self, handle: Any) -> int:
        self._bend(handle, "ECC")
        return self._inner.ecc_uncorrected(handle)

    def remapped(self, handle: Any) -> tuple[int, bool, bool]:
        rule = self._bend(handle, "remapped rows")
        if rule.get("remap_failed"):
            return 1, False, True
        return self._inner.remapped(handle)

    def recovery_action(self, handle: Any) -> int:
        rule = self._bend(handle, "recovery action")
        if "recovery_action" in rule:
            return int(rule["recovery_action"])
        return self._inner.recovery_action(handle)

    def persistence(self, handle: Any) -> bool:
        self._bend(handle, "persistence")
        return self._inner.persistence(handle)

    def watch(self, handles: Sequence[Any]) -> Any:
        try:
            inner = self._inner.watch(handles)
        except NvmlTrouble as trouble:
            if trouble.kind == "gone":
                raise
            inner = None
        return inner, list(handles)

    def wait(self, watch: Any, limit_s: float) -> tuple[str | bytes, int | None, bool] | None:
        inner, handles = watch
        self._driver()
        if self._stamp != self._told:
            self._told = self._stamp
            for handle in handles:
                rule = self._rule(handle)
                if "xid" in rule:
                    return self._inner.uuid(handle), int(rule["xid"]), False
        if inner is None:
            time.sleep(min(limit_s, 0.2))
            return None
        return self._inner.wait(inner, min(limit_s, 0.2))

    def unwatch(self, watch: Any) -> None:
        inner, _ = watch
        if inner is not None:
            self._inner.unwatch(inner)


def _bytes(value: Any) -> int:
    return parse_size(value) if isinstance(value, str) else int(value)

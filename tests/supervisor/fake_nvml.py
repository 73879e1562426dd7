"""A stand-in for NVML, scripted by the JSON file that GPUSUP_FAKE_NVML names (or by arguments).

    {"devices": [{"uuid": "GPU-a", "total": 25769803776, "free": 2362232012, ...}], "absent": false}

The file is read at `init` and again at every call, so a test changes the world by writing it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gpusup.supervisor.nvml import NvmlTrouble, Trouble

GIB = 2**30


def gpu(number: int, **more: Any) -> dict[str, Any]:
    """A healthy card as the file describes it."""
    return {
        "uuid": f"GPU-{number:08x}-aaaa-bbbb-cccc-000000000000",
        "product": "Fake 24 GiB",
        "bus": f"00000000:{number + 1:02X}:00.0",
        "total": 24 * GIB,
        "free": 20 * GIB,
        "processes": [],
        **more,
    }


class Fake:
    """Handles are the keys' positions: (gpu index,) or (gpu index, slice index)."""

    def __init__(self, world: Mapping[str, Any] | None = None) -> None:
        self._given = world
        self._calls = 0
        self._told: set[str] = set()

    def _world(self) -> Mapping[str, Any]:
        if self._given is not None:
            return self._given
        for _ in range(50):
            try:
                with open(os.environ["GPUSUP_FAKE_NVML"], encoding="utf-8") as file:
                    world: Mapping[str, Any] = json.load(file)
                    return world
            except ValueError:
                time.sleep(0.001)  # half written
        raise NvmlTrouble("unknown", "the fake's file can't be read")

    def _device(self, handle: Any, what: str) -> Mapping[str, Any]:
        world = self._world()
        if world.get("gone"):
            raise NvmlTrouble("gone", "driver not loaded")
        device: Mapping[str, Any] = world["devices"][handle[0]]
        if len(handle) == 2:
            device = device["slices"][handle[1]]
        if device.get("hang") == what:
            time.sleep(60)
        trouble: Trouble | None = device.get("trouble", {}).get(what, device.get("all_trouble"))
        self._calls += 1
        if trouble and (trouble != "unknown" or self._calls % 2):
            raise NvmlTrouble(trouble, f"{what}: {trouble}")
        return device

    def init(self) -> None:
        world = self._world()
        if world.get("absent"):
            raise NvmlTrouble("absent", "NVML shared library not found")
        if world.get("gone"):
            raise NvmlTrouble("gone", "driver not loaded")
        time.sleep(world.get("init_s", 0))

    def versions(self) -> tuple[str | bytes, str | bytes]:
        return b"999.1", "13"

    def devices(self) -> Sequence[Any]:
        return [
            None if d.get("closed") else (index,)
            for index, d in enumerate(self._world()["devices"])
        ]

    def slices(self, handle: Any) -> Sequence[Any]:
        device = self._device(handle, "slices")
        return [(*handle, number) for number in range(len(device.get("slices", ())))]

    def mig_mode(self, handle: Any) -> bool:
        return "slices" in self._device(handle, "mig")

    def uuid(self, handle: Any) -> str | bytes:
        text = str(self._device(handle, "uuid")["uuid"])
        return text.encode() if self._world().get("bytes") else text

    def product(self, handle: Any) -> str | bytes:
        text = str(self._device(handle, "product").get("product", "Fake"))
        return text.encode() if self._world().get("bytes") else text

    def bus(self, handle: Any) -> str | bytes:
        return str(self._device(handle, "bus").get("bus", "")).encode()

    def memory(self, handle: Any, version: Literal[1, 2]) -> tuple[int, int]:
        device = self._device(handle, f"memory v{version}")
        return int(device["total"]), int(device["free"])

    def processes(self, handle: Any) -> Sequence[tuple[int, int | None]]:
        return [(pid, size) for pid, size in self._device(handle, "processes")["processes"]]

    def utilisation(self, handle: Any) -> float:
        return float(self._device(handle, "utilisation").get("utilisation", 50))

    def temperature(self, handle: Any) -> float:
        return float(self._device(handle, "temperature").get("temperature", 40))

    def power(self, handle: Any) -> float:
        return float(self._device(handle, "power").get("power", 100_000))

    def ecc_uncorrected(self, handle: Any) -> int:
        return int(self._device(handle, "ecc").get("ecc", 0))

    def remapped(self, handle: Any) -> tuple[int, bool, bool]:
        return 0, False, bool(self._device(handle, "remapped").get("remap_failed", False))

    def recovery_action(self, handle: Any) -> int:
        return int(self._device(handle, "recovery action").get("recovery_action", 0))

    def persistence(self, handle: Any) -> bool:
        return bool(self._device(handle, "persistence").get("persistence", True))

    def watch(self, handles: Sequence[Any]) -> Any:
        return list(handles)

    def wait(self, watch: Any, limit_s: float) -> tuple[str | bytes, int | None, bool] | None:
        """Tells each entry of "events" once: [uuid, xid]."""
        for event in self._world().get("events", ()):
            if (key := json.dumps(event)) not in self._told:
                self._told.add(key)
                return str(event[0]), int(event[1]), False
        time.sleep(min(limit_s, 0.02))
        return None

    def unwatch(self, watch: Any) -> None:
        pass

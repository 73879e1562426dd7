"""What is found out before the fleet exists: which devices there are, how many workers fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpusup.conf.schema import Config, ModelConfig

from .actions import Assignment
from .devices import CpuDevice, Places, cpu_devices
from .layout import DevicePlace, Fits
from .placement import Marks, standby_bytes, workers_per_device
from .probe_link import ProbeLink

log = logging.getLogger("gpusup.supervisor")

DISCOVER_S: Final = 30.0


async def devices_here(config: Config, probe: ProbeLink) -> Places:
    """GPUs by the probe, CPU slots by the configuration. In the order of their names."""
    places: Places = {}
    if config.devices.use == "auto" or any(not w.startswith("cpu") for w in config.devices.use):
        for sample in await probe.discover(DISCOVER_S):
            total = sample.total or 0
            budget = config.devices.memory.get(sample.name, 0)
            total = min(total, budget) if budget and total else budget or total
            place = DevicePlace(sample.name, "cuda", sample.uuid, total)
            places[sample.name] = (place, None)
    for cpu in cpu_devices(config.devices, gpus=len(places)):
        places[cpu.name] = (DevicePlace(cpu.name, "cpu", "", cpu.total), cpu)
    falls_back = any(d.step == "cpu_fallback" for m in config.models.values() for d in m.degrade)
    if falls_back and not any(place.kind == "cpu" for place, _ in places.values()):
        cpu = CpuDevice(
            name="cpu0", total=config.devices.memory.get("cpu0", config.devices.cpu_memory)
        )
        places["cpu0"] = (DevicePlace("cpu0", "cpu", "", cpu.total), cpu)
    if config.devices.use != "auto":
        known = {w.lower() for p, _ in places.values() for w in (p.name, p.uuid)}
        for word in config.devices.use:
            if word.lower() not in known and word != "cpu":
                log.error(
                    "devices.use names %s, which is not here; there are %s", word, list(places)
                )
    return places


def fit_rule(config: Config, size_of: Callable[[Assignment, str], int]) -> Fits:
    """`workers = "auto"`: one, or where the model's use is declared, as many as fit by the rule."""
    marks = Marks.of(config)

    def fits(name: str, model: ModelConfig, device: DevicePlace, sharing: int) -> int:
        if device.kind == "cpu" or not model.static:
            return 1
        with suppress(ValueError):
            share = device.total // max(1, sharing)
            rest = model.static + standby_bytes(model)
            fit = workers_per_device(total=share, static=rest, peak=model.peak, marks=marks)
            if fit.workers < 1:
                log.warning("%s on %s: %s", name, device.name, fit.reason)
            return max(1, fit.workers)
        return 1

    return fits

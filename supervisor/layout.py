"""Which slots there are: devices x models x workers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpusup.conf.schema import Config, ModelConfig


class DevicePlace(NamedTuple):
    """A device as the layout sees it. `total`: bytes of memory we may use there."""

    name: str
    kind: str  # "cuda" or "cpu"
    uuid: str
    total: int


class SlotPlace(NamedTuple):
    name: str
    device: str
    model: str
    fallback: bool


#: (model, its config, device, models sharing the device) -> workers that fit there
Fits = Callable[[str, ModelConfig, DevicePlace, int], int]


def lay_out(config: Config, devices: Mapping[str, DevicePlace], fits: Fits) -> list[SlotPlace]:
    """One slot on a device is called like the device; of several, `gpu0.0`, `gpu0.1`, ...

    A model with a `cpu_fallback` rung also gets a slot on the first CPU device, which serves
    nothing but degraded requests.
    """
    places: list[SlotPlace] = []
    for device in devices.values():
        here: list[tuple[str, bool]] = []
        wanted = [
            (name, model)
            for name, model in config.models.items()
            if _runs_on(model, device, devices)
        ]
        for name, model in wanted:
            count = (
                fits(name, model, device, len(wanted)) if model.workers == "auto" else model.workers
            )
            here += [(name, False)] * count
        for name, model in config.models.items():
            falls_back = any(d.step == "cpu_fallback" for d in model.degrade)
            if falls_back and device.kind == "cpu" and device is _first_cpu(devices):
                here.append((name, True))
        for index, (name, fallback) in enumerate(here):
            slot = device.name if len(here) == 1 else f"{device.name}.{index}"
            places.append(SlotPlace(slot, device.name, name, fallback))
    return places


def _runs_on(model: ModelConfig, device: DevicePlace, devices: Mapping[str, DevicePlace]) -> bool:
    if model.devices != "all":
        return device.name in model.devices or (bool(device.uuid) and device.uuid in model.devices)
    # "all" means the GPUs where there are any: a CPU beside them is only a fallback.
    return device.kind == "cuda" or not any(d.kind == "cuda" for d in devices.values())


def _first_cpu(devices: Mapping[str, DevicePlace]) -> DevicePlace | None:
    return next((d for d in devices.values() if d.kind == "cpu"), None)

"""The words between supervisor and probe: length-prefixed msgpack frames on a socket pair. Pure.

The supervisor says one thing, `ProbeSettings`, at the start; from then on the probe talks. Beside
the socket they share a page (`CallPage`) in which the probe notes the driver call it is in, since
a process that hangs in the driver can't say so.

Bytes, watts, degrees Celsius, shares 0 to 1, seconds of CLOCK_MONOTONIC. None: not supported here.
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import Final, Literal, NamedTuple

from msgspec import Struct, msgpack


class ProbeSettings(Struct, frozen=True, tag="settings", tag_field="t", kw_only=True):
    interval: float = 0.1
    library: str = ""  # "module:name" or "/path/file.py:name" of a stand-in for NVML
    visible: str | None = None  # CUDA_VISIBLE_DEVICES as inherited; None: all
    use: tuple[str, ...] | None = None  # names or UUIDs; None: all that are visible


class ProcessUse(Struct, frozen=True, array_like=True):
    """A process on the device. `used` is None where the driver won't say (MIG, containers)."""

    pid: int
    used: int | None = None


class DeviceSample(Struct, frozen=True, kw_only=True):
    """One reading of one device. `error`: what could not be read; `lost`: the device is gone."""

    name: str
    uuid: str
    index: int  # NVML's; of the parent for a MIG slice
    at: float
    kind: Literal["cuda", "cpu"] = "cuda"
    product: str = ""
    bus: str = ""
    total: int | None = None
    free: int | None = None
    processes: tuple[ProcessUse, ...] | None = None
    utilisation: float | None = None
    temperature: float | None = None
    power: float | None = None
    ecc_uncorrected: int | None = None
    remapped: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: int | None = None
    persistence: bool | None = None
    mig: bool = False
    lost: bool = False
    error: str = ""


class ProbeHello(Struct, frozen=True, tag="hello", tag_field="t", kw_only=True):
    """The driver answers. `devices`: their first samples, in the order of their names."""

    driver: str
    library: str
    devices: tuple[DeviceSample, ...]
    events: bool = True  # whether faults are told as they happen


class Sampled(Struct, frozen=True, tag="sampled", tag_field="t"):
    sample: DeviceSample


class Beat(Struct, frozen=True, tag="beat", tag_field="t"):
    """A full pass over the devices, or a wait, is behind the probe."""

    at: float


class GpuEvent(Struct, frozen=True, tag="event", tag_field="t", kw_only=True):
    """The driver reports a fault, by NVML or in the kernel log."""

    uuid: str = ""
    bus: str = ""
    xid: int | None = None
    text: str = ""
    at: float = 0.0
    source: Literal["nvml", "kmsg"] = "nvml"


class ProbeError(Struct, frozen=True, tag="error", tag_field="t"):
    """absent: there is no NVML here, trying again won't help · reload: this process can't go on
    (the driver was unloaded or exchanged), a new one may · trouble: the probe lives."""

    kind: Literal["absent", "reload", "trouble"]
    text: str


FromProbe = ProbeHello | Sampled | Beat | GpuEvent | ProbeError

_encoder = msgpack.Encoder()
_from_probe = msgpack.Decoder(FromProbe)
_settings = msgpack.Decoder(ProbeSettings)

encode = _encoder.encode
decode_from_probe = _from_probe.decode
decode_settings = _settings.decode


class Call(NamedTuple):
    """The driver call the probe is in. `since` 0: in none."""

    since: float
    label: str


_CALL: Final = struct.Struct("<d120s")
CALL_PAGE_BYTES: Final = 4096


def write_call(page: mmap, since: float, label: str) -> None:
    _CALL.pack_into(page, 0, since, label.encode("utf-8", "replace")[:120])


def read_call(page: mmap) -> Call:
    since, label = _CALL.unpack_from(page, 0)
    return Call(since, label.rstrip(b"\0").decode("utf-8", "replace"))

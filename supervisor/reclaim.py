"""After a worker's death: waits until its memory is really back, or says who still holds it.

Begins when the worker's own end is certain (its pidfd). Then: nothing of its session lives; its
pids have left the device's process list; and what is in use, less what the processes that are
listed hold, is back at the idle baseline. Compared with an absolute figure: after a crash the
memory is back before anyone looks, so a wait for it to fall would wait for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from gpusup.conf.units import format_size

from .family import read_process
from .probe_wire import DeviceSample
from .watermark import plausible

FAST_S: Final = 0.05
FAST_LOOKS: Final = 20
SLOW_S: Final = 0.25
LIMIT_S: Final = 10.0

Latest = Callable[[str], tuple[DeviceSample, float] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds a device. `used`: bytes, None if the driver doesn't say."""

    pid: int
    name: str
    used: int | None = None

    def __str__(self) -> str:
        size = "" if self.used is None else f" ({format_size(self.used)})"
        return f"pid {self.pid} {self.name}{size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """`returned`: a new worker may start. `verified`: the device itself said so; False where it
    could not be asked. Times are seconds since the worker's death, None: not reached."""

    returned: bool
    verified: bool
    seconds: float
    pid_gone_s: float | None = None
    memory_back_s: float | None = None
    holders: tuple[Holder, ...] = ()
    text: str = ""


def describe(release: Release) -> str:
    """ "memory back after 0.12 s", and whether the device itself said so."""
    if not release.returned:
        return release.text or f"memory not back after {release.seconds:.1f} s"
    how = "" if release.verified else ", the device could not be asked"
    return f"memory back after {release.seconds:.2f} s{how}"


def session_members(session: int) -> list[int]:
    """Living processes of a session; zombies hold nothing and don't count."""
    members = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        process = read_process(int(name))
        if process and process.session == session and process.state not in ("Z", "X"):
            members.append(process.pid)
    return members


def process_name(pid: int) -> str:
    """As `ps` shows it, shortened; "" if it can't be read."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        if text:
            return text[:80]
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    return ""


def device_openers(index: int | None = None) -> list[int]:
    """Pids that have a GPU's device file open (None: any GPU's), as far as we may see."""
    wanted = "/dev/nvidia" if index is None else f"/dev/nvidia{index}"
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{name}/fd/{fd}")
                    if target == wanted or (index is None and target.startswith(wanted)):
                        found.append(int(name))
                        break
    return found


def left_over(sample: DeviceSample, others: int, *, trusted: bool = True) -> int | None:
    """Bytes in use that no listed process accounts for; None if the sample can't tell.

    Where the driver doesn't give sizes, or numbers processes otherwise than we do (`trusted`
    False: a container), `others` (what neighbours and strangers are believed to hold) is taken
    off instead.
    """
    if sample.lost or not plausible(sample.total, sample.free):
        return None
    used = (sample.total or 0) - (sample.free or 0)
    sizes = [process.used for process in sample.processes or ()]
    if trusted and sample.processes is not None and all(size is not None for size in sizes):
        return used - sum(size or 0 for size in sizes)
    return used - others


async def wait_released(
    *,
    device: str,
    kind: str,
    pid: int,
    latest: Latest,
    idle_at: int | None,
    others: Callable[[], int] = lambda: 0,
    ours: Callable[[], Collection[int]] = tuple,
    limit_s: float = LIMIT_S,
    blind_after_s: float = 3.0,
) -> Release:
    """Wait for the memory of the dead worker `pid` (its session has the same number).

    `latest`: as ProbeLink.latest. `idle_at`: as Baselines.idle_at (not the ledger's where a device
    has a budget); None: the device was never seen idle, so only the processes are waited for.
    `others`: see `left_over`. `ours`: pids of the probe and of living workers, which are not to be
    named as holders.
    """
    now = asyncio.get_running_loop().time
    began = now()
    pid_gone_s: float | None = None
    looks = 0
    members = [pid]
    while True:
        passed = now() - began
        if members or passed >= limit_s:  # nobody joins a session that is empty
            members = session_members(pid)
        sample: DeviceSample | None = None
        if not members and kind == "cpu":
            return Release(returned=True, verified=True, seconds=passed, pid_gone_s=passed)
        seen = latest(device)
        if seen is not None and seen[0].at > began:
            sample = seen[0]
        if not members and sample is not None:
            listed = {process.pid for process in sample.processes or ()}
            if pid not in listed:
                pid_gone_s = passed if pid_gone_s is None else pid_gone_s
                # A number that isn't here is of another world, or of the dead one itself.
                trusted = all(read_process(number) is not None for number in listed)
                rest = left_over(sample, others(), trusted=trusted)
                if rest is not None and (idle_at is None or rest <= idle_at):
                    return Release(
                        returned=True,
                        verified=idle_at is not None,
                        seconds=passed,
                        pid_gone_s=pid_gone_s,
                        memory_back_s=passed,
                    )
        blind = sample is None or left_over(sample, 0) is None
        if not members and blind and passed >= min(blind_after_s, limit_s):
            return Release(
                returned=True,
                verified=False,
                seconds=passed,
                pid_gone_s=passed,
                text=f"{device} can't be read; its memory is taken to be back with the process",
            )
        if passed >= limit_s:
            return _given_up(device, kind, pid, members, sample, idle_at, others(), ours(), passed)
        looks += 1
        pause = FAST_S if looks <= FAST_LOOKS else SLOW_S
        await asyncio.sleep(min(pause, max(0.001, limit_s - passed)))


def _given_up(
    device: str,
    kind: str,
    pid: int,
    members: Sequence[int],
    sample: DeviceSample | None,
    idle_at: int | None,
    others: int,
    ours: Collection[int],
    passed: float,
) -> Release:
    used = {} if sample is None else {p.pid: p.used for p in sample.processes or ()}
    suspects = set(members) | ({pid} & set(used))
    if kind != "cpu":
        suspects |= {p for p in used if p not in ours}
        index = None if sample is None else sample.index
        suspects |= {p for p in device_openers(index) if p not in ours and p != os.getpid()}
    holders = tuple(
        Holder(pid=p, name=process_name(p) or "(not visible from here)", used=used.get(p))
        for p in sorted(suspects)
    )
    rest = None if sample is None else left_over(sample, others)
    who = ", ".join(map(str, holders)) or "nobody that can be seen from here"
    if members or rest is None or idle_at is None:
        text = f"processes of the dead worker live on after {passed:.0f} s: {who}"
    else:
        text = (
            f"{format_size(max(0, rest))} of {device} are still in use after {passed:.0f} s, "
            f"{format_size(idle_at)} when idle; held by {who}"
        )
    return Release(returned=False, verified=True, seconds=passed, holders=holders, text=text)

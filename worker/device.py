"""The device as torch shows it: its memory, its cap, its identity, and which errors it survives.

`Device` has two shapes, the host CPU and a CUDA device, so that out-of-memory, caps and peaks are
the same code on a machine without a GPU: there resident memory stands for the allocator's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from typing import Final, Protocol

import torch

from gpusup.conf import heap

from . import wire
from .entry import LoadProblem

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: Thread stacks and allocator arenas are address space that is never filled.
_SLACK: Final = 256 * 2**20


class CapReached(MemoryError):
    """The host CPU's counterpart of torch.OutOfMemoryError."""


#: CUDA errors after which nothing works any more in the context, as they read in messages.
_STICKY: Final = re.compile(
    r"device-side assert"
    r"|illegal (memory access|address|instruction)"
    r"|misaligned address"
    r"|invalid (address space|program counter)"
    r"|(unspecified )?launch failure"
    r"|hardware stack error"
    r"|uncorrectable (ecc|nvlink) error"
    r"|ecc error"
    r"|launch timed out"
    r"|(device|gpu) (is|has been|was)? ?lost"
    r"|fallen off the bus"
    r"|context is destroyed"
    r"|tensor memory"
    r"|cuda error (700|702|709|710|714|715|716|717|718|719)\b"
    r"|cudaError(Assert|IllegalAddress|LaunchFailure|LaunchTimeout|ECCUncorrectable)",
    re.IGNORECASE,
)
_CAPTURING: Final = re.compile(
    r"stream is capturing|during capture|cudaErrorStreamCapture|cudaErrorCapturedEvent",
    re.IGNORECASE,
)
_NO_MEMORY: Final = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_ALLOC_FAILED|not enough memory",
    re.IGNORECASE,
)
_TRIED: Final = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS: Final = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_oom(error: BaseException) -> bool:
    """Whether a smaller batch may succeed where this one failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def is_sticky(error: BaseException) -> bool:
    """Whether the device's context is poisoned: every later call would fail too."""
    if is_oom(error) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if _CAPTURING.search(text):
        return False  # the capture of a graph failed, nothing else
    # torch's own classes and "CUDA error: ..."; a model's RuntimeError that only quotes such
    # words must not cost it its worker.
    from_cuda = type(error).__name__ == "AcceleratorError" or "cuda" in text.lower()
    return from_cuda and _STICKY.search(text) is not None


def tried_bytes(error: BaseException) -> int:
    """How much the failed allocation asked for, 0 if the message does not say."""
    found = _TRIED.search(str(error))
    if found is None:
        return 0
    return int(float(found[1]) * _UNITS[found[2].lower()])


class Device(Protocol):
    kind: str
    torch: torch.device
    uuid: str
    name: str
    static: int  # bytes in use at rest, set after warm-up

    def allocated(self) -> int:
        """Bytes in use (CPU: resident, without files and shared memory)."""
        ...

    def memory(self) -> wire.Memory: ...

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """Most bytes in use since `begin_peak`."""
        ...

    def check_room(self, cost: int) -> None:
        """Raises an out-of-memory error if `cost` more bytes would pass the cap."""
        ...

    def room(self) -> int:
        """The cap, or what there is without one."""
        ...

    def trim(self) -> None: ...

    def canary(self) -> None:
        """The smallest computation that shows that the device answers."""
        ...

    def summary(self) -> str: ...

    def release(self) -> None:
        """Undo what `open` set for the process (tests)."""
        ...


def open_device(spec: wire.WorkerSpec) -> Device:
    """Create the context, check that it is the device that was meant, and set the cap.

    Raises LoadProblem("device") or LoadProblem("oom").
    """
    if spec.device == "cpu":
        return Cpu(spec.memory_cap)
    return Cuda(spec.device_uuid, spec.memory_cap, spec.device_total)


class Cpu:
    kind = "cpu"
    uuid = ""
    name = "cpu"

    def __init__(self, cap: int) -> None:
        self.torch = torch.device("cpu")
        self._cap = cap
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._peak = 0
        self._old_limit: tuple[int, int] | None = None
        self.static = 0
        if cap:
            self._limit_data(cap)

    def allocated(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE

    def memory(self) -> wire.Memory:
        now = self.allocated()
        self._peak = max(self._peak, now)
        return wire.Memory(allocated=now, reserved=now, peak=self._peak, static=self.static)

    def begin_peak(self) -> None:
        """The kernel's high-water mark is reset where it lets us; else a peak is what remains.
        What an earlier batch left in the heap would be missing from it."""
        heap.give_back()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            return

    def peak(self) -> int:
        status = _status()
        above = _bytes(status, "VmHWM") - _bytes(status, "VmRSS")
        return self.allocated() + max(0, above)

    def check_room(self, cost: int) -> None:
        if not self._cap:
            return
        used = self.allocated()
        if used + cost > self._cap:
            heap.give_back()
            used = self.allocated()
        if used + cost > self._cap:
            raise CapReached(
                f"the batch takes {cost} bytes above the {used} in use, the cap is {self._cap}"
            )

    def room(self) -> int:
        return self._cap or int(os.sysconf("SC_PHYS_PAGES")) * _PAGE

    def trim(self) -> None:
        gc.collect()
        heap.give_back()

    def canary(self) -> None:
        if float((torch.ones(1) + 1).sum()) != 2.0:
            raise RuntimeError("the canary's sum is wrong")

    def summary(self) -> str:
        memory = self.memory()
        lines = [
            f"resident {memory.allocated} bytes",
            f"peak {memory.peak} bytes",
            f"static {self.static} bytes",
            f"cap {self._cap or 'none'}",
        ]
        for name, value in _status().items():
            if name.startswith(("Vm", "Rss", "Threads")):
                lines.append(f"{name}:{value}")
        return "\n".join(lines)

    def release(self) -> None:
        if self._old_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._old_limit)
            self._old_limit = None
        os.close(self._statm)

    def _limit_data(self, cap: int) -> None:
        """Let the kernel refuse what passes the cap, so that one allocation fails and not the
        machine: a batch's cost is known beforehand only if its shape was seen before."""
        mapped = _bytes(_status(), "VmData")
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = mapped + max(0, cap - self.allocated()) + _SLACK
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        self._old_limit = (soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _status() -> dict[str, str]:
    """The fields of /proc/self/status as they stand there: "VmRSS" is "\\t   1234 kB"."""
    with open("/proc/self/status") as file:
        fields = (line.rstrip().partition(":") for line in file)
        return {name: value for name, _, value in fields}


def _bytes(status: dict[str, str], name: str) -> int:
    return int(status[name].split()[0]) * 1024 if name in status else 0


class Cuda:
    kind = "cuda"

    def __init__(self, wanted: str, cap: int, total: int) -> None:
        self.torch = torch.device("cuda", 0)
        self.static = 0
        self._cap = cap
        try:
            properties = torch.cuda.get_device_properties(0)
            _, seen = torch.cuda.mem_get_info(0)
        except Exception as error:
            if is_oom(error):
                raise LoadProblem(
                    "oom", f"cannot create a context on {wanted or 'the device'}: {_line(error)}"
                ) from error
            raise LoadProblem("device", f"cannot use {wanted or 'CUDA'}: {_line(error)}") from error
        self.name = str(properties.name)
        self.uuid = _uuid(str(properties.uuid), wanted)
        if wanted and self.uuid.lower() != wanted.lower():
            raise LoadProblem("device", f"pinned to {wanted}, but CUDA device 0 is {self.uuid}")
        self.total = total or seen
        self._stats_at = 0.0
        self._memory = wire.Memory()
        if cap:
            # The fraction is of what torch sees, which for a MIG slice is the slice.
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap / seen), 0)

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(0))

    def memory(self) -> wire.Memory:
        """At most 50 ms old: the allocator's statistics take long to read."""
        now = time.monotonic()
        if now - self._stats_at > 0.05 or self._memory.static != self.static:
            self._stats_at = now
            # A poisoned context refuses this too, and the last answers must still go out.
            with contextlib.suppress(RuntimeError):
                self._memory = self._read_memory()
        return self._memory

    def _read_memory(self) -> wire.Memory:
        stats = torch.cuda.memory_stats_as_nested_dict(0)
        allocated = stats["allocated_bytes"]["all"] if stats else {"current": 0, "peak": 0}
        free, total = torch.cuda.mem_get_info(0)
        return wire.Memory(
            allocated=allocated["current"],
            reserved=stats["reserved_bytes"]["all"]["current"] if stats else 0,
            peak=allocated["peak"],
            static=self.static,
            device_total=total,
            device_free=free,
        )

    def begin_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(0)

    def peak(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated(0))

    def check_room(self, cost: int) -> None:
        """The allocator refuses by itself."""

    def room(self) -> int:
        return self._cap or self.total

    def trim(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        heap.give_back()

    def canary(self) -> None:
        # A copy back, not only a launch: that one waits for the device's answer.
        if float((torch.ones(1, device=self.torch) + 1).item()) != 2.0:
            raise RuntimeError("the canary's sum is wrong")

    def summary(self) -> str:
        return str(torch.cuda.memory_summary(0))

    def release(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _uuid(seen: str, wanted: str) -> str:
    if seen.startswith(("GPU-", "MIG-")):
        return seen
    # torch leaves the prefix out. For a MIG slice it may report the whole GPU's: only the slice is
    # visible then, so there is nothing to mix up.
    if wanted.startswith("MIG-"):
        return wanted
    return f"GPU-{seen}"

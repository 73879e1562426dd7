"""The probe process: asks the driver about the GPUs, several times a second, and tells.

    python -m gpusup.supervisor.probe --fd N --page-fd M

It is meant to be lost. A call into the driver may block for ever; then the supervisor kills this
process and starts another. So it holds no state, and nobody waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpusup.worker.frame import FrameDecoder, pack

from . import overrides
from .devices import unknown_devices, used_devices, visible_devices
from .nvml import Library, Nvml, NvmlTrouble
from .probe_wire import (
    CALL_PAGE_BYTES,
    Beat,
    DeviceSample,
    FromProbe,
    GpuEvent,
    ProbeError,
    ProbeHello,
    ProbeSettings,
    Sampled,
    decode_settings,
    encode,
    write_call,
)
from .reading import DeviceReader, FoundDevice, find_devices, text_of
from .xid import KernelFault, parse_kmsg, same_bus, verdict_of_xid

_PR_SET_PDEATHSIG: Final = 1
EVENT_WAIT_S: Final = 1.0


def load_library(name: str) -> Library:
    """NVML, or the stand-in that `name` points at: "module:attribute" or "/file.py:attribute".

    Raises NvmlTrouble("absent") where there is none.
    """
    if not name:
        return Nvml()
    where, _, attribute = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("gpusup_probe_library", where)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot read {where}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        library: Library = getattr(module, attribute)()
    except (ImportError, AttributeError, OSError, ValueError, TypeError) as error:
        raise NvmlTrouble("absent", f"cannot use probe.library {name!r}: {error}") from error
    return library


class Probe:
    def __init__(self, sock: socket.socket, page: mmap.mmap, settings: ProbeSettings) -> None:
        self._sock = sock
        self._page = page
        self._settings = settings
        self._lock = threading.Lock()
        self._readers: list[DeviceReader] = []
        self._hurry = threading.Event()
        self._driver_gone = ""

    @contextlib.contextmanager
    def calling(self, label: str) -> Iterator[None]:
        # The text first: whoever sees the time must find the text that belongs to it.
        write_call(self._page, 0.0, label)
        write_call(self._page, time.monotonic(), label)
        try:
            yield
        finally:
            write_call(self._page, 0.0, "")

    def say(self, word: FromProbe) -> None:
        with self._lock:
            self._sock.sendall(pack(encode(word)))

    def run(self) -> None:
        """Returns when there is no NVML, when the driver goes away, or when nobody listens."""
        try:
            library = load_library(self._settings.library)
            if path := os.environ.get(overrides.VARIABLE):
                library = overrides.Overridden(library, path)
            with self.calling("init"):
                library.init()
            driver, version = (text_of(text) for text in library.versions())
            found = find_devices(library, self.calling)
            first = self._open(library, found)
        except NvmlTrouble as trouble:
            self.say(ProbeError("absent" if trouble.kind == "absent" else "reload", str(trouble)))
            return
        watch, why_not = self._watch(library)
        self.say(
            ProbeHello(
                driver=driver, library=version, devices=tuple(first), events=watch is not None
            )
        )
        for word in unknown_devices(found, self._settings.use):
            self.say(ProbeError("trouble", f"devices.use names {word!r}, which is not here"))
        if why_not:
            self.say(ProbeError("trouble", f"faults are not told as they happen: {why_not}"))
        self._start_thread("kernel-log", self._follow_kernel_log, first)
        if watch is not None:
            self._start_thread("events", self._follow_events, library, watch)
        self._sample_for_ever()

    def _open(self, library: Library, found: Sequence[FoundDevice]) -> list[DeviceSample]:
        chosen = used_devices(visible_devices(found, self._settings.visible), self._settings.use)
        first: list[DeviceSample] = []
        for device in chosen:
            if device.handle is None or not device.uuid:
                first.append(
                    DeviceSample(
                        name=device.name,
                        uuid=device.uuid,
                        index=device.index,
                        at=time.monotonic(),
                        product=device.product,
                        bus=device.bus,
                        lost=True,
                        error="the driver lists it but does not open it",
                    )
                )
                continue
            reader = DeviceReader(
                library,
                device.handle,
                name=device.name,
                uuid=device.uuid,
                index=device.index,
                product=device.product,
                bus=device.bus,
                mig=device.slice_index >= 0,
                calling=self.calling,
            )
            first.append(reader.read(time.monotonic()))
            self._readers.append(reader)
        return first

    def _sample_for_ever(self) -> None:
        while not self._driver_gone:
            began = time.monotonic()
            hurry = self._hurry.is_set()
            self._hurry.clear()
            for reader in self._readers:
                if hurry:
                    reader.hurry()
                try:
                    sample = reader.read(time.monotonic())
                except NvmlTrouble as trouble:
                    self.say(ProbeError("reload", str(trouble)))
                    return
                self.say(Sampled(sample))
            self.say(Beat(time.monotonic()))
            pause = max(0.005, self._settings.interval - (time.monotonic() - began))
            # The supervisor says nothing more: what can be read now is the end.
            readable, _, _ = select.select([self._sock], [], [], pause)
            if readable and not self._sock.recv(1024):
                return
        self.say(ProbeError("reload", self._driver_gone))

    # -- faults -----------------------------------------------------------------------------------

    def _start_thread(self, name: str, target: Any, *arguments: Any) -> None:
        def guarded() -> None:
            # A dead pipe means that the main thread is leaving too.
            with contextlib.suppress(OSError):
                target(*arguments)

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _watch(self, library: Library) -> tuple[Any, str]:
        try:
            with self.calling("event registration"):
                return library.watch([r.handle for r in self._readers]), ""
        except NvmlTrouble as trouble:
            return None, str(trouble)

    def _follow_events(self, library: Library, watch: Any) -> None:
        while True:
            try:
                event = library.wait(watch, EVENT_WAIT_S)
            except NvmlTrouble as trouble:
                if trouble.kind == "gone":
                    self._driver_gone = str(trouble)
                    return
                # After an odd error the set is undefined. One error says nothing of the devices.
                self._hurry.set()
                time.sleep(EVENT_WAIT_S)
                with contextlib.suppress(NvmlTrouble):
                    library.unwatch(watch)
                try:
                    watch = library.watch([r.handle for r in self._readers])
                except NvmlTrouble as second:
                    self.say(ProbeError("trouble", f"faults are no longer told: {second}"))
                    return
                continue
            if event is None:
                continue
            uuid, xid, action_changed = event
            self._hurry.set()
            text = "the recovery action changed" if action_changed else ""
            self.say(GpuEvent(uuid=text_of(uuid), xid=xid, text=text, at=time.monotonic()))

    def _follow_kernel_log(self, first: Sequence[DeviceSample]) -> None:
        """Works when NVML no longer answers. Needs the right to read the log; else it is silent."""
        try:
            fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        blind = [sample.bus for sample in first if sample.recovery_action is None]
        old: dict[str, KernelFault] = {}
        while (fault := _next_record(fd)) is not None:
            # What happened before we watched still stands where the driver can't say otherwise.
            if (
                fault.bus
                and verdict_of_xid(fault.xid) in ("reset", "node", "retire")
                and any(same_bus(fault.bus, bus) for bus in blind)
            ):
                old[fault.bus] = fault
        for fault in old.values():
            self._tell_kernel_fault(fault)
        while True:
            select.select([fd], [], [])
            while (fault := _next_record(fd)) is not None:
                if fault.bus:
                    self._tell_kernel_fault(fault)

    def _tell_kernel_fault(self, fault: KernelFault) -> None:
        self._hurry.set()
        self.say(
            GpuEvent(
                bus=fault.bus,
                xid=fault.xid,
                text=fault.text[:200],
                at=time.monotonic(),
                source="kmsg",
            )
        )


def _next_record(fd: int) -> KernelFault | None:
    """The next record; one without a fault has no bus. None: nothing more for now."""
    while True:
        try:
            record = os.read(fd, 8192)
        except BlockingIOError:
            return None
        except BrokenPipeError:
            continue  # records were overwritten before we read them
        except OSError:
            return None
        fault = parse_kmsg(record.decode("utf-8", "replace"))
        return fault or KernelFault(0, 0.0, "", 0, "")


def receive_settings(sock: socket.socket) -> ProbeSettings | None:
    decoder = FrameDecoder()
    while data := sock.recv(65536):
        for frame in decoder.feed(data):
            return decode_settings(frame)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpusup: probe")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--page-fd", type=int, required=True)
    arguments = parser.parse_args()
    parent = os.getppid()
    # From the main thread of a process that was started by the supervisor's main thread.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle("gpusup: probe")
    sock = socket.socket(fileno=arguments.fd)
    page = mmap.mmap(arguments.page_fd, CALL_PAGE_BYTES)
    try:
        settings = receive_settings(sock)
        if settings is not None:
            Probe(sock, page, settings).run()
    except OSError:
        pass  # the supervisor is gone, and so are we
    # Not sys.exit: a thread that hangs in the driver must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()

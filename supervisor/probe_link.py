"""The supervisor's side of the probe: starts it, listens to it, replaces it when it is stuck.

It never waits for the driver. A probe that stays in one call for longer than the limit, or says
nothing, is killed and another takes its place; if the killed one can't die (it may sit in the
kernel for good) there is one replacement and, should that get stuck too, none after it until one
of them is gone. Meanwhile the values grow old, and old means unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpusup.conf.schema import DevicesConfig, ProbeConfig
from gpusup.worker.frame import pack

from .channel import Channel
from .family import Family, Watch, clean_env, kill
from .probe_wire import (
    CALL_PAGE_BYTES,
    Beat,
    DeviceSample,
    GpuEvent,
    ProbeError,
    ProbeHello,
    ProbeSettings,
    Sampled,
    decode_from_probe,
    encode,
    read_call,
)
from .xid import Verdict, judge, same_bus

#: The driver may have to wake the GPUs first: 1 to 3 s each without its persistence daemon.
START_LIMIT_S: Final = 30.0
BACKOFF_FIRST_S: Final = 0.2
BACKOFF_LIMIT_S: Final = 30.0
#: A probe that lived this long was well; the next failure starts the back-off anew.
HEALTHY_S: Final = 20.0
#: Alive at once at most: the one that is listened to, and one that was killed and won't die.
MOST_PROCESSES: Final = 2
#: The same fault comes from NVML and from the kernel log.
ECHO_S: Final = 5.0

#: starting, live: what they say · waiting: dead, a new one comes after the back-off · blind: two
#: are stuck, no third is started · absent: there is no NVML here · stopped: by us
LinkState = Literal["starting", "live", "waiting", "blind", "absent", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something happened to a device. `device` "" if it can't be told which."""

    device: str
    verdict: Verdict
    text: str
    at: float
    xid: int | None = None


class _Process:
    """One probe process, from its start until it is collected."""

    def __init__(self, pid: int, channel: Channel, page: mmap.mmap, started: float) -> None:
        self.pid = pid
        self.channel = channel
        self.page = page
        self.started = started
        self.heard = started
        self.greeted = False
        self.watch: Watch | None = None


class ProbeLink:
    """Owns the probe. All callbacks come from the event loop.

    `on_sample`: a fresh reading of one device. `on_fault`: a device needs something. `on_state`:
    the link's state changed (`LinkState`); `self.reason` says why.
    """

    def __init__(
        self,
        config: ProbeConfig,
        on_sample: Callable[[DeviceSample], None],
        on_fault: Callable[[Fault], None],
        on_state: Callable[[str], None],
        *,
        devices: DevicesConfig | None = None,
        family: Family | None = None,
    ) -> None:
        self._config = config
        self._on_sample = on_sample
        self._on_fault = on_fault
        self._on_state = on_state
        self._use = None if devices is None or devices.use == "auto" else devices.use
        self._family = family or Family()
        self._now = asyncio.get_running_loop().time
        self._current: _Process | None = None
        self._dying: dict[int, _Process] = {}
        self._samples: dict[str, DeviceSample] = {}
        self._faults: dict[tuple[str, int], float] = {}
        self._troubled: dict[str, Verdict] = {}
        self._held: list[Fault] = []
        self._first: asyncio.Future[tuple[DeviceSample, ...]] | None = None
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._judge: asyncio.TimerHandle | None = None
        self._judged = 0.0
        self._next_start: asyncio.TimerHandle | None = None
        self._backoff = BACKOFF_FIRST_S
        self.state: LinkState = "stopped"
        self.reason = ""
        self.driver = ""
        self.driver_gone = ""  # why, while a probe has found no driver to talk to
        self.restarts = 0

    # -- for the caller ---------------------------------------------------------------------------

    def start(self) -> None:
        """Must run in the main thread: the probe dies with the thread that started it."""
        if self._judge is None:
            self._judged = self._now()
            self._judge = asyncio.get_running_loop().call_later(self._beat_s, self._look)
        if self._current is None and self._next_start is None:
            self._launch()

    async def discover(self, limit_s: float = START_LIMIT_S) -> tuple[DeviceSample, ...]:
        """The GPUs there are, once the first probe has said so; () without NVML or in that time.

        Faults that are found meanwhile are told right after it: the caller then knows the devices.
        """
        if self.state == "live":
            return tuple(self._samples.values())
        if self.state in ("absent", "blind"):
            return ()
        self._first = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._first, limit_s)
        except TimeoutError:
            return ()
        finally:
            self._first = None
            asyncio.get_running_loop().call_soon(self._tell_held)

    def latest(self, device: str) -> tuple[DeviceSample, float] | None:
        """The last reading of a device and its age in seconds; None if there never was one."""
        sample = self._samples.get(device)
        return None if sample is None else (sample, max(0.0, self._now() - sample.at))

    def export(self) -> dict[str, str]:
        """Which devices are in trouble: without it the end of the trouble would pass unseen."""
        return {name: verdict for name, verdict in self._troubled.items() if verdict != "none"}

    def restore(self, exported: Mapping[str, Any]) -> None:
        self._troubled.update(exported)

    def stop(self) -> None:
        """Let go of the driver. Doesn't wait; the probe is killed and collected when it dies."""
        for timer in (self._judge, self._next_start):
            if timer is not None:
                timer.cancel()
        self._judge = self._next_start = None
        self._drop("stopped")
        self._enter("stopped", "")

    async def stopped(self, limit_s: float = 2.0) -> bool:
        """Whether every probe process is gone, after waiting for at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_gone.wait(), limit_s)
        return not self._dying

    def pids(self) -> set[int]:
        """Of the probe, and of those that were killed and still hang in the driver."""
        current = set() if self._current is None else {self._current.pid}
        return current | set(self._dying)

    # -- its life ---------------------------------------------------------------------------------

    @property
    def _beat_s(self) -> float:
        return min(0.25, max(0.02, self._config.call_limit / 8))

    def _enter(self, state: LinkState, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason = state, reason
        self._on_state(state)

    def _launch(self) -> None:
        self._next_start = None
        if len(self._dying) >= MOST_PROCESSES:
            self._enter("blind", "the driver does not answer; two probes are stuck in it")
            self._give_first(())
            return
        try:
            pid, ours, page = self._spawn()
        except OSError as error:
            self._enter("waiting", f"cannot start the probe: {error.strerror}")
            self._schedule()
            return
        channel = Channel(ours, self._heard, self._ended)
        process = _Process(pid, channel, page, self._now())
        process.watch = self._family.watch(pid, lambda code, words: self._gone(pid, code, words))
        self._current = process
        self._enter("starting", self.reason)

    def _spawn(self) -> tuple[int, socket.socket, mmap.mmap]:
        """Its pid, our end of its line, its page. OSError also where descriptors run out."""
        settings = ProbeSettings(
            interval=self._config.interval,
            library=self._config.library,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            use=self._use,
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(os.memfd_create("gpusup-probe-call", os.MFD_CLOEXEC), "r+b") as file:
                fds = (theirs.fileno(), file.fileno())
                os.ftruncate(fds[1], CALL_PAGE_BYTES)
                page = mmap.mmap(fds[1], CALL_PAGE_BYTES)
                # -P: a file called signal.py in the current folder is none of ours.
                argv = [sys.executable, "-P", "-m", "gpusup.supervisor.probe"]
                argv += ["--fd", str(fds[0]), "--page-fd", str(fds[1])]
                ours.sendall(pack(encode(settings)))  # before it can be gone again
                pid = self._family.spawn(argv, env=clean_env(), pass_fds=fds)
        except OSError:
            ours.close()
            raise
        return pid, ours, page

    def _schedule(self) -> None:
        if self.state in ("stopped", "absent") or self._next_start is not None:
            return
        loop = asyncio.get_running_loop()
        self._next_start = loop.call_later(self._backoff, self._launch)
        self._backoff = min(BACKOFF_LIMIT_S, self._backoff * 2)

    def _drop(self, why: str) -> None:
        """Kill the probe that is listened to; it is collected whenever it dies."""
        process, self._current = self._current, None
        if process is None:
            return
        process.channel.close()
        self._dying[process.pid] = process
        self._all_gone.clear()
        kill(process.pid)
        if why != "stopped":
            self.restarts += 1
            if self._now() - process.started >= HEALTHY_S:
                self._backoff = BACKOFF_FIRST_S

    def _replace(self, why: str) -> None:
        self._drop(why)
        self._enter("waiting", why)
        self._schedule()

    def _ended(self, why: str) -> None:
        if self._current is not None:
            self._replace(f"the probe ended: {why}")

    def _gone(self, pid: int, code: int, words: str) -> None:
        process = self._dying.pop(pid, None)
        if process is None and self._current is not None and self._current.pid == pid:
            self._current.channel.read_rest()
        if self._current is not None and self._current.pid == pid:
            self._replace(f"the probe ended: {words or f'exit code {code}'}")
            process = self._dying.pop(pid, None)
        if process is not None:
            process.page.close()
        if not self._dying:
            self._all_gone.set()
        if self.state == "blind":
            self._enter("waiting", "a stuck probe is gone")
            self._schedule()

    # -- what it says -----------------------------------------------------------------------------

    def _heard(self, frame: bytes) -> None:
        word = decode_from_probe(frame)
        process = self._current
        if process is None:
            return
        process.heard = self._now()
        match word:
            case Sampled(sample=sample):
                self._sampled(sample)
            case Beat():
                if self.state != "live":
                    self._enter("live", "")
            case ProbeHello():
                process.greeted = True
                self.driver, self.driver_gone = word.driver, ""
                here = {sample.name for sample in word.devices}
                self._samples = {n: s for n, s in self._samples.items() if n in here}
                for sample in word.devices:
                    self._sampled(sample)
                self._enter("live", "")
                self._give_first(word.devices)
            case GpuEvent():
                self._event(word)
            case ProbeError(kind="absent", text=text):
                self._drop("stopped")
                self._enter("absent", text)
                self._give_first(())
            case ProbeError(kind="reload", text=text):
                self.driver_gone = text
                self._give_first(())
                self._replace(text)
            case ProbeError(text=text):
                self.reason = text

    def _tell(self, fault: Fault) -> None:
        if self._first is None:
            self._on_fault(fault)
        else:
            self._held.append(fault)

    def _tell_held(self) -> None:
        held, self._held = self._held, []
        for fault in held:
            self._on_fault(fault)

    def _give_first(self, devices: tuple[DeviceSample, ...]) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(devices)

    def _sampled(self, sample: DeviceSample) -> None:
        self._samples[sample.name] = sample
        self._on_sample(sample)
        before = self._troubled.get(sample.name, "none")
        verdict: Verdict = "none"
        text = ""
        if sample.lost:
            verdict, text = "lost", sample.error or "the GPU is lost"
        elif sample.recovery_action or sample.remap_failed:
            judged = judge(action=sample.recovery_action, remap_failed=bool(sample.remap_failed))
            verdict, text = judged.verdict, judged.text
        if verdict == before:
            return
        self._troubled[sample.name] = verdict
        if verdict == "none":
            verdict, text = "back", "the driver reports the GPU as usable"
        self._tell(Fault(device=sample.name, verdict=verdict, text=text, at=sample.at))

    def _event(self, event: GpuEvent) -> None:
        named = [
            sample
            for sample in self._samples.values()
            if (event.uuid and sample.uuid == event.uuid)
            or (event.bus and same_bus(sample.bus, event.bus))
        ]
        if event.xid is None:
            return  # the sample that follows at once tells what the driver wants
        affected: list[DeviceSample | None] = [*named] or [None]
        for sample in affected:
            name = "" if sample is None else sample.name
            last = self._faults.get((name, event.xid), float("-inf"))
            self._faults[name, event.xid] = self._now()
            if self._now() - last < ECHO_S and event.source == "kmsg":
                continue
            judged = judge(xid=event.xid, action=None if sample is None else sample.recovery_action)
            text = f"{judged.text}; {event.text}" if event.text else judged.text
            self._tell(
                Fault(device=name, verdict=judged.verdict, text=text, at=event.at, xid=event.xid)
            )

    # -- whether it is stuck ----------------------------------------------------------------------

    def _look(self) -> None:
        now = self._now()
        late = now - self._judged > self._beat_s + 0.5
        self._judged = now
        self._judge = asyncio.get_running_loop().call_later(self._beat_s, self._look)
        process = self._current
        if process is None:
            return
        if late:
            # We were stopped, not the probe: what it said meanwhile is still to be read.
            process.heard = max(process.heard, now)
            return
        call = read_call(process.page)
        limit = (
            self._config.call_limit
            if process.greeted
            else max(START_LIMIT_S, self._config.call_limit)
        )
        if call.since and now - call.since > limit:
            seconds = now - call.since
            self._replace(f"the driver has not answered for {seconds:.1f} s ({call.label})")
        elif now - process.heard > limit + self._config.interval + 1.0:
            self._replace(f"the probe has said nothing for {now - process.heard:.1f} s")

"""The whole supervisor put together: sockets, children, the fleet, and the loop that runs them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from gpusup.conf import log as logs_of_conf
from gpusup.conf.load import LoadedConfig
from gpusup.conf.places import state_dir
from gpusup.worker import wire as worker_wire

from . import actions as act
from . import handover, view, wire
from .boot import DISCOVER_S, devices_here, fit_rule
from .change import Change, ChangeState, Task
from .check_model import ModelCheck, size_of
from .commands import Conflict
from .control import Control
from .dashboard_server import Dashboard, DashboardError
from .diagnostics import memory_record
from .events import CheckDone, DeviceFaulted, DriverSeen
from .family import Family
from .fleet import Fleet, Refused
from .from_proxies import FromProxies
from .handover import Carried
from .host_oom import HostOom
from .launcher import ExecLauncher, Logs
from .listen import Listeners
from .notify import Notify
from .operator import Operator
from .poison import Poison
from .probe_link import Fault, ProbeLink
from .proxies import Proxies, how_many
from .pulse import Pulse
from .reclaim import process_name
from .reclaimer import Reclaimer
from .reconfigure import reconfigure, resolve_wish
from .records import Events, Records
from .reexec import OUR_SIGNALS, ReexecError
from .runtime import Runtime
from .saved import Saved, restore, save
from .status import overall
from .store import Store, StoreError
from .tallies import Tallies
from .verbs import ReloadWish
from .worker_link import WorkerLinks
from .zygotes import ZygoteLauncher

log = logging.getLogger("gpusup.supervisor")

PERSIST_AFTER_S: Final = 0.1
#: How long an upgrade that was promised waits for a good moment.
HAND_OVER_S: Final = 10.0
#: What is left of the drain limit for workers once the proxies have gone.
LAST_S: Final = 2.0


class Box:
    """Implements `runtime.Surroundings`. `run` is the life of the service."""

    fleet: Fleet
    runtime: Runtime
    pulse: Pulse
    proxies: Proxies

    def __init__(
        self, loaded: LoadedConfig, listeners: Listeners, carried: Carried | None = None
    ) -> None:
        """`carried`: from the program before us; then `listeners` are its own too."""
        self.loaded = loaded
        self._carried = carried
        self.config = loaded.config
        self.listeners = listeners
        self.state_dir = state_dir(self.config.server)
        self.family = Family()
        self.logs = Logs(self.config.supervision.log_lines, self._on_worker_line)
        self.events = Events()
        self.records = Records(self.state_dir / "records")
        self.tallies = Tallies(self)
        self.poison = Poison()
        self.store = Store(self.state_dir / "state.json", Saved, on_warning=log.warning)
        self.notify = Notify.from_environment()
        self.host_oom = HostOom()
        self.launcher = self._make_launcher()
        self.probe = ProbeLink(
            self.config.probe,
            on_sample=lambda sample: None,
            on_fault=self._on_fault,
            on_state=self._on_probe,
            devices=self.config.devices,
            family=self.family,
        )
        fork = self.launcher.check if isinstance(self.launcher, ZygoteLauncher) else None
        self.check_model = ModelCheck(self.family, self._on_check, fork)
        self.reclaimer = Reclaimer(self)
        self.operator = Operator(self)
        self.control = Control(self.operator, self.config.server.control_group)
        self.from_proxies = FromProxies(self)
        self._running: set[asyncio.Task[None]] = set()
        self._dashboard: Dashboard | None = None
        self.serial = 0  # of the last snapshot
        self._watchdog_at = 0.0
        self._persist: asyncio.TimerHandle | None = None
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._hand_over = asyncio.Event()
        self.stop_reason = ""

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> int | dict[str, Any]:
        """Returns the exit code, or the state with which a new program is to go on."""
        loop = asyncio.get_running_loop()
        carried = self._carried
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hup)
        loop.add_signal_handler(signal.SIGUSR1, self.reread)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OUR_SIGNALS)
        self.family.start_reaper()
        try:
            self.family.start_janitor(sys.executable, carried.state["janitor"] if carried else 0)
        except OSError as error:
            log.warning("cannot start the janitor: %s", error.strerror)
        if carried:
            self.events.restore(carried.inner["events"])
            self.logs.restore(carried.state["logs"])
            self.probe.restore(carried.inner["probe"])
        if isinstance(self.launcher, ZygoteLauncher):
            if carried and carried.state["zygotes"]:
                self.launcher.restore(carried.state["zygotes"])
            self.launcher.start({m.python for m in self.config.models.values()} or {""})
        self.probe.start()
        self.proxies = Proxies(
            how_many(self.config.server.proxies),
            self.listeners.tcp,
            msgspec.msgpack.encode(msgspec.to_builtins(self.config)),
            self.family,
            self.from_proxies.handle,
            self.from_proxies.gone,
            on_note=log.warning,
        )
        if carried:
            self.proxies.restore(carried.state["proxies"])
        else:
            self.proxies.start()
        stopped = loop.create_task(self._stop.wait())
        if not await self._is_set_up(carried, stopped):
            return self._leave_early()
        self._carried = None
        await self.control.serve(self.listeners.control)
        await self._open_dashboard()
        loop.create_task(self._say_ready()).add_done_callback(_raise_its_error)
        beat = loop.create_task(self.pulse.run())
        while not stopped.done():
            asked = loop.create_task(self._hand_over.wait())
            await asyncio.wait((beat, stopped, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if beat.done():
                beat.result()  # a defect in the loop itself: let it be seen
            if self._hand_over.is_set() and not stopped.done() and (state := await self._let_go()):
                beat.cancel()
                return state
        code = await self._leave()
        beat.cancel()
        return code

    async def _let_go(self) -> dict[str, Any] | None:
        """Everything in a state that a new program can go on from; None if that can't be now."""
        self._hand_over.clear()
        self.notify.reloading()
        await self._close_dashboard()
        await self.control.close()  # the one who asked still gets the answer
        self.probe.stop()
        await self.probe.stopped(1.0)
        until = time.monotonic() + HAND_OVER_S
        while why := handover.obstacle(self)[0] or self.from_proxies.busy():
            if self._stop.is_set() or time.monotonic() > until:
                self.runtime.tell("reexec", f"given up, nothing has changed: {why}", "error")
                self.probe.start()
                await self.control.serve(self.listeners.control)
                await self._open_dashboard()
                self.notify.ready()
                return None
            await asyncio.sleep(0.01)
        self.save_now()
        self.family.stop_reaper()
        return handover.export(self)

    async def _say_ready(self) -> None:
        """Port and control socket answer; the models may still be loading."""
        await self.proxies.listening()
        self.notify.ready(f"listening on {self.listeners.address}")
        log.info("listening on %s, control %s", self.listeners.address, self.listeners.control_path)

    async def _open_dashboard(self) -> None:
        """The web view, where one is configured. The service does not depend on it."""
        server = self.config.server
        if not server.dashboard:
            return
        self._dashboard = Dashboard(
            self.listeners.control_path,
            server.dashboard,
            api_keys=server.api_keys,
            tls_cert=server.tls_cert,
            tls_key=server.tls_key,
        )
        try:
            await self._dashboard.start()
            log.info("dashboard at %s", self._dashboard.address)
        except DashboardError as error:
            self.runtime.tell("dashboard", str(error), "error")

    async def _close_dashboard(self) -> None:
        if self._dashboard is not None:
            await self._dashboard.close()
            self._dashboard = None

    async def _is_set_up(self, carried: Carried | None, stopped: asyncio.Task[Any]) -> bool:
        """False if we are to stop before it is known which devices there are."""
        self.notify.extend(2 * DISCOVER_S)
        setting_up = asyncio.get_running_loop().create_task(self._set_up_fleet(carried))
        among = (setting_up,) if carried else (setting_up, stopped)
        await asyncio.wait(among, return_when=asyncio.FIRST_COMPLETED)
        if setting_up.done():
            setting_up.result()
            return True
        setting_up.cancel()
        await asyncio.wait((setting_up,))
        return False

    def _leave_early(self) -> int:
        """There is no worker yet and no request has been taken."""
        log.info("stopping: %s", self.stop_reason)
        self.notify.stopping(self.stop_reason)
        self._end_children()
        self.listeners.close()
        self.family.stop_janitor()
        return 0

    def _end_children(self) -> None:
        self.check_model.stop()
        self.proxies.kill()
        self.launcher_close()
        self.probe.stop()

    async def _set_up_fleet(self, carried: Carried | None) -> None:
        now = time.monotonic()
        places = carried.places if carried else await devices_here(self.config, self.probe)
        self.cpus = {name: cpu for name, (_, cpu) in places.items() if cpu is not None}
        self.fleet = Fleet(
            self.config,
            {name: place for name, (place, _) in places.items()},
            fits=fit_rule(self.config, size_of),
            size_of=size_of,
            rng=random.Random(),
            now=now,
        )
        if carried:
            carried.restore_fleet(self)
        elif (saved := self.store.load()) is not None:
            self.poison = Poison(saved.poisoned)
            for words in restore(self.fleet, saved, now):
                log.warning("%s", words)
        self.links = WorkerLinks(
            self.listeners.workers,
            lambda slot, generation, message: self.runtime.on_message(slot, generation, message),
            lambda slot, generation: None,  # its death, which follows, says more
            lambda words: log.warning("%s", words),
        )
        self.runtime = Runtime(
            self.fleet, launcher=self.launcher, links=self.links, around=self, events=self.events
        )
        self.runtime.on_pong = self.tallies.on_pong
        self.runtime.on_start = self.tallies.on_start
        self.runtime.on_exit = self.tallies.on_exit
        self.runtime.on_change_end = self.tallies.on_change_end
        self.pulse = Pulse(
            self.runtime,
            self.config,
            samples=self.probe,
            cpus=self.cpus,
            leases=self.fleet.books.ledger.leases,
            broadcast=self.proxies.broadcast,
            after_turn=self._after_turn,
        )
        if not self.fleet.slots:
            log.error("no slot: no device has room for a worker of any model")
        if carried:
            carried.restore_workers(self)
            await asyncio.sleep(0.01)  # what was said meanwhile is heard before anybody is judged
        self.pulse.turn()

    async def _leave(self) -> int:
        """Nothing new, finish what is there, end the workers, go."""
        limit = self.config.server.drain_limit
        log.info("stopping: %s", self.stop_reason)
        self.notify.stopping(self.stop_reason)
        self.notify.extend(limit + 2 * LAST_S)
        self.fleet.stopping = True
        self.runtime.perform(self.fleet.advance)
        forced = asyncio.get_running_loop().create_task(self._force.wait())
        # Balancers shall see that we are not ready before connections are no longer taken.
        await asyncio.wait((forced,), timeout=self.config.server.drain_notice)
        gone = asyncio.get_running_loop().create_task(self.proxies.stop(limit))
        await asyncio.wait((forced, gone), return_when=asyncio.FIRST_COMPLETED)
        self.runtime.perform(lambda now: self.fleet.stop(now, LAST_S))
        await self._empty_within(limit)
        if not self.fleet.is_empty():
            self.runtime.perform(self.fleet.kill_all)
            await self._empty_within(LAST_S)
        left = [life for life in self.fleet.lives() if not life.exited]
        for life in left:
            log.error("%s: pid %d does not die", life.slot, life.pid)
        self.save_now()
        self._end_children()
        await self._close_dashboard()
        await self.control.close()
        self.links.close()
        self.listeners.close()
        self.family.stop_janitor()
        return 1 if self._force.is_set() or left else 0

    async def _empty_within(self, seconds: float) -> None:
        """Until no worker is left, an operator loses patience, or the time is over."""
        until = time.monotonic() + seconds
        for _ in range(round(seconds / 0.02)):
            if self.fleet.is_empty() or time.monotonic() > until:
                return
            if self._force.is_set() and seconds > LAST_S:
                return
            await asyncio.sleep(0.02)

    def stop_soon(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self._stop.set()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("second signal: ending everything now")
            self._force.set()
        self.stop_soon(f"signal {signal.Signals(number).name}")

    def _on_hup(self) -> None:
        self.reread()
        if not hasattr(self, "runtime"):
            return  # the file has only just been read
        try:
            self.reload_config()
        except Exception as error:
            log.error("configuration not reloaded: %s", error)

    def reread(self) -> None:
        logs_of_conf.reopen()
        self.proxies.broadcast(wire.Reread())

    def reload_config(self) -> list[str]:
        return reconfigure(self)

    def resolve_wish(self, model: str, wish: ReloadWish) -> ReloadWish:
        return resolve_wish(self, model, wish)

    def restart_proxy(self, name: str) -> str:
        """Replace one: the new one listens before the old one stops. Returns the change's id."""
        task = Task("restart", "", f"restart {name}", self.fleet)
        self.runtime.change(lambda now: (task, self.fleet.start_change(task, now)))

        async def replace() -> None:
            problem = await self.proxies.restart(name, self.config.server.drain_limit)
            state: ChangeState = "failed" if problem else "done"
            self.runtime.perform(lambda now: task.end(now, state, problem))

        running = asyncio.get_running_loop().create_task(replace())
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return task.id

    async def reexec(self) -> None:
        """Go on with new code as soon as this is answered. Raises CommandError."""
        self._refuse_reexec()
        try:
            await handover.rehearse()
        except ReexecError as error:
            raise Conflict(str(error)) from error
        self._refuse_reexec()
        self._hand_over.set()

    def _refuse_reexec(self) -> None:
        why, change = handover.obstacle(self)
        if self._hand_over.is_set() or self._stop.is_set():
            why = "gpusup is stopping or being upgraded already"
        if why:
            raise Conflict(f"not now: {why}", change=change)

    # -- what the runtime asks for ----------------------------------------------------------------

    def spec(self, launch: act.Launch) -> worker_wire.WorkerSpec:
        fleet = self.fleet
        life = fleet.life(launch.slot, launch.generation)
        assert life is not None
        device = fleet.devices[launch.device]
        surge = fleet.slots[launch.slot].successor is life and not life.held
        others = [
            slot.wanted
            for slot in fleet.slots.values()
            if slot.device == launch.device and slot.name != launch.slot and slot.wanted
        ]
        a = launch.assignment
        run_dir = str(self.listeners.run_dir)
        profile = self.state_dir / "profiles" / f"{a.model}@{a.version}.{device.place.kind}.json"
        return worker_wire.WorkerSpec(
            slot=launch.slot,
            generation=launch.generation,
            model=a.model,
            version=a.version,
            device=device.place.kind,
            device_uuid=device.place.uuid,
            control_path=self.listeners.workers_path,
            data_path=view.data_path(run_dir, launch.slot, launch.generation),
            config=msgspec.to_builtins(a.config),
            memory_cap=fleet.books.cap(life, others, surge=surge),
            device_total=device.total,
            profile_path=str(profile),
            held=launch.held,
            held_context=launch.held_context,
            env={"GPUSUP_PIXELS": str(self.config.server.pixels), **a.config.env},
            keep_alive=self.config.supervision.keep_alive,
            canary_idle=self.config.supervision.canary_idle,
            canary_limit=self.config.supervision.canary_limit,
        )

    def publish(self) -> None:
        self.proxies.broadcast(self.snapshot())
        state, reason = overall(self.fleet, time.monotonic())
        self.notify.status(f"{state}{': ' if reason else ''}{reason}")

    def snapshot(self) -> wire.Snapshot:
        self.serial += 1
        return view.snapshot(
            self.fleet,
            serial=self.serial,
            run_dir=str(self.listeners.run_dir),
            devices=self.pulse.infos,
            poisoned=self.poison.refused(),
            suspects=self.poison.suspects(),
            proxies=self.proxies.count,
            now=time.monotonic(),
        )

    def persist(self) -> None:
        if self._persist is None:
            loop = asyncio.get_running_loop()
            self._persist = loop.call_later(PERSIST_AFTER_S, self.save_now)

    def save_now(self) -> None:
        if self._persist is not None:
            self._persist.cancel()
            self._persist = None
        try:
            self.store.save(save(self.fleet, self.poison.refused(), time.monotonic()))
        except StoreError as error:
            log.error("%s", error)

    def reclaim(self, slot: str, generation: int, device: str, pid: int) -> None:
        self.reclaimer.start(slot, generation, device, pid)

    def check(self, change: str, assignment: act.Assignment) -> None:
        self.check_model.start(change, assignment)

    def was_host_oom(self, pid: int) -> bool:
        return self.host_oom.happened()

    def tidy(self, slot: str, generation: int) -> None:
        """A killed worker leaves its socket's file behind."""
        with suppress(OSError):
            os.unlink(view.data_path(str(self.listeners.run_dir), slot, generation))

    # -- what comes back --------------------------------------------------------------------------

    def _on_check(self, change: str, problem: str) -> None:
        self.runtime.post(CheckDone(change=change, problem=problem))

    def _on_fault(self, fault: Fault) -> None:
        self.tallies.on_fault(fault)
        devices = [fault.device] if fault.device else list(self.fleet.devices)
        for device in devices:
            self.runtime.post(
                DeviceFaulted(
                    device=device, action=fault.verdict, text=fault.text, xid=fault.xid or 0
                )
            )

    def _on_probe(self, state: str) -> None:
        log.info("probe is %s%s", state, f": {self.probe.reason}" if self.probe.reason else "")
        self.events.add("probe", f"probe is {state}: {self.probe.reason}", {})
        if hasattr(self, "runtime"):
            self.runtime.post(DriverSeen(gone=self.probe.driver_gone))

    def on_shed(self, proxy: str, shed: wire.Shed) -> None:
        """A band changed or a request was shed: write down who had the memory."""
        text = (
            f"{shed.device}: {shed.before} -> {shed.after} at {shed.projected:.1%} projected"
            f"{f', {shed.model} shed' if shed.model else ''}"
        )
        self.runtime.tell("band", text, "warning", {"device": shed.device, "proxy": proxy})
        self.records.later(shed.device, lambda summaries: self._memory_record(shed, summaries))
        if shed.after == "shed":
            for life in self.fleet.lives():
                if life.device == shed.device:
                    self.links.send(life.slot, life.generation, worker_wire.Trim())
                    ask = worker_wire.AskReport("memory_summary")
                    self.links.send(life.slot, life.generation, ask)

    def _memory_record(self, shed: wire.Shed, summaries: dict[str, str]) -> dict[str, Any]:
        here = [x for x in self.fleet.lives() if x.device == shed.device and not x.exited]
        sample = self.pulse.sample(shed.device, time.monotonic())
        pongs = {}
        for life in here:
            known = self.runtime.workers.get((life.slot, life.generation))
            if known and known.pong:
                pongs[life.slot] = known.pong
                if text := known.reports.get("memory_summary"):
                    summaries[life.slot] = text
        pids = {life.pid: life.slot for life in here}
        listed = {p.pid for p in (sample.processes or ())} if sample else set()
        return memory_record(
            shed,
            info=next((i for i in self.pulse.infos if i.name == shed.device), None),
            sample=sample,
            workers=pongs,
            pids=pids,
            names={pid: process_name(pid) for pid in {*pids, *listed}},
            summaries=summaries,
            at=time.time(),
        )

    def collect_evidence(self, kind: str, slot: str, fields: dict[str, Any]) -> None:
        life = self.fleet.slots[slot].worker
        if life is not None:
            ask = worker_wire.AskReport("memory_summary")
            self.links.send(slot, life.generation, ask)
        known = self.runtime.workers.get((slot, life.generation)) if life else None

        def record(summaries: dict[str, str]) -> dict[str, Any]:
            text = known.reports.get("memory_summary", "") if known else ""
            return {"kind": kind, "slot": slot, "at": time.time(), **fields, "memory_summary": text}

        self.records.later(f"{kind}-{slot}", record)

    def recycle(self, verb: Callable[[float], tuple[Change, list[act.Action]]]) -> None:
        """Replace a leaking worker by the swap path, as soon as the present step is through."""

        def start() -> None:
            try:
                self.runtime.change(verb)
            except Refused as refused:
                log.warning("leaking worker not replaced: %s", refused)

        asyncio.get_running_loop().call_soon(start)

    def _on_worker_line(self, slot: str, line: str) -> None:
        log.info("%s: %s", slot, line)

    def _after_turn(self, now: float) -> None:
        interval = self.notify.interval_s
        if interval and now - self._watchdog_at >= interval / 2:
            self._watchdog_at = now
            self.notify.watchdog()

    def title_of(self, device: str) -> str:
        found = self.probe.latest(device)
        return found[0].product if found else "host CPU"

    # -- the launcher -----------------------------------------------------------------------------

    def _make_launcher(self) -> ZygoteLauncher | ExecLauncher:
        if self.config.supervision.spawn == "exec":
            return ExecLauncher(self.family, self.logs, sys.executable)
        return ZygoteLauncher(
            self.family,
            self.logs,
            sys.executable,
            preload=self.config.supervision.preload,
            on_note=lambda words: log.warning("%s", words),
        )

    def launcher_close(self) -> None:
        if isinstance(self.launcher, ZygoteLauncher):
            self.launcher.close()

    def launcher_state(self) -> list[dict[str, Any]]:
        return self.launcher.state() if isinstance(self.launcher, ZygoteLauncher) else []


def _raise_its_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()


def open_state_dir(path: Path) -> None:
    """Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o750)
    (path / "profiles").mkdir(exist_ok=True)
    (path / "records").mkdir(exist_ok=True)

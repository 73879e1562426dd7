"""The whole supervisor put together: sockets, children, the fleet, and the loop that runs them."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import time
from typing import Any, Final

import msgspec

from gpusup.conf import log as logs_of_conf
from gpusup.conf.load import LoadedConfig
from gpusup.conf.places import state_dir

from . import handover, wire
from .around import Around
from .boot import DISCOVER_S, devices_here, fit_rule
from .change import ChangeState, Task
from .check_model import ModelCheck, size_of
from .commands import CommandError, Conflict
from .control import Control
from .dashboard_server import Dashboard, DashboardError
from .events import CheckDone, DeviceFaulted, DriverSeen
from .evidence import Evidence
from .family import Family
from .fleet import Fleet, Refused
from .from_proxies import FromProxies
from .handover import Carried
from .host_oom import HostOom
from .launcher import ExecLauncher, Logs
from .leaving import leave
from .listen import Listeners
from .notify import Notify
from .operator import Operator
from .poison import Poison
from .probe_link import Fault, ProbeLink
from .proxies import Proxies, how_many
from .pulse import Pulse
from .reclaimer import Reclaimer
from .reconfigure import reconfigure, resolve_wish
from .records import Events, Records
from .reexec import OUR_SIGNALS, ReexecError
from .runtime import Runtime
from .saved import Saved, restore
from .store import Store
from .tallies import Tallies
from .verbs import ReloadWish
from .worker_link import WorkerLinks
from .zygotes import ZygoteLauncher

log = logging.getLogger("gpusup.supervisor")

#: How long an upgrade that was promised waits for a good moment.
HAND_OVER_S: Final = 10.0


class Box(Around, Evidence):
    """`run` is the life of the service."""

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
        self.force = asyncio.Event()
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
        code = await leave(self)
        beat.cancel()
        return code

    async def _let_go(self) -> dict[str, Any] | None:
        """Everything in a state that a new program can go on from; None if that can't be now."""
        self._hand_over.clear()
        self.notify.reloading()
        await self.close_dashboard()
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

    async def close_dashboard(self) -> None:
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
        self.end_children()
        self.listeners.close()
        self.family.stop_janitor()
        return 0

    def end_children(self) -> None:
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

    def stop_soon(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self._stop.set()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("second signal: ending everything now")
            self.force.set()
        self.stop_soon(f"signal {signal.Signals(number).name}")

    def _on_hup(self) -> None:
        self.reread()
        if not hasattr(self, "runtime"):
            return  # the file has only just been read
        try:
            self.reload_config()
        except (CommandError, Refused) as error:
            log.error("configuration not reloaded: %s", error)
        except Exception:
            log.exception("configuration not reloaded")

    def reread(self) -> None:
        logs_of_conf.reopen()
        self.proxies.broadcast(wire.Reread())

    def reload_config(self) -> list[str]:
        return reconfigure(self)

    def resolve_wish(self, wish: ReloadWish) -> ReloadWish:
        return resolve_wish(self, wish)

    def restart_proxy(self, name: str) -> str:
        """Replace one: the new one listens before the old one stops. Returns the change's id."""
        task = Task("restart", "", f"restart {name}", self.fleet)
        for other in self.fleet.changes.values():
            if other.is_active() and other.title == task.title:
                # A second one would end the first one's wait, and with it requests.
                raise Conflict(f"change {other.id} is replacing {name} already", change=other.id)
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

    def _on_worker_line(self, slot: str, line: str) -> None:
        log.info("%s: %s", slot, line)

    def _after_turn(self, now: float) -> None:
        interval = self.notify.interval_s
        if interval and now - self._watchdog_at >= interval / 2:
            self._watchdog_at = now
            self.notify.watchdog()
        watch = self.config.supervision
        self.proxies.look(now, watch.proxy_limit, watch.hello_limit)

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

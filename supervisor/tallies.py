"""Counts, gauges and watches of the running box: fed by proxies, workers and the fleet."""

from __future__ import annotations

import platform
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from gpusup.conf.package import package_version
from gpusup.worker import wire as worker_wire

from . import standby, view
from .buckets import propose
from .change import Change
from .leak import LeakWatch
from .life import Life
from .probe_link import Fault
from .probe_wire import DeviceSample
from .render_metrics import Facts, render
from .tally import Tally
from .verbs import ReloadWish, reload
from .wire import ProxyReport

if TYPE_CHECKING:
    from .box import Box

#: A size histogram keeps so many shapes; what comes after that is one of "others".
SIZES_KEPT: Final = 500


class Tallies:
    def __init__(self, box: Box) -> None:
        self._box = box
        self.tally = Tally()
        self._sizes: dict[str, Counter[str]] = {}
        self._leaks: dict[tuple[str, int], LeakWatch] = {}
        self._alarmed: set[tuple[str, int]] = set()

    # -- what comes in ----------------------------------------------------------------------------

    @property
    def latest(self) -> dict[str, ProxyReport]:
        return self.tally.reports

    def reports(self) -> list[ProxyReport]:
        return list(self.tally.reports.values())

    def on_report(self, proxy: str, report: ProxyReport) -> None:
        self.tally.proxy_said(proxy, report)

    def proxy_gone(self, proxy: str) -> None:
        self.tally.proxy_gone(proxy)

    def on_pong(self, life: Life, pong: worker_wire.Pong) -> None:
        a = life.assignment
        self.tally.worker_said(life.slot, life.generation, a.model, a.version, pong.counters)
        sizes = self._sizes.setdefault(a.model, Counter())
        for shape, count in pong.sizes.items():
            sizes[shape if shape in sizes or len(sizes) < SIZES_KEPT else "others"] += count
        self._watch_leak(life, pong)

    def _watch_leak(self, life: Life, pong: worker_wire.Pong) -> None:
        key = (life.slot, life.generation)
        config = self._box.config.leak
        watch = self._leaks.get(key)
        if watch is None:
            fleet = self._box.fleet
            self._leaks = {k: w for k, w in self._leaks.items() if fleet.life(*k) is not None}
            self._alarmed &= self._leaks.keys()
            watch = self._leaks[key] = LeakWatch(config.slope_limit)
        watch.note(pong.counters.rows, pong.memory.allocated, time.monotonic())
        leak = watch.leak()
        if leak is None or key in self._alarmed:
            return
        self._alarmed.add(key)
        box = self._box
        box.runtime.tell("leak", f"{life.slot}: {leak.text}", "error", {"slot": life.slot})
        box.collect_evidence("leak", life.slot, {"text": leak.text})
        if config.recycle:
            wish = ReloadWish(slots=(life.slot,))
            model = life.assignment.model
            box.recycle(lambda now: reload(box.runtime.fleet, model, wish, now))

    def on_change_end(self, change: Change) -> None:
        if change.kind in ("reload", "rollback") and change.model:
            self.tally.count("gpusup_swaps_total", (change.model, change.state))

    def on_exit(self, slot: str, cause: str) -> None:
        self.tally.count("gpusup_worker_exits_total", (slot, cause))
        if cause == "hang":
            self.tally.count("gpusup_worker_hangs_total", (slot,))

    def on_start(self, slot: str) -> None:
        self.tally.count("gpusup_worker_starts_total", (slot,))

    def on_fault(self, fault: Fault) -> None:
        if fault.xid is not None:
            labels = (fault.device or "unknown", str(fault.xid))
            self.tally.count("gpusup_device_xid_total", labels)

    def export(self) -> dict[str, Any]:
        return {"tally": self.tally.export(), "sizes": {m: dict(c) for m, c in self._sizes.items()}}

    def restore(self, exported: dict[str, Any]) -> None:
        self.tally.restore(exported["tally"])
        self._sizes = {model: Counter(sizes) for model, sizes in exported["sizes"].items()}

    # -- what goes out ----------------------------------------------------------------------------

    def requests(self, model: str) -> int:
        series = self.tally.counters.get("gpusup_requests_total", {})
        return round(sum(value for labels, value in series.items() if labels[0] == model))

    def leak_slopes(self) -> dict[str, float]:
        slopes = {}
        for (slot, generation), watch in self._leaks.items():
            if self._box.fleet.life(slot, generation) is None:
                continue  # its series ends with it
            if (slope := watch.per_thousand()) is not None:
                slopes[slot] = slope
        return slopes

    def metrics(self) -> str:
        box = self._box
        now = time.monotonic()
        fleet = box.fleet
        self._catch_up("gpusup_probe_restarts_total", box.probe.restarts)
        restarts = sum(row["restarts"] for row in box.proxies.state())
        self._catch_up("gpusup_proxy_restarts_total", restarts)
        ready: Counter[tuple[str, str]] = Counter()
        for model in fleet.models:
            ready.update((model, life.assignment.version) for life in view.open_lives(fleet, model))
            ready.setdefault((model, fleet.models[model].current.version), 0)
        samples: dict[str, DeviceSample] = {}
        for name in fleet.devices:
            if (sample := box.pulse.sample(name, now)) is not None:
                samples[name] = sample
        lives = [(slot, slot.worker) for slot in fleet.slots.values() if slot.worker is not None]
        facts = Facts(
            devices=box.pulse.infos,
            samples=samples,
            workers={slot.name: life.memory for slot, life in lives if not life.exited},
            worker_device={slot.name: slot.device for slot in fleet.slots.values()},
            ready=ready,
            slots={name: slot.state(now) for name, slot in fleet.slots.items()},
            standbys={name: standby.words(s) == "ready" for name, s in fleet.slots.items()},
            leak_slopes=self.leak_slopes(),
            models=list(fleet.models),
            limits={"queue": box.config.watermark.queue, "shed": box.config.watermark.shed},
            build=(package_version(), platform.python_version(), package_version("torch")),
        )
        return render(self.tally, facts)

    def _catch_up(self, name: str, total: int) -> None:
        behind = total - self.tally.value(name)
        if behind > 0:
            self.tally.count(name, (), behind)

    def v2_stats(self, model: str = "", version: str = "") -> dict[str, Any]:
        fleet = self._box.fleet
        entries = []
        for name in [model] if model else list(fleet.models):
            record = fleet.models[name]
            lives = view.open_lives(fleet, name)
            versions = {life.assignment.version for life in lives} | {record.current.version}
            for v in [version] if version else sorted(versions, key=int):
                memory: Counter[str] = Counter()
                for life in lives:
                    if life.assignment.version == v:
                        memory[life.device] += life.memory.allocated
                entries.append(self.tally.v2_stats(name, v, memory))
        return {"model_stats": entries}

    def buckets(self, model: str) -> dict[str, Any]:
        current = self._box.fleet.models[model].current.config.buckets
        return propose(model, dict(self._sizes.get(model, {})), current)

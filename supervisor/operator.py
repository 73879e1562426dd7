"""What operators ask for, carried out on the running box: the control API's `Commands`."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from gpusup.conf.package import package_version

from . import status, verbs, wire
from .change import Change
from .commands import CommandError, Conflict, NotNow, UnknownTarget
from .fleet import Refused
from .verbs import ReloadWish

if TYPE_CHECKING:
    from .box import Box


def _refuse(refused: Refused) -> NoReturn:
    kinds: dict[str, type[CommandError]] = {"not_found": UnknownTarget, "conflict": Conflict}
    raise kinds.get(refused.kind, CommandError)(str(refused), change=refused.change) from refused


class Operator:
    def __init__(self, box: Box) -> None:
        self.box = box
        self._began = time.monotonic()

    # -- looking ----------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        box, now = self.box, self.box.runtime.now()
        fleet = box.runtime.fleet
        reports = box.tallies.reports()
        state, reason = status.overall(fleet, now)
        rows = box.proxies.state()
        if state != "draining" and not any(row["state"] == "serving" for row in rows):
            # Models may be ready, but nobody takes requests for them.
            state, reason = ("starting" if state == "starting" else "down"), "no proxy serves yet"
        result: Mapping[str, Any] = msgspec.to_builtins(
            wire.StatusView(
                state=state,
                version=package_version(),
                pid=os.getpid(),
                uptime_s=now - self._began,
                listen=box.listeners.address,
                reason=reason,
                models=tuple(
                    status.model_view(fleet, name, reports, box.tallies.requests(name), now)
                    for name in fleet.models
                ),
                slots=tuple(
                    status.slot_view(slot, box.runtime.workers, reports, now)
                    for slot in fleet.slots.values()
                ),
                devices=tuple(
                    status.device_view(
                        fleet,
                        info,
                        reports,
                        box.title_of(info.name),
                        box.reclaimer.last_on(info.name),
                    )
                    for info in box.pulse.infos
                ),
                proxies=tuple(self._proxy_views(rows)),
                changes=tuple(
                    status.change_view(c, now) for c in fleet.changes.values() if c.is_active()
                ),
                queue_mark=box.config.watermark.queue,
                shed_mark=box.config.watermark.shed,
            )
        )
        return result

    def _proxy_views(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[wire.ProxyView]:
        latest = self.box.tallies.latest
        for row in rows:
            report = latest.get(row["name"], wire.ProxyReport())
            yield wire.ProxyView(
                name=row["name"],
                pid=row["pid"],
                state=row["state"],
                restarts=row["restarts"],
                connections=report.connections,
                queued=sum(report.queued.values()),
            )

    def changes(self) -> Sequence[Mapping[str, Any]]:
        now = self.box.runtime.now()
        every = self.box.runtime.fleet.changes.values()
        return [msgspec.to_builtins(status.change_view(c, now)) for c in every]

    def change(self, change: str) -> Mapping[str, Any]:
        try:
            found = verbs.find_change(self.box.runtime.fleet, change)
        except Refused as refused:
            _refuse(refused)
        view: Mapping[str, Any] = msgspec.to_builtins(
            status.change_view(found, self.box.runtime.now())
        )
        return view

    def logs(self, target: str, lines: int, since: int) -> tuple[list[str], int]:
        logs = self.box.logs
        if not logs.known(target):
            if target not in self.box.runtime.fleet.slots:
                raise UnknownTarget(f"no slot {target!r} and no log of that name")
            return [], 0
        log = logs.of(target)
        found = log.since(since) if since else log.last(lines)
        return found[-lines:], log.count

    def events(self, since: int) -> Sequence[Mapping[str, Any]]:
        return self.box.runtime.events.since(since)

    def metrics(self) -> str:
        return self.box.tallies.metrics()

    def v2_stats(self, model: str = "", version: str = "") -> Mapping[str, Any]:
        if model and model not in self.box.fleet.models:
            raise UnknownTarget(f"no model {model!r}")
        return self.box.tallies.v2_stats(model, version)

    def buckets(self, model: str) -> Mapping[str, Any]:
        if model not in self.box.runtime.fleet.models:
            raise UnknownTarget(f"no model {model!r}")
        return self.box.tallies.buckets(model)

    def plan(self) -> Mapping[str, Any]:
        fleet = self.box.runtime.fleet
        return {
            "devices": [
                {
                    "device": name,
                    "total": device.total,
                    "room": fleet.books.room(name),
                    "holders": [h._asdict() for h in fleet.books.ledger.holders(name)],
                }
                for name, device in fleet.devices.items()
            ]
        }

    def leases(self) -> Mapping[str, Any]:
        ledger = self.box.runtime.fleet.books.ledger
        return {
            "leases": {name: ledger.leases(name) for name in self.box.runtime.fleet.devices},
            "in_flight": {r: rep.in_flight for r, rep in self.box.tallies.latest.items()},
            "queued": {r: rep.queued for r, rep in self.box.tallies.latest.items()},
            "arena": {
                r: {"free": rep.arena_free, "total": rep.arena_total}
                for r, rep in self.box.tallies.latest.items()
            },
        }

    def support(self) -> Mapping[str, Any]:
        config = msgspec.to_builtins(self.box.config)
        config["server"]["api_keys"] = "(removed)" if config["server"]["api_keys"] else ""
        for model in config["models"].values():
            model["env"] = dict.fromkeys(model["env"], "(removed)")
        return {
            "config": config,
            "versions": {
                name: package_version(name)
                for name in ("gpusup", "torch", "aiohttp", "uvloop", "msgspec", "nvidia-ml-py")
            },
            "python": platform.python_version(),
            "platform": platform.platform(),
            "probe": {
                "state": self.box.probe.state,
                "reason": self.box.probe.reason,
                "driver": self.box.probe.driver,
                "restarts": self.box.probe.restarts,
            },
            "launcher": self.box.launcher_state(),
            "records": self.box.records.latest(),
        }

    # -- steering ---------------------------------------------------------------------------------

    def _perform(self, verb: Callable[..., Any], *args: Any) -> None:
        fleet = self.box.runtime.fleet
        try:
            self.box.runtime.perform(lambda now: verb(fleet, *args[:1], now, *args[1:]))
        except Refused as refused:
            _refuse(refused)

    def _change(self, verb: Callable[..., tuple[Change, Any]], *args: Any) -> str:
        fleet = self.box.runtime.fleet
        try:
            return self.box.runtime.change(lambda now: verb(fleet, *args[:1], now, *args[1:])).id
        except Refused as refused:
            _refuse(refused)

    def _tell(self, target: str, text: str) -> None:
        self.box.runtime.tell("operator", f"{target} {text}", fields={"target": target})

    def cordon(self, target: str, why: str, by: str) -> None:
        self._perform(verbs.cordon, target, by, why)
        self._tell(target, f"cordoned by {by}{': ' if why else ''}{why}")

    def uncordon(self, target: str) -> None:
        self._perform(verbs.uncordon, target)
        self._tell(target, "uncordoned")

    def drain(self, target: str, limit_s: float | None, by: str) -> str:
        return self._change(verbs.drain, target, by, limit_s)

    def restart(self, target: str) -> str:
        if self.box.proxies.knows(target):
            return self.box.restart_proxy(target)
        return self._change(verbs.restart, target)

    def reset_failed(self, target: str) -> None:
        self._perform(verbs.reset_failed, target)
        self._tell(target, "tallies cleared by an operator")

    def reload_model(self, model: str, options: Mapping[str, Any]) -> str | Mapping[str, Any]:
        try:
            wish = msgspec.convert(dict(options), ReloadWish, strict=False)
        except msgspec.ValidationError as error:
            raise CommandError(f"{model}: {error}") from error
        wish = self.box.resolve_wish(wish)
        if wish.dry_run:
            try:
                runtime = self.box.runtime
                return {"plan": verbs.plan(runtime.fleet, model, wish, runtime.now())}
            except Refused as refused:
                _refuse(refused)
        fleet = self.box.runtime.fleet
        try:
            change = self.box.runtime.change(lambda now: verbs.reload(fleet, model, wish, now))
        except Refused as refused:
            _refuse(refused)
        return change.id

    def rollback(self, model: str) -> str:
        return self._change(verbs.rollback, model)

    def promote(self, model: str) -> str:
        return self._change(verbs.promote, model)

    def load(self, model: str) -> str:
        return self._change(verbs.load, model)

    def unload(self, model: str) -> str:
        return self._change(verbs.unload, model)

    def abort(self, change: str) -> None:
        self._change(verbs.abort, change)

    async def dump(self, target: str) -> str:
        fleet = self.box.runtime.fleet
        if target not in fleet.slots:
            raise UnknownTarget(f"no slot {target!r}")
        life = fleet.slots[target].worker
        known = self.box.runtime.workers.get((target, life.generation)) if life else None
        if life is None or known is None or known.process.exited:
            raise NotNow(f"{target} has no worker")
        log = self.box.logs.of(target)
        before = log.count
        known.process.signal("USR2")
        loop = asyncio.get_running_loop()
        until = loop.time() + 2.0
        last = before
        while loop.time() < until:
            await asyncio.sleep(0.05)
            if log.count > before and log.count == last:
                break  # it has said all it had to say
            last = log.count
        return "\n".join(log.since(before))

    def stop(self) -> None:
        self.box.stop_soon("stop asked")

    async def reexec(self) -> None:
        await self.box.reexec()

    def reload_config(self) -> Sequence[str]:
        return self.box.reload_config()

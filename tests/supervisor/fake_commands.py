"""A supervisor's memory without a supervisor, for the control API and `gpusupctl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpusup.supervisor.commands import CommandError, Conflict, UnknownTarget
from gpusup.supervisor.wire import (
    ChangeView,
    DeviceView,
    ModelView,
    ProxyView,
    SlotView,
    StatusView,
)


def slot(name: str, state: str = "ready", **more: Any) -> SlotView:
    fields: dict[str, Any] = {
        "slot": name, "device": name, "state": state, "since_s": 61.0, "model": "digits",
        "slot_state": "schedulable", "version": "1", "generation": 7, "pid": 4711,
        "memory": {"allocated": 1 << 20, "reserved": 3 << 30}, "beat_age_s": 0.1,
    }  # fmt: skip
    return SlotView(**{**fields, **more})


class FakeCommands:
    """Two slots, one model. `calls` is what was asked; `change_states` how each change goes on."""

    def __init__(self) -> None:
        self.state = "ready"
        self.slots = [slot("gpu0"), slot("gpu1", "backoff", why="exit -9", next_retry_s=2.1)]
        self.calls: list[tuple[Any, ...]] = []
        self.made: dict[str, ChangeView] = {}
        self.outcome = "done"
        self.lines = ["one", "two", "three"]
        self.happened: list[dict[str, Any]] = [
            {"serial": 1, "time": 0.0, "kind": "move", "text": "gpu0 ready", "fields": {"a": 1}}
        ]

    def _known(self, target: str) -> None:
        if target not in ("gpu0", "gpu1", "digits", "proxy0"):
            raise UnknownTarget(f"there is no slot {target}")

    def _begin(self, kind: str, target: str, *more: Any) -> str:
        self._known(target)
        self.calls.append((kind, target, *more))
        name = f"c{len(self.made) + 1}"
        self.made[name] = ChangeView(
            id=name, kind=kind, title=f"{kind} {target}", state=self.outcome, age_s=1.5,
            took_s=None if self.outcome == "running" else 1.5, text="because",
            steps=((0.0, "cordoned"), (1.25, "drained")), numbers={"gap_s": 0.4},
        )  # fmt: skip
        return name

    def status(self) -> Mapping[str, Any]:
        view = StatusView(
            state=self.state, version="0.1.0", pid=1, uptime_s=3700.0, listen="127.0.0.1:8000",
            reason="" if self.state == "ready" else "gpu1 is in back-off",
            models=(ModelView(name="digits", state="ready", version="1", ready=1, slots=2),),
            slots=tuple(self.slots),
            devices=(
                DeviceView(
                    name="gpu0", uuid="GPU-1", kind="cuda", total=24 << 30, free=12 << 30,
                    watermark=0.5, band="normal", known=True, age_s=0.1, title="NVIDIA H200",
                ),
                DeviceView(
                    name="gpu1", uuid="GPU-2", kind="cuda", total=24 << 30, free=0,
                    watermark=0.0, band="unknown", known=False, age_s=12.0,
                ),
            ),
            proxies=(ProxyView(name="proxy0", pid=2, state="serving"),),
            changes=tuple(c for c in self.made.values() if c.state == "running"),
        )  # fmt: skip
        result: dict[str, Any] = msgspec.to_builtins(view)
        return result

    def cordon(self, target: str, why: str, by: str) -> None:
        self._known(target)
        self.calls.append(("cordon", target, why, by))

    def uncordon(self, target: str) -> None:
        self._known(target)
        self.calls.append(("uncordon", target))

    def drain(self, target: str, limit_s: float | None, by: str) -> str:
        return self._begin("drain", target, limit_s, by)

    def restart(self, target: str) -> str:
        return self._begin("restart", target)

    def reset_failed(self, target: str) -> None:
        self._known(target)
        self.calls.append(("reset-failed", target))

    def reload_model(self, model: str, options: Mapping[str, Any]) -> str | Mapping[str, Any]:
        if options.get("version") == "99":
            raise Conflict("change c1 is at work on digits", change="c1")
        if options.get("dry_run"):
            self._known(model)
            row = {"slot": "gpu0", "strategy": "surge", "why": "room for both"}
            return {"plan": [{**row, "need_bytes": 2 << 30, "room_bytes": 5 << 30}]}
        return self._begin("reload", model, dict(options))

    def rollback(self, model: str) -> str:
        return self._begin("rollback", model)

    def promote(self, model: str) -> str:
        return self._begin("promote", model)

    def load(self, model: str) -> str:
        return self._begin("load", model)

    def unload(self, model: str) -> str:
        return self._begin("unload", model)

    def changes(self) -> Sequence[Mapping[str, Any]]:
        return [msgspec.to_builtins(change) for change in self.made.values()]

    def change(self, change: str) -> Mapping[str, Any]:
        if change not in self.made:
            raise UnknownTarget(f"there is no change {change}")
        result: dict[str, Any] = msgspec.to_builtins(self.made[change])
        return result

    def abort(self, change: str) -> None:
        self.change(change)
        self.made[change] = msgspec.structs.replace(self.made[change], state="aborted")

    def logs(self, target: str, lines: int, since: int) -> tuple[list[str], int]:
        self._known(target)
        kept = self.lines[since:]
        return kept[max(0, len(kept) - lines) :], len(self.lines)

    async def dump(self, target: str) -> str:
        self._known(target)
        return "Thread 0x1 (most recent call first):\n"

    def events(self, since: int) -> Sequence[Mapping[str, Any]]:
        return [event for event in self.happened if event["serial"] > since]

    def stop(self) -> None:
        self.calls.append(("stop",))

    async def reexec(self) -> None:
        raise CommandError("a worker is just being started; try again")

    def reload_config(self) -> Sequence[str]:
        return [self._begin("reload-config", "digits")]

    def metrics(self) -> str:
        return "# TYPE gpusup_build_info gauge\n"

    def buckets(self, model: str) -> Mapping[str, Any]:
        if model == "digits":
            raise ZeroDivisionError("a defect")
        raise UnknownTarget(f"there is no model {model}")

    def plan(self) -> Mapping[str, Any]:
        holder = {"slot": "gpu0", "generation": 7, "static": 5 << 30, "peak": 1 << 30}
        device = {"device": "gpu0", "total": 24 << 30, "room": 9 << 30, "holders": [holder]}
        return {"devices": [device]}

    def v2_stats(self, model: str = "", version: str = "") -> Mapping[str, Any]:
        return {"model_stats": []}

    def leases(self) -> Mapping[str, Any]:
        return {
            "leases": {"gpu0": {"proxy0": 3 << 20}},
            "in_flight": {"proxy0": {"gpu0": 4}},
            "queued": {"proxy0": {"digits": 2}},
            "arena": {"proxy0": {"free": 1 << 20, "total": 1 << 28}},
        }

    def support(self) -> Mapping[str, Any]:
        return {"config": {"server": {"api_keys": "/etc/keys"}, "env": {"HF_TOKEN": "hf_abc"}}}

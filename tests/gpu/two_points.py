"""The points of two_gpus.py: what is done to a service on two GPUs, and what is right then."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import rig
from service import Service
from vram_mix import ballast

NEAR_MIB = 300.0  # what the driver may keep or others take meanwhile
GOAL = 1.9
RUNS = ("full", "half")  # of one GPU: with all clients, with half of them


class Box:
    """The service on both GPUs, with names for what all points ask."""

    def __init__(self, service: Service, given: argparse.Namespace, wrk: rig.Wrk) -> None:
        self.service = service
        self.cpu: bool = given.cpu
        self.clients: int = given.clients
        self.seconds: float = given.seconds
        self.wrk = wrk
        self.url = f"http://127.0.0.1:{service.port}/predictions/resnet"
        self.slots = [s["slot"] for s in service.status()["slots"]]
        self.first, self.second = self.slots[:2]
        self.uuids = {d["name"]: d["uuid"] for d in service.status()["devices"]}

    def uuid(self, slot: str) -> str:
        return str(self.uuids[self.service.slot(slot)["device"]])

    def pid(self, slot: str) -> int:
        return int(self.service.slot(slot)["pid"])

    def by_slot(self, shares: dict[int, float]) -> dict[str, float]:
        """Shares by slot; what older workers had is under "gone"."""
        names = {pid: slot for slot, pid in self.service.pids().items()}
        found: dict[str, float] = {}
        for pid, share in shares.items():
            name = names.get(pid, "gone")
            found[name] = round(found.get(name, 0.0) + share, 3)
        return found

    def ready(self, slot: str, limit_s: float = 30.0) -> None:
        self.service.until(
            lambda: (
                (s := self.service.slot(slot))["state"] == "ready"
                and s["slot_state"] == "schedulable"
            ),
            limit_s,
        )

    def all_well(self) -> None:
        """As the next point wants to find it."""
        for slot in self.slots:
            if self.service.slot(slot)["slot_state"] == "cordoned":
                self.service.ctl("uncordon", slot)
        for slot in self.slots:
            self.ready(slot, 45)

    def ctl(self, *words: str) -> dict[str, Any]:
        """Exit code, last line and seconds of a gpusupctl."""
        began = time.monotonic()
        done = self.service.ctl(*words, timeout=60)
        said = (done.stdout + done.stderr).strip().splitlines()
        return {
            "exit": done.returncode,
            "said": said[-1][:300] if said else "",
            "took_s": round(time.monotonic() - began, 2),
        }

    def load(self, clients: int = 16) -> rig.Load:
        return rig.Load(self.service, clients=4 if self.cpu else clients)


# -- the points -----------------------------------------------------------------------------------


def pinned(box: Box) -> dict[str, Any]:
    """Where each worker says it is, where nvidia-smi says it is, and what moves under load."""
    found: dict[str, Any] = {"workers": {}, "loaded": {}}
    seen: dict[int, str] = {}
    for slot in box.slots[:2]:
        other = box.second if slot == box.first else box.first
        box.service.ctl("cordon", other)
        answer = box.service.predict("resnet", rig.IMAGE).json()
        seen[answer["pid"]] = answer["gpu"]
        found["loaded"][slot] = alone(box, slot)
        box.service.ctl("uncordon", other)
    listed = {} if box.cpu else rig.gpu_of_pids()
    for slot in box.slots:
        pid, uuid = box.pid(slot), box.uuid(slot)
        found["workers"][slot] = {
            "device": uuid,
            "by_torch": seen.get(pid),
            "by_nvidia_smi": listed.get(pid, "pid not listed"),
        }
    if not box.cpu:
        time.sleep(0.5)
        smi = rig.gpus()
        found["free_mib"] = {
            d["name"]: {"status": d["free"] >> 20, "nvidia_smi": smi[d["uuid"]]["free_mib"]}
            for d in box.service.status()["devices"]
        }
    found["right"] = all(w["by_torch"] == w["device"] for w in found["workers"].values())
    return found


def alone(box: Box, slot: str) -> dict[str, Any]:
    """Full load on one slot: what each GPU does meanwhile, by nvidia-smi and by our probe."""
    found: dict[str, Any] = {}
    busy = rig.metric(box.service, "gpusup_worker_busy_seconds_total", "slot")

    def look() -> None:
        time.sleep(2.0)  # both average over the last second or so
        try:
            found["probe_busy"] = rig.metric(
                box.service, "gpusup_device_utilization_ratio", "device"
            )
            if not box.cpu:
                smi = rig.gpus()
                found["nvidia_smi"] = {name: smi[uuid] for name, uuid in box.uuids.items()}
        except Exception as error:  # told, and the load is measured anyway
            found["look"] = repr(error)

    looking = threading.Thread(target=look)
    looking.start()
    found["load"] = box.wrk.run(box.url, box.clients, 4)
    looking.join(30)
    after = rig.metric(box.service, "gpusup_worker_busy_seconds_total", "slot")
    found["computed_s"] = {s: round(after[s] - busy.get(s, 0.0), 2) for s in after}
    return found


def balance(box: Box, one: dict[str, Any], goal: float = GOAL) -> dict[str, Any]:
    """Images a second on both against one, and the CPU share of each process.

    `ratio`, which is judged, is with as many clients for both together as the one had: half for
    each. What one GPU makes of half the clients is what `ratio_half` compares with; `ratio_full` is
    with as many clients for each GPU as the one had.
    """
    found: dict[str, Any] = {"one_gpu": one}
    box.wrk.run(box.url, box.clients, 2)
    cpu = rig.CpuShares(box.service)
    busy = rig.metric(box.service, "gpusup_worker_busy_seconds_total", "slot")
    began = time.monotonic()
    with box.load(2) as sample:
        found["both"] = box.wrk.run(box.url, box.clients, box.seconds)
    took = time.monotonic() - began
    after = rig.metric(box.service, "gpusup_worker_busy_seconds_total", "slot")
    found["computing"] = {s: round((after[s] - busy.get(s, 0.0)) / took, 2) for s in after}
    found["cores"] = cpu.stop()
    found["shares"] = box.by_slot(sample.shares(began))
    found["both_full"] = box.wrk.run(box.url, 2 * box.clients, box.seconds)
    if one.get("full"):
        full, half = (one[name]["images_per_s"] for name in RUNS)
        found["ratio"] = round(found["both"]["images_per_s"] / full, 3)
        found["ratio_half"] = round(found["both"]["images_per_s"] / half, 3)
        found["ratio_full"] = round(found["both_full"]["images_per_s"] / full, 3)
        failed = found["both"]["failed"] or found["both_full"]["failed"]
        found["right"] = found["ratio"] >= goal and not failed
    return found


def foreign(box: Box) -> dict[str, Any]:
    """Another process takes half of the second GPU's memory and time."""
    if box.cpu:
        return {"skipped": "needs a GPU"}
    found: dict[str, Any] = {}
    env = {"CUDA_VISIBLE_DEVICES": box.uuid(box.second)}
    for name in ("before", "with"):
        if name == "with":
            with ballast("--take-share", "0.5", "--busy", "0.5", env=env) as held:
                found["taken_gib"] = round(held["taken"] / 2**30, 1)
                time.sleep(1)
                found[name] = shared(box)
                device = box.service.slot(box.second)["device"]
                views = box.service.status()["devices"]
                found["device"] = next(d for d in views if d["name"] == device)
        else:
            found[name] = shared(box)
    found["right"] = not found["with"]["load"]["failed"] and not found["with"]["sample_failed"]
    return found


def shared(box: Box) -> dict[str, Any]:
    began = time.monotonic()
    with box.load(4) as sample:
        load = box.wrk.run(box.url, box.clients, 5)
    return {
        "load": load,
        "shares": box.by_slot(sample.shares(began + 1)),
        "sample_failed": sample.failed(),
    }


def drain(box: Box, idle: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Drain the second GPU under load, see its memory come back, let it work again."""
    found: dict[str, Any] = {}
    uuid = box.uuid(box.second)
    with box.load() as load:
        time.sleep(1)
        found["shares_before"] = box.by_slot(load.shares(time.monotonic() - 0.9))
        found["drain"] = box.ctl("drain", box.second)
        drained = time.monotonic()
        time.sleep(1)
        if not box.cpu:
            used = rig.gpus()[uuid]["used_mib"]
            found["used_mib"] = {"idle": idle[uuid]["used_mib"], "drained": used}
            found["memory_back"] = used <= idle[uuid]["used_mib"] + NEAR_MIB
        found["shares_drained"] = box.by_slot(load.shares(drained))
        began = time.monotonic()
        found["uncordon"] = box.ctl("uncordon", box.second)
        found["ready_again_s"], found["shares_after"] = returned(box, load, began)
    found |= told(load)
    found["right"] = (
        found["drain"]["exit"] == 0
        and found["uncordon"]["exit"] == 0
        and not load.failed()
        and found.get("memory_back", True)
        and first_alone(box, found["shares_drained"])
        and box.second in found["shares_after"]
    )
    return found


def returned(
    box: Box, load: rig.Load, began: float, limit_s: float = 30.0
) -> tuple[float, dict[str, float]]:
    """Seconds until the second GPU works again, and the shares in the two that follow."""
    box.ready(box.second, limit_s)
    since = time.monotonic()
    time.sleep(2)
    return round(since - began, 2), box.by_slot(load.shares(since))


def first_alone(box: Box, shares: dict[str, float]) -> bool:
    """Whether the first GPU answered and no worker of the second did, living or dead."""
    return box.first in shares and not {box.second, "gone"} & shares.keys()


def swap(box: Box) -> dict[str, Any]:
    """New versions under load, by both strategies; then versions that fail to load."""
    found: dict[str, Any] = {}
    right = True
    wanted = (
        ("auto", (), 0),
        ("in-place", (), 0),
        ("auto", ("--set", "fails=true"), 6),
        ("in-place", ("--set", "fails=true"), 6),
    )
    current = int(box.service.status()["models"][0]["version"])
    for number, (strategy, more, code) in enumerate(wanted, current + 1):
        name = f"{strategy}{' failing' if more else ''}"
        ready = Ready(box.service)
        with box.load() as load, rig.looking(ready.look, 0.03):
            time.sleep(0.5)
            done = box.ctl(
                "reload-model", "resnet", "--version", str(number), "--strategy", strategy, *more
            )
            since = time.monotonic()
            time.sleep(1)
            box.service.until(lambda: any(a.began >= since for a in load.answers[-99:]), 30)  # noqa: B023
        versions = sorted({a.version for a in load.answers if a.began >= since})
        current = current if code else number
        ok = (
            done["exit"] == code
            and not load.failed()
            and versions == [str(current)]
            and (ready.least or 0) >= 1
        )
        found[name] = {
            **done, "versions_after": versions, "least_ready": ready.least, **told(load), "ok": ok,
        }  # fmt: skip
        right &= ok
        box.all_well()
    found["right"] = right
    return found


class Ready:
    """The fewest ready workers of the model at any look."""

    def __init__(self, service: Service) -> None:
        self.least: int | None = None
        self._service = service

    def look(self) -> None:
        if status := self._service.try_status():
            ready = int(status["models"][0]["ready"])
            self.least = ready if self.least is None else min(self.least, ready)


def kill(box: Box) -> dict[str, Any]:
    """SIGKILL for the second GPU's worker under load."""
    found: dict[str, Any] = {}
    with box.load() as load:
        time.sleep(1)
        old = box.pid(box.second)
        executing = box.service.slot(box.second)["in_flight"]
        os.kill(old, signal.SIGKILL)
        killed = time.monotonic()

        def answers_again() -> float:
            pid = box.pid(box.second)
            if pid in (0, old):
                return 0.0
            return min((a.ended for a in load.answers[-2000:] if a.pid == pid), default=0.0)

        found["kill_to_answer_s"] = round(box.service.until(answers_again, 45) - killed, 3)
        time.sleep(1)
        found["phases_s"] = box.service.slot(box.second)["seconds"]
    statuses = load.counts(killed)
    found |= {"executing_before": executing, **told(load)}
    found["right"] = set(statuses) <= {"200", "502"} and statuses.get("502", 0) <= 16
    return found


def lost(box: Box, overrides: Path) -> dict[str, Any]:
    """The probe reports the second GPU lost, and later sees it again."""
    if box.cpu:
        return {"skipped": "needs a GPU"}
    found: dict[str, Any] = {}
    device = box.service.slot(box.second)["device"]
    with box.load() as load:
        time.sleep(0.5)
        write(overrides, {device: {"lost": True}})
        began = time.monotonic()
        box.service.until(lambda: box.service.slot(box.second)["slot_state"] == "lost", 15)
        found["out_of_rotation_s"] = round(time.monotonic() - began, 2)
        time.sleep(0.5)
        since = time.monotonic()
        time.sleep(2)
        status = box.service.status()
        slot = box.service.slot(box.second)
        found["slot"] = {k: slot[k] for k in ("state", "slot_state", "why")}
        found["fault"] = next(d for d in status["devices"] if d["name"] == device)["fault"]
        found["service"] = f"{status['state']}: {status['reason']}"
        found["readyz"] = box.service.get("/readyz").status
        found["shares_lost"] = box.by_slot(load.shares(since))
        found["counts_lost"] = load.counts(since)
        write(overrides, {})
        began = time.monotonic()
        found["back_s"], found["shares_back"] = returned(box, load, began, 45)
    found |= told(load)
    found["right"] = (
        set(found["counts_lost"]) == {"200"}
        and bool(found["slot"]["why"] or found["fault"])
        and first_alone(box, found["shares_lost"])
        and box.second in found["shares_back"]
    )
    return found


def hidden(cpu: bool, uuids: list[str]) -> dict[str, Any]:
    """A service that inherits the second GPU only."""
    if cpu:
        return {"skipped": "needs a GPU"}
    config = rig.PRELOAD + rig.resnet(cpu)
    env = {"CUDA_VISIBLE_DEVICES": uuids[1]}
    with rig.started(config, env=env, limit_s=60) as service:
        status = service.status()
        answer = service.predict("resnet", rig.IMAGE).json()
        listed = rig.gpu_of_pids().get(answer["pid"], "pid not listed")
    found: dict[str, Any] = {
        "wanted": uuids[1],
        "slots": {s["slot"]: s["state"] for s in status["slots"]},
        "devices": {d["name"]: d["uuid"] for d in status["devices"]},
        "by_torch": answer["gpu"],
        "by_nvidia_smi": listed,
    }
    found["right"] = (
        len(found["slots"]) == 1
        and list(found["devices"].values()) == uuids[1:2]
        and answer["gpu"] == uuids[1]
    )
    return found


def told(load: rig.Load) -> dict[str, Any]:
    return {
        "counts": load.counts(),
        "failed": load.failed(),
        "errors": load.errors(),
        "longest_s": load.longest_s(),
    }


def write(path: Path, rules: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(rules))
    fresh.replace(path)

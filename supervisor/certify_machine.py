"""What was tested, for the head of the report."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import psutil

from gpusup.conf.package import package_version
from gpusup.conf.units import format_size

from .certify_service import CertifyError, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`gpu`: whether a GPU holds the slots; else much can't be shown here."""

    lines: dict[str, str]
    gpu: bool


async def look_at(target: Target) -> Machine:
    lines = {
        "machine": f"{platform.node()}, {os.cpu_count()} cores, "
        f"{format_size(psutil.virtual_memory().total)} memory, {platform.system()} "
        f"{platform.release()}",
        "service": target.url if not target.owned else "started by certify",
        "gpusup": package_version(),
    }
    gpu = False
    try:
        status = await target.status()
    except CertifyError:
        lines["devices"] = "unknown: the control socket can't be reached"
        return Machine(lines=lines, gpu=False)
    titles: dict[str, int] = {}
    for device in status["devices"]:
        gpu = gpu or device["kind"] == "cuda"
        title = f"{device['title'] or device['kind']} ({format_size(device['total'])})"
        titles[title] = titles.get(title, 0) + 1
    lines["devices"] = ", ".join(f"{n} x {t}" for t, n in titles.items())
    slots = [s for s in status["slots"] if s["model"] == target.model]
    lines["model"] = f"{target.model}, {len(slots)} workers"
    support: dict[str, Any] = {}
    try:
        support = await target.call("GET", "/support")
    except CertifyError:
        return Machine(lines=lines, gpu=gpu)
    versions = support.get("versions", {})
    if target.config is None and versions.get("gpusup"):
        lines["gpusup"] = str(versions["gpusup"])
    lines["torch"] = str(versions.get("torch", ""))
    if driver := support.get("probe", {}).get("driver"):
        lines["driver"] = str(driver)
    return Machine(lines=lines, gpu=gpu)

"""`gpusupctl support-bundle`: one tar with what somebody needs who wasn't there. No secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any, Final

from .ctl_client import Client, CtlError

#: Values under such keys are never written down, whatever they are.
_SECRET: Final = re.compile(r"(?i)key|secret|token|password|passwd|credential|auth|cookie")
_LOG_BYTES: Final = 1024 * 1024
_HIDDEN: Final = "(removed)"
#: Keys with "key" in them that say where a secret is, not what it is.
_HARMLESS: Final = frozenset({"tls_key", "api_keys"})


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy in which what looks like a secret by its key is gone."""
    if isinstance(value, dict):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, name) for inner in value]
    if name and _SECRET.search(name) and name not in _HARMLESS and value not in ("", None):
        return _HIDDEN
    return value


def write(client: Client, path: str) -> str:
    """Write the bundle and return its path. What can't be had is named in it, not fatal."""
    status = client.get("status")  # without a service there is no bundle
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = path or f"gpusup-support-{stamp}.tar.gz"
    root = f"gpusup-support-{stamp}"
    problems: list[str] = []

    def fetch(what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except CtlError as error:
            problems.append(f"{what}: {error}")
            return None

    files: dict[str, str] = {"status.json": _json(status)}
    for name, ask in (
        ("changes.json", lambda: client.get("changes")),
        ("leases.json", lambda: client.get("leases")),
        ("plan.json", lambda: client.get("plan")),
        ("support.json", lambda: client.get("support")),
    ):
        found = fetch(name, ask)
        if found is not None:
            files[name] = _json(without_secrets(found))
    events = fetch("events.jsonl", lambda: client.get("events")["events"])
    if events:
        files["events.jsonl"] = "".join(json.dumps(event) + "\n" for event in events)
    metrics = fetch("metrics.txt", lambda: client.text("metrics"))
    if metrics:
        files["metrics.txt"] = metrics
    for slot in status["slots"]:
        name = slot["slot"]
        found = fetch(f"logs/{name}.txt", lambda name=name: client.get("slots", name, "logs"))  # type: ignore[misc]
        if found:
            files[f"logs/{name}.txt"] = "".join(line + "\n" for line in found["lines"])
    logging = json.loads(files.get("support.json", "{}")).get("config", {}).get("log", {})
    if path_of_log := logging.get("file"):
        files["service.log"] = _end_of(path_of_log, problems)
    files["machine.json"] = _json(_machine())
    files["problems.txt"] = "".join(problem + "\n" for problem in problems)
    try:
        _pack(path, root, files)
    except OSError as error:
        raise CtlError(f"cannot write {path}: {error.strerror}") from error
    return path


def _end_of(path: str, problems: list[str]) -> str:
    """The last part of the service's own log. It holds no secrets from the beginning."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        problems.append(f"service.log: cannot read {path}: {error.strerror}")
        return ""


def _pack(path: str, root: str, files: dict[str, str]) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        mode = "w" if path.endswith(".tar") else "w:gz"
        with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
            for name, text in files.items():
                data = text.encode()
                entry = tarfile.TarInfo(f"{root}/{name}")
                entry.size = len(data)
                entry.mtime = int(time.time())
                entry.mode = 0o600
                tar.addfile(entry, io.BytesIO(data))


def _machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "python": sys.version,
        "cpus": os.cpu_count(),
        "user": os.geteuid(),
    }
    for name, path in (
        ("driver", "/proc/driver/nvidia/version"),
        ("memory", "/proc/meminfo"),
        ("load", "/proc/loadavg"),
        ("cgroup", "/proc/self/cgroup"),
    ):
        try:
            with open(path) as file:
                facts[name] = file.read(4096).splitlines()[:8]
        except OSError as error:
            facts[name] = f"cannot read {path}: {error.strerror}"
    return facts


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"

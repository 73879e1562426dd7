"""The service under test: one that certify starts itself, or one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from gpusup.conf.load import load
from gpusup.conf.precedence import NICE, prefer
from gpusup.conf.schema import Config

from . import child_service
from .certify_toml import derive
from .ctl_client import find_socket

START_LIMIT_S: Final = 300.0
CALL_LIMIT_S: Final = 330.0
POLL_S: Final = 0.02
NO_CONTROL: Final = "the control socket can't be reached from here"


class CertifyError(Exception):
    """The test can't go on. One line for the person who started it."""


@dataclass(slots=True, kw_only=True)
class Target:
    """`control` is None where only the port can be reached; `config` where it isn't ours."""

    url: str
    control: aiohttp.ClientSession | None
    config: Config | None = None
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    log_path: Path | None = None
    overrides: Path | None = None  # the probe's, to lose a GPU with
    notes: list[str] = field(default_factory=list)
    model: str = ""
    start_s: float = 0.0
    wall: Any = None  # certify_wall.Wall: the namespace from which clients can vanish

    @property
    def owned(self) -> bool:
        return self.process is not None

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call of the control API. Raises CertifyError on anything but success."""
        if self.control is None:
            raise CertifyError(NO_CONTROL)
        try:
            async with self.control.request(method, f"http://gpusup{path}", json=body) as response:
                if "json" not in response.content_type:
                    return await response.text()
                answer = await response.json()
                if response.status >= 400:
                    raise CertifyError(f"{method} {path}: {answer.get('error', response.status)}")
                return answer
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise CertifyError(
                f"{method} {path}: {str(error) or type(error).__name__}{self.last_words()}"
            ) from error

    async def status(self) -> Any:
        return await self.call("GET", "/status")

    async def metric(self, name: str) -> float:
        """The sum over all its series; 0 if there is none."""
        text = await self.call("GET", "/metrics")
        total = 0.0
        for family in text_string_to_metric_families(text):
            total += sum(s.value for s in family.samples if s.name == name)
        return total

    async def until(self, what: str, holds: Callable[[Any], bool], limit_s: float) -> float:
        """Ask for the status until `holds`. Returns the seconds. Raises CertifyError."""
        began = time.monotonic()
        told = ""
        while True:
            with contextlib.suppress(CertifyError):
                status = await self.status()
                if holds(status):
                    return time.monotonic() - began
                told = "; ".join(
                    f"{s['slot']}: {s['state']} {s['why'] or s['last_exit']}"
                    for s in status["slots"]
                    if s["state"] != "ready"
                )
            if self.process is not None and self.process.poll() is not None:
                raise CertifyError(
                    f"the service ended with {self.process.returncode}{self.last_words()}"
                )
            if time.monotonic() - began > limit_s:
                raise CertifyError(f"{what} did not happen within {limit_s:g} s ({told.strip()})")
            await asyncio.sleep(POLL_S)

    async def change(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask for a change and wait for its end. Returns its view."""
        answer = await self.call("POST", path, body)
        return await self.call("GET", f"/changes/{answer['change']}?wait=300")

    async def slots(self) -> list[Any]:
        """Of the model under test."""
        return [s for s in (await self.status())["slots"] if s["model"] == self.model]

    def processes(self) -> list[psutil.Process]:
        """All living ones of a service of ours, the supervisor first."""
        if self.process is None:
            return []
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def named(self, title: str) -> list[psutil.Process]:
        """By the titles they give themselves: "gpusup: probe"."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).strip().startswith(title):
                    found.append(process)
        return found

    def log_text(self) -> str:
        if self.log_path is None or not self.log_path.exists():
            return ""
        return self.log_path.read_text(errors="replace")

    def last_words(self) -> str:
        return "".join(f"\n  {line}" for line in self.log_text().splitlines()[-8:])


def all_ready(status: Any) -> bool:
    """Raises CertifyError if a slot has given up."""
    for slot in status["slots"]:
        if slot["state"] == "failed":
            raise CertifyGaveUp(f"{slot['slot']} has failed: {slot['why']}")
    slots = status["slots"]
    serving = any(proxy["state"] == "serving" for proxy in status["proxies"])
    return bool(slots) and serving and all(slot["state"] == "ready" for slot in slots)


class CertifyGaveUp(Exception):
    """A slot will not come back by itself; waiting longer is in vain."""


@asynccontextmanager
async def started(
    path: Path | None,
    *,
    model: str = "",
    models: Mapping[str, Mapping[str, Any]] | None = None,
    server: Mapping[str, Any] | None = None,
) -> AsyncIterator[Target]:
    """`gpusup run` as a child, every slot ready; stopped at the end, whatever happened.

    Raises ConfigError, CertifyError.
    """
    folder = Path(tempfile.mkdtemp(prefix="gc-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        text, notes = derive(path, folder, models=models, server=server)
        config_path, log = folder / "gpusup.toml", folder / "log"
        config_path.write_text(text)
        config = load(config_path)
        # Only where faults are wanted: else the probe is to read the driver as it always does.
        overrides = folder / "overrides.json" if models else None
        began = time.monotonic()
        env = {"GPUSUP_PROBE_OVERRIDES": str(overrides)} if overrides is not None else None
        process = child_service.start(config_path, log, env)
        if prefer(process.pid):
            notes.append(f"The service ran with nice {NICE}, as gpusup.service has it.")
        else:
            notes.append(
                f"The service ran without the precedence of gpusup.service (nice {NICE}): root may "
                "give it."
            )
        connector = aiohttp.UnixConnector(str(folder / "run" / "control.sock"))
        timeout = aiohttp.ClientTimeout(total=CALL_LIMIT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as control:
            target = Target(
                url="", control=control, config=config, folder=folder, process=process,
                log_path=log, overrides=overrides, notes=notes,
            )  # fmt: skip
            try:
                await target.until("the start", all_ready, START_LIMIT_S)
            except CertifyGaveUp as error:
                raise CertifyError(f"{error}{target.last_words()}") from error
            target.start_s = time.monotonic() - began
            status = await target.status()
            target.url = f"http://{status['listen']}"
            target.model = choose(model or config.server.default_model, status)
            yield target
    finally:
        if process is not None:
            await child_service.stop(process)
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def running_at(url: str, control_path: str, model: str) -> AsyncIterator[Target]:
    """A service that is there already. `control_path` "": only its port. Raises CertifyError."""
    folder = Path(tempfile.mkdtemp(prefix="gc-"))
    try:
        async with contextlib.AsyncExitStack() as stack:
            control = None
            if control_path:
                control = await stack.enter_async_context(
                    aiohttp.ClientSession(
                        connector=aiohttp.UnixConnector(find_socket(control_path)),
                        timeout=aiohttp.ClientTimeout(total=CALL_LIMIT_S),
                    )
                )
            target = Target(url=url.rstrip("/"), control=control, folder=folder, model=model)
            if control is not None:
                target.model = choose(model, await target.status())
            elif not model:
                target.model = await _only_model(target.url)
            yield target
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choose(wanted: str, status: Any) -> str:
    """Raises CertifyError if there is no such model."""
    names = [model["name"] for model in status["models"]]
    if wanted and wanted not in names:
        raise CertifyError(f"no model {wanted}; there are {', '.join(names)}")
    return wanted or str(names[0])


async def _only_model(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            names: Sequence[str] = [m["id"] for m in (await response.json())["data"]]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
        raise CertifyError(
            f"no gpusup answers at {url}: {str(error) or type(error).__name__}"
        ) from error
    if not names:
        raise CertifyError(f"{url} serves no model")
    return names[0]

"""`gpusup demo`: start the service, classify 20 digits, then break it in three ways under load.

Everything runs in a folder of its own below the temporary one, on a free port, and is gone at the
end. Exit code 0: every request was answered, and rightly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.table import Table

from . import child_service
from .certify_toml import DIGITS
from .exit_codes import FAILED, INTERRUPTED, OK
from .steady import Digit, Load, Seen, Window, ask, held_out, window

START_LIMIT_S: Final = 180.0
STEP_LIMIT_S: Final = 120.0
SHORT: Final = 50
#: Between two looks at the status: often enough to measure by, seldom enough not to be a load.
POLL_S: Final = 0.015
#: Load before and after each event, so that its window has something to compare with.
CALM_S: Final = 0.5

CONFIG: Final = """\
[server]
listen = "127.0.0.1:0"
run_dir = "{folder}/run"
state_dir = "{folder}/state"

[models.digits]
handler = "{handler}"
retry = "safe"  # a pure function: what a dying worker had begun may run once more
"""


class DemoFailed(Exception):
    """The demonstration can't go on. The text is for the person who started it."""


@dataclass(slots=True)
class Event:
    """One thing that was done under load. `took_s`: until all was well again."""

    name: str
    took_s: float
    window: Window


@dataclass(slots=True)
class Outcome:
    device: str = ""
    workers: int = 0
    start_s: float = 0.0
    predictions: list[tuple[Digit, Seen]] = field(default_factory=list)
    events: dict[str, Event] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    exit_code: int = 0

    def right(self) -> int:
        return sum(1 for digit, seen in self.predictions if seen.digit == digit.label)

    def report(self) -> dict[str, Any]:
        """The object that `--json` prints. Times in seconds."""
        asked = [seen for _, seen in self.predictions]
        return {
            "requests": len(asked) + len(self.seen),
            "failed": sum(1 for one in [*asked, *self.seen] if one.problem),
            "accuracy": self.right() / len(asked) if asked else 0.0,
            "kill_to_ready_s": round(self.events["kill"].took_s, 4),
            "swap_gap_s": round(self.events["swap"].window.gap_s, 4),
            "workers": self.workers,
            "device": self.device,
            "start_s": round(self.start_s, 3),
            "drain_s": round(self.events["drain"].took_s, 4),
            "swap_s": round(self.events["swap"].took_s, 4),
            "service_exit_code": self.exit_code,
            "events": {
                name: {
                    "took_s": round(event.took_s, 4),
                    "requests": event.window.requests,
                    "failed": event.window.failed,
                    "slowest_s": round(event.window.slowest_s, 4),
                    "gap_s": round(event.window.gap_s, 4),
                }
                for name, event in self.events.items()
            },
            "problems": list(dict.fromkeys(o.problem for o in [*asked, *self.seen] if o.problem)),
        }


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="start a service with the bundled model, use it, break it, and see it recover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.set_defaults(func=lambda args: run(args.json))


def run(as_json: bool) -> int:
    """The whole demonstration. Returns the exit code."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        outcome = asyncio.run(child_service.interruptible(_demo(console)))
    except DemoFailed as error:
        sys.stderr.write(f"gpusup demo: {error}\n")
        if as_json:
            sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("gpusup demo: interrupted\n")
        return INTERRUPTED
    report = outcome.report()
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _show_end(console, report)
    return OK if not report["failed"] and not outcome.exit_code else FAILED


async def _demo(console: Console) -> Outcome:
    digits = held_out(Path(str(files("gpusup.conf") / "digits")))
    outcome = Outcome()
    # The sockets' paths must stay short (sockaddr_un), and some set a long TMPDIR.
    short = None if len(tempfile.gettempdir()) <= SHORT else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="gpusup-demo-", dir=short))
    try:
        async with _service(folder, console) as service:
            outcome.start_s = service.start_s
            await _use(service, digits, outcome, console)
            service.finished = True
        outcome.exit_code = service.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


@dataclass(slots=True)
class Service:
    process: subprocess.Popen[bytes]
    control: aiohttp.ClientSession
    log: Path
    start_s: float = 0.0
    url: str = ""
    exit_code: int = 0
    finished: bool = False

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call of the control API. Raises DemoFailed on anything but success."""
        try:
            async with self.control.request(method, f"http://gpusup{path}", json=body) as response:
                answer = await response.json()
                if response.status >= 400:
                    raise DemoFailed(f"{method} {path}: {answer.get('error', response.status)}")
                return answer
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise DemoFailed(f"{method} {path}: {error}{self.last_words()}") from error

    async def until(self, what: str, holds: Callable[[Any], bool], limit_s: float) -> Any:
        """Ask for the status until `holds` says so. Returns that status."""
        end = time.monotonic() + limit_s
        while True:
            status = await self.call("GET", "/status")
            if holds(status):
                return status
            if time.monotonic() > end:
                told = "; ".join(f"{s['slot']}: {s['state']} {s['why']}" for s in status["slots"])
                raise DemoFailed(f"{what} did not happen within {limit_s:g} s ({told})")
            await asyncio.sleep(POLL_S)

    async def change(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for a change to end. Raises DemoFailed unless it is done."""
        path = f"/changes/{answer['change']}?wait={STEP_LIMIT_S:g}"
        change: Mapping[str, Any] = await self.call("GET", path)
        if change["state"] != "done":
            raise DemoFailed(f"{change['title']}: {change['state']}: {change['text']}")
        return change

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-10:] if self.log.exists() else []
        return "".join(f"\n  {line}" for line in lines)


@asynccontextmanager
async def _service(folder: Path, console: Console) -> AsyncIterator[Service]:
    """`gpusup run` as a child, ready to answer; stopped at the end, whatever happened."""
    (folder / "state").mkdir()
    config = folder / "gpusup.toml"
    config.write_text(CONFIG.format(folder=folder, handler=DIGITS))
    log = folder / "log"
    began = time.monotonic()
    process = child_service.start(config, log)
    connector = aiohttp.UnixConnector(str(folder / "run" / "control.sock"))
    timeout = aiohttp.ClientTimeout(total=STEP_LIMIT_S + 30)
    service: Service | None = None
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as control:
            service = Service(process, control, log)
            await _wait_for_control(service)
            with console.status("starting: torch is being imported, workers load the model"):
                status = await service.until("the start", _all_ready, START_LIMIT_S)
            service.start_s = time.monotonic() - began
            service.url = f"http://{status['listen']}"
            yield service
    finally:
        code = await child_service.stop(process)
        if service is not None:
            service.exit_code = code
            if code and service.finished:
                console.print(f"the service ended with {code}{service.last_words()}", markup=False)


async def _wait_for_control(service: Service) -> None:
    end = time.monotonic() + START_LIMIT_S
    while True:
        code = service.process.poll()
        if code is not None:
            raise DemoFailed(f"the service ended with {code}:{service.last_words()}")
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with service.control.get("http://gpusup/status"):
                return
        if time.monotonic() > end:
            raise DemoFailed(f"no answer within {START_LIMIT_S:g} s:{service.last_words()}")
        await asyncio.sleep(0.02)


def _all_ready(status: Any) -> bool:
    slots = status["slots"]
    failed = [slot for slot in slots if slot["state"] == "failed"]
    if failed:
        raise DemoFailed(f"{failed[0]['slot']} can't load the model: {failed[0]['why']}")
    return bool(slots) and all(slot["state"] == "ready" for slot in slots)


async def _use(service: Service, digits: list[Digit], outcome: Outcome, console: Console) -> None:
    status = await service.call("GET", "/status")
    outcome.workers = len(status["slots"])
    outcome.device = ", ".join(
        dict.fromkeys(str(d["title"] or d["kind"]) for d in status["devices"])
    )
    url = f"{service.url}/predictions/digits"
    console.print(
        f"{outcome.workers} workers on {outcome.device} after {outcome.start_s:.2f} s, "
        f"listening on {service.url}"
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for digit in digits:
            outcome.predictions.append((digit, await ask(session, url, digit)))
        _show_predictions(console, outcome)
        load = Load(session, url, digits)
        load.start()
        try:
            await asyncio.sleep(CALM_S)
            for name, act in (("kill", _kill), ("drain", _drain), ("swap", _swap)):
                began = time.monotonic()
                with console.status(f"{name}, under load"):
                    title, took = await act(service)
                ended = time.monotonic()
                await asyncio.sleep(CALM_S)
                event = Event(title, took, window(load.seen, began, ended))
                outcome.events[name] = event
                _show_event(console, event)
        finally:
            await load.stop()
            outcome.seen = load.seen


async def _kill(service: Service) -> tuple[str, float]:
    """SIGKILL a worker; over when its slot has a new one that answers."""
    status = await service.call("GET", "/status")
    victim = next(slot for slot in status["slots"] if slot["state"] == "ready" and slot["pid"])
    slot, pid, generation = victim["slot"], victim["pid"], victim["generation"]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def back(status: Any) -> bool:
        return any(
            s["slot"] == slot and s["generation"] > generation and s["state"] == "ready"
            for s in status["slots"]
        )

    await service.until(f"the return of {slot}", back, STEP_LIMIT_S)
    return f"kill -9 of {slot}'s worker (pid {pid})", time.monotonic() - began


async def _drain(service: Service) -> tuple[str, float]:
    """Drain a slot and give it back; over when it is ready again."""
    status = await service.call("GET", "/status")
    slot = status["slots"][-1]["slot"]
    began = time.monotonic()
    await service.change(await service.call("POST", f"/slots/{slot}/drain", {}))
    await service.call("POST", f"/slots/{slot}/uncordon", {})
    await service.until(f"the return of {slot}", _all_ready, STEP_LIMIT_S)
    return f"drain and uncordon of {slot}", time.monotonic() - began


async def _swap(service: Service) -> tuple[str, float]:
    """Change the model's version; over when the change is done."""
    began = time.monotonic()
    answer = await service.call("POST", "/models/digits/reload", {"version": "2"})
    await service.change(answer)
    took = time.monotonic() - began
    status = await service.call("GET", "/status")
    version = next(m["version"] for m in status["models"] if m["name"] == "digits")
    if version != "2":
        raise DemoFailed(f"the change is done, but version {version} is served instead of 2")
    return "swap from version 1 to 2", took


def _show_predictions(console: Console, outcome: Outcome) -> None:
    table = Table("image", "is", "answer", "probability", "ms", box=None, pad_edge=False)
    for digit, seen in outcome.predictions:
        answer = str(seen.digit) if seen.digit >= 0 else seen.problem
        sure = f"{seen.probability:.4f}" if seen.digit >= 0 else ""
        style = "" if seen.digit == digit.label else "red"
        table.add_row(
            digit.name, str(digit.label), answer, sure, f"{seen.took * 1000:.1f}", style=style
        )
    console.print(table)
    console.print(f"{outcome.right()} of {len(outcome.predictions)} right\n")


def _show_event(console: Console, event: Event) -> None:
    seen = event.window
    console.print(
        f"{event.name}: all well after {event.took_s:.3f} s; {seen.requests} requests meanwhile, "
        f"{seen.failed} failed, slowest {seen.slowest_s * 1000:.0f} ms, "
        f"longest time without an answer {seen.gap_s * 1000:.0f} ms"
    )
    for problem in seen.problems[:5]:
        console.print(f"  {problem}", markup=False)


def _show_end(console: Console, report: Mapping[str, Any]) -> None:
    console.print(f"\n{report['requests']} requests, {report['failed']} failed")
    for problem in report["problems"][:10]:
        console.print(f"  {problem}", markup=False)

"""The order of the tests, the services they run on, and what a failure of the test itself means."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpusup.conf.load import load_file

from . import (
    certify_clients,
    certify_faults,
    certify_hostile,
    certify_mixed,
    certify_ramp,
    certify_stability,
    certify_swap,
    certify_wall,
)
from .certify_bench import Bench, Options, Series, bench_for
from .certify_load import LoadError
from .certify_machine import Machine, look_at
from .certify_progress import Shown
from .certify_report import write_all
from .certify_result import Result, counted
from .certify_service import CertifyError, CertifyGaveUp, Target, running_at, started
from .exit_codes import DEGRADED, FAILED, OK

Test = Callable[[Bench, Result], Awaitable[None]]

_MODULES: Final = {
    "load": certify_ramp,
    "mixed": certify_mixed,
    "stability": certify_stability,
    "swap": certify_swap,
    "faults": certify_faults,
    "clients": certify_clients,
    "hostile": certify_hostile,
}
TESTS: Final = tuple(_MODULES)

#: Tests that share one service. `load` comes first: the others work at a share of what it found.
GROUPS: Final = (("load", "mixed", "stability", "swap"), ("faults",), ("clients", "hostile"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    headline: str
    results: list[Result]
    files: list[Path]
    interrupted: bool = False


def exit_code(results: Sequence[Result]) -> int:
    """0 only if every test ran and passed; what could not run is never taken for passed."""
    found = counted(list(results))
    if found["failed"]:
        return FAILED
    return DEGRADED if found["skipped"] or not results else OK


def headline(results: Sequence[Result]) -> str:
    found = counted(list(results))
    if found["failed"]:
        names = ", ".join(r.name for r in results if r.verdict == "failed")
        return f"NOT CERTIFIED: {names} failed"
    if found["skipped"]:
        names = ", ".join(r.name for r in results if r.verdict == "skipped")
        return f"passed with {found['skipped']} skipped ({names}): not certified"
    some = len(results) < len(TESTS)
    return (
        f"passed: {', '.join(r.name for r in results)}" if some else "CERTIFIED: all seven passed"
    )


async def certify(options: Options, names: Sequence[str], shown: Shown) -> Report:
    """All of it, report included. Raises ConfigError, CertifyError when nothing can be tested.

    Cancelled, it reports the tests that had ended by then; asyncio.CancelledError if none had.
    """
    if not options.url:
        load_file(options.config)  # what is wrong with it is said before a folder is made
    _make_folder(options.report)
    series, results = Series(), list[Result]()
    facts: dict[str, Any] = {}
    machine: Machine | None = None
    groups = [tuple(TESTS)] if options.url else list(GROUPS)
    knee, number, began = 0.0, 0, time.time()
    interrupted = False
    try:
        for group in groups:
            mine = [name for name in group if name in names]
            if not mine:
                continue
            shown.step(f"starting a service for {', '.join(mine)}", 0.0)
            async with _service(options, mine) as target:
                if machine is None:
                    machine = await look_at(target)
                facts.setdefault("notes", []).extend(
                    n for n in target.notes if n not in facts.get("notes", [])
                )
                async with bench_for(options, shown, target, series) as bench:
                    bench.knee = knee
                    for name in mine:
                        shown.test(number, len(names), _MODULES[name].TITLE)
                        results.append(await _one(name, bench))
                        shown.result(results[-1])
                        number += 1
                    knee = bench.knee
                    facts.setdefault("bodies", bench.sizes_from)
                    facts.setdefault("model", target.model)
                    facts.setdefault("start_s", round(target.start_s, 2))
                    facts.setdefault("marks", _watermarks(target))
    except asyncio.CancelledError:
        if not results:
            raise
        interrupted = True
        for result in _not_run(names, results):
            result.skipped = "interrupted before its end"
            results.append(result)
    except (CertifyError, LoadError, OSError) as error:
        if not results:
            raise
        # Something was found out already; the rest is told as failed, not lost.
        for result in _not_run(names, results):
            result.check("could be run", False, " ".join(str(error).split())[-600:])
            shown.result(result)
            results.append(result)
    order = list(TESTS)
    results.sort(key=lambda r: order.index(r.name))
    title = headline(results)
    files = write_all(
        options, title, results, machine=machine, facts=facts, series=series.values, began=began
    )
    return Report(headline=title, results=results, files=files, interrupted=interrupted)


def _not_run(names: Sequence[str], results: Sequence[Result]) -> list[Result]:
    """One without a finding for each of `names` that is not among `results`."""
    there = {result.name for result in results}
    return [Result(name, _MODULES[name].TITLE) for name in names if name not in there]


def _make_folder(folder: Path) -> None:
    """First, not after hours of tests that could then not be reported. Raises CertifyError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CertifyError(f"cannot write to {folder}: {error.strerror}") from error


async def _one(name: str, bench: Bench) -> Result:
    """One test. What goes wrong inside it is its failure, in words."""
    result = Result(name, _MODULES[name].TITLE, began=time.monotonic())
    try:
        await _MODULES[name].run(bench, result)
    except (CertifyError, CertifyGaveUp, LoadError) as error:
        result.check("came to its end", False, str(error))
    except TimeoutError:
        result.check("came to its end", False, "something took too long")
    except OSError as error:
        result.check("came to its end", False, str(error))
    result.took_s = time.monotonic() - result.began
    with contextlib.suppress(CertifyError):
        await bench.settled()
    return result


@asynccontextmanager
async def _service(options: Options, names: Sequence[str]) -> AsyncIterator[Target]:
    if options.url:
        async with running_at(options.url, options.control, options.model) as target:
            yield target
        return
    models: Mapping[str, Mapping[str, Any]] = {}
    server: Mapping[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        if "faults" in names:
            models = certify_faults.extra_models(options.config)
        if "clients" in names or "hostile" in names:
            server = dict(certify_clients.SHORT_LIMITS)
        wall = None
        if "clients" in names:
            wall = await asyncio.to_thread(certify_wall.build)
            if wall is not None:
                stack.callback(wall.remove)
                server = {**server, "listen": f"{wall.address}:0"}
        target = await stack.enter_async_context(
            started(options.config, model=options.model, models=models, server=server)
        )
        target.wall = wall
        yield target


def _watermarks(target: Target) -> dict[str, float]:
    if target.config is None:
        return {}
    mark = target.config.watermark
    return {"queue": mark.queue, "shed": mark.shed}

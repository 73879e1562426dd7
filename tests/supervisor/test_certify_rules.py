"""The rules of certify's own tests: verdicts, interruptions, what is measured and how."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusup.supervisor import certify_meter, certify_run
from gpusup.supervisor.certify_faults import _kill
from gpusup.supervisor.certify_load import Load
from gpusup.supervisor.certify_math import Ratio, Sample
from gpusup.supervisor.certify_mixed import judge
from gpusup.supervisor.certify_progress import Shown
from gpusup.supervisor.certify_result import Result
from gpusup.supervisor.certify_run import _one
from gpusup.supervisor.certify_service import CertifyError
from gpusup.supervisor.certify_stability import load_past, save_past
from gpusup.supervisor.certify_swap import BROKEN, first_answers, usual_while, with_broken
from gpusup.supervisor.certify_toml import to_toml


class Calm:
    """A bench on which nothing is at work."""

    knee, sizes_from = 0.0, "nowhere"

    async def settled(self) -> None: ...


async def test_a_disk_that_is_full_fails_the_test_that_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(bench: Any, result: Result) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpusup.supervisor.certify_mixed.run", run)
    found = await _one("mixed", Calm())  # type: ignore[arg-type]
    assert found.verdict == "failed"
    assert "No space left" in found.checks[0].text


async def test_an_interruption_keeps_what_had_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = asyncio.Event()
    written: list[list[Result]] = []

    @asynccontextmanager
    async def service(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(notes=[], model="m", start_s=0.0, config=None)

    @asynccontextmanager
    async def bench(*_: Any) -> AsyncIterator[Any]:
        yield Calm()

    async def load(bench: Any, result: Result) -> None:
        result.check("highest rate", True, "100/s")

    async def stability(bench: Any, result: Result) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def look(target: Any) -> None: ...

    def write(options: Any, title: str, results: list[Result], **_: Any) -> list[Path]:
        written.append(results)
        return []

    for name, stub in (
        ("load_file", lambda path: None), ("_service", service), ("bench_for", bench),
        ("look_at", look), ("write_all", write), ("certify_ramp.run", load),
        ("certify_stability.run", stability),
    ):  # fmt: skip
        monkeypatch.setattr(f"gpusup.supervisor.certify_run.{name}", stub)
    options: Any = SimpleNamespace(url="", config=None, report=tmp_path)
    task = asyncio.create_task(certify_run.certify(options, ("load", "stability"), Shown()))
    await begun.wait()
    task.cancel()
    report = await task
    assert report.interrupted
    assert [(r.name, r.verdict) for r in written[0]] == [
        ("load", "passed"), ("stability", "skipped"),
    ]  # fmt: skip
    assert written[0][1].skipped == "interrupted before its end"


def test_a_process_that_is_gone_can_not_be_killed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(CertifyError, match=f"SIGKILL to process {gone.pid}: No such process"):
        _kill(gone.pid, signal.SIGKILL)


def test_the_handler_of_a_model_with_any_name_is_broken() -> None:
    tables = {"models": {"a": {"handler": "h:A"}, "b.c d": {"handler": "h:B", "workers": 1}}}
    raw = tomllib.loads(with_broken(to_toml(tables), "b.c d"))
    assert raw["models"] == {"a": {"handler": "h:A"}, "b.c d": {"handler": BROKEN, "workers": 1}}


async def test_no_client_repeats_the_arrivals_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[dict[str, Any]] = []

    async def write(client: Any, order: Any) -> None:
        plans.append(order["run"])

    load = Load(clients=[object(), object(), object()], url="")  # type: ignore[list-item]
    monkeypatch.setattr("gpusup.supervisor.certify_load._write", write)
    for _ in range(3):
        await load._begin(30.0, 1.0)
    assert len({plan["seed"] for plan in plans}) == len(plans) == 9


def test_first_answers_are_those_of_the_new_version() -> None:
    old = [Sample(n / 10, n / 10, n / 10 + 0.01, 200, version="1") for n in range(20)]
    new = [Sample(1 + n / 10, 1 + n / 10, 1.5 + n / 10, 200, version="2") for n in range(9)]
    found = first_answers([*old, *new], [(0.9, 1.4)], ["1", "2"])
    assert found == [[pytest.approx(0.5)] * 5]
    assert usual_while([*old, *new], [(0.9, 1.4)], 0.001) == [pytest.approx(0.01)]
    assert usual_while([], [(0.9, 1.4)], 0.02) == [0.02]


def test_an_interrupted_soak_goes_on_where_it_was(tmp_path: Path) -> None:
    path, key = tmp_path / "r" / "stability.jsonl", {"profile": "soak", "model": "m"}
    assert load_past(path, key) == (0.0, 0, 0)
    save_past(path, key, 60.0, 600, 0)
    save_past(path, key, 120.0, 1200, 1)
    assert load_past(path, key) == (120.0, 1200, 1)
    assert load_past(path, {"profile": "soak", "model": "other"}) == (0.0, 0, 0)


def test_the_meter_gives_the_time_of_a_bare_loop() -> None:
    process = certify_meter.start()
    assert process.stdout is not None
    try:
        times = [float(process.stdout.readline()) for _ in range(3)]
    finally:
        process.kill()
        process.communicate()
    assert all(0 < each < 10 for each in times)


async def test_a_meter_without_time_for_a_loop_adds_nothing() -> None:
    found: list[float] = []
    async with certify_meter.metered(found):
        pass
    assert found == []


def times(value: float, spread: float = 0.02) -> Ratio:
    return Ratio(value=value, low=value - spread, high=value + spread)


@pytest.mark.parametrize(
    ("change", "machine", "admitted", "verdict"),
    [
        (times(1.05), times(1.3), False, "passed"),
        (times(1.32), None, False, "failed"),
        (times(1.32), times(1.02), False, "failed"),
        (times(1.32), times(1.27), False, "skipped"),  # the cores are that much slower
        (times(1.6), times(1.27), False, "failed"),  # and the service more than that
        (times(1.2, 0.1), None, True, "passed"),
        (times(1.5), None, True, "failed"),
    ],
)
def test_what_hogs_do_is_held_against_what_they_do_to_a_bare_loop(
    change: Ratio, machine: Ratio | None, admitted: bool, verdict: str
) -> None:
    assert judge(change, machine, admitted=admitted) == verdict

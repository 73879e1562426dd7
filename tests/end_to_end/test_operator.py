"""What an operator sees on a service at work, and that its numbers can be believed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .load import Load
from .service import HANDLERS, Service, running

CONFIG = f"""
[models.double]
handler = "{HANDLERS}:Double"

[models.sleeper]
handler = "{HANDLERS}:Sleeper"
devices = ["cpu1"]
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG) as service:
        yield service


class Follower:
    """`gpusupctl VERB -f` in the background; its lines as they come."""

    def __init__(self, service: Service, *words: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpusup.supervisor.ctl", "--socket", str(service.run_dir),
             *words],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout
        self.lines.extend(self._process.stdout)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._thread.join()
        assert self._process.stdout
        self._process.stdout.close()


def test_top_shows_devices_slots_and_rates_of_a_box_at_work(service: Service) -> None:
    with Load(service, "/predictions/sleeper", clients=4) as load:
        load.wait_for(20)
        shown = service.ctl("top", "--once")
        load.wait_for(10)
    assert shown.returncode == 0, shown.stderr
    assert load.bad() == []
    text = shown.stdout
    assert re.search(r"cpu0 +normal +\S+ +\d+% +\S+GiB +2\.0GiB", text), text
    row = re.search(r"sleeper +ready +1 +1/1 +([\d.]+) +\d+ +([\d.]+)ms +([\d.]+)ms", text)
    assert row, text
    rate, p50, p99 = map(float, row.groups())
    # Each batch takes 0.1 s and holds what waits, at most the four clients.
    assert 1 < rate <= 45
    assert 95 <= p50 <= p99 < 5000
    slot = re.search(r"cpu1\.1 +ready +\S+ +sleeper@1 +1 +(\d+) +(\d+) +\d+MiB", text)
    assert slot, text
    assert 0 <= int(slot[1]) <= 4
    assert "\x1b" not in text


def test_events_are_followed_and_name_who_did_what(service: Service) -> None:
    follower = Follower(service, "events", "-f", "-o", "json")
    try:
        assert service.ctl("cordon", "cpu0", "--why", "the fan is loud").returncode == 0
        line = service.until(lambda: next((x for x in follower.lines if "fan is loud" in x), None))
        event = json.loads(line)
        assert event["kind"] == "operator"
        assert re.fullmatch(r"cpu0 cordoned by \S+: the fan is loud", event["text"])
    finally:
        follower.close()
        assert service.ctl("uncordon", "cpu0").returncode == 0


def test_a_model_that_was_taken_out_is_down_and_not_starting(service: Service) -> None:
    assert service.ctl("cordon", "cpu1.1").returncode == 0
    try:
        status = service.status()
        assert status["state"] == "down"
        assert "cpu1.1 is cordoned" in status["reason"]
    finally:
        service.ctl("uncordon", "cpu1.1")
    assert service.ctl("cordon", "cpu0").returncode == 0
    try:
        status = service.status()
        assert (status["state"], status["reason"]) == ("degraded", "cpu0 is cordoned")
    finally:
        service.ctl("uncordon", "cpu0")
    assert service.ctl("status").returncode == 0


def test_status_says_where_figures_come_from_and_how_memory_came_back(service: Service) -> None:
    assert service.ctl("restart", "cpu0").returncode == 0
    device = next(d for d in service.status()["devices"] if d["name"] == "cpu0")
    assert device["source"] == "resident"
    assert re.match(r"cpu0: memory back after \d+\.\d\d s", device["release"])
    wide = service.ctl("status", "-o", "wide").stdout
    assert re.search(r"FIGURES +AGE +RELEASE", wide)
    assert "memory back after" in wide


def test_dump_shows_where_the_worker_is(service: Service) -> None:
    with Load(service, "/predictions/sleeper", clients=2) as load:
        load.wait_for(4)
        dumped = service.ctl("dump", "cpu1.1")
    assert dumped.returncode == 0, dumped.stderr
    assert "most recent call first" in dumped.stdout
    assert "handlers.py" in dumped.stdout, "the line of the handler that sleeps"


def test_a_worker_that_printed_nothing_is_no_empty_answer(service: Service) -> None:
    shown = service.ctl("logs", "cpu0")
    assert shown.returncode == 0
    assert shown.stdout or "have printed nothing" in shown.stderr
    assert service.ctl("logs", "gpu7").returncode == 4

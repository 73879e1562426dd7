"""A service that is told to stop while it starts ends at once, cleanly, and leaves nothing."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .service import HANDLERS, Service

CONFIG = f"""
[models.double]
handler = "{HANDLERS}:Double"
"""

#: A driver that does not come back from its first call.
SILENT_DRIVER = """
import time

class Silent:
    def init(self):
        time.sleep(600)
"""

#: Far more than it takes, far less than any limit that would end it anyway.
QUICK_S = 15.0


def catches(service: Service, number: signal.Signals) -> bool:
    """Before this Python itself is not up yet, and a signal does what it does to any program."""
    assert service.process
    try:
        text = Path(f"/proc/{service.process.pid}/status").read_text()
    except OSError:
        return False
    mask = next(line for line in text.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def has(service: Service, title: str) -> bool:
    return any(title in " ".join(_words(p)) for p in service.processes())


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


MOMENTS: dict[str, Callable[[Service], bool]] = {
    "as soon as it can hear": lambda s: catches(s, signal.SIGTERM),
    "with its run directory taken": lambda s: (s.run_dir / "lock").exists(),
    "while the proxy starts": lambda s: has(s, "gpusup.proxy") or has(s, "gpusup: proxy"),
    "while the zygote imports": lambda s: has(s, "gpusup: zygote"),
    "when it answers": lambda s: bool(s.try_status()),
}


def ends(service: Service, number: signal.Signals) -> None:
    assert service.process
    children = service.processes()
    service.process.send_signal(number)
    assert service.process.wait(QUICK_S) == 0, service.log()
    assert "Traceback" not in service.log()
    service.until(lambda: not [p for p in children if _lives(p)], QUICK_S)
    assert not list(service.run_dir.glob("*.sock"))


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_while_starting_ends_it_at_once(short_path: Path, moment: str) -> None:
    number = signal.SIGINT if list(MOMENTS).index(moment) % 2 else signal.SIGTERM
    service = Service(short_path, CONFIG)
    try:
        service.start(wait_ready=False)
        service.until(lambda: MOMENTS[moment](service))
        ends(service, number)
    finally:
        service.end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_moment_will_do(short_path: Path, seed: int) -> None:
    service = Service(short_path, CONFIG)
    try:
        service.start(wait_ready=False)
        service.until(lambda: catches(service, signal.SIGTERM))
        time.sleep(random.Random(seed).uniform(0, 3))
        ends(service, signal.SIGTERM)
    finally:
        service.end()


def test_a_driver_that_does_not_answer_delays_no_stop(short_path: Path) -> None:
    driver = short_path / "silent_driver.py"
    driver.write_text(SILENT_DRIVER)
    service = Service(short_path, f'{CONFIG}\n[probe]\nlibrary = "{driver}:Silent"\n')
    try:
        service.start(wait_ready=False)
        service.until(lambda: has(service, "gpusup: zygote"))
        assert "listening on" not in service.log()  # it looks for devices first
        ends(service, signal.SIGTERM)
    finally:
        service.end()

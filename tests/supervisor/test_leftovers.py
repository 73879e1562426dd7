from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusup.supervisor import leftovers
from gpusup.supervisor.family import read_process
from gpusup.supervisor.leftovers import RUN_MARKER, claim, end, find, token

from .processes import gone

#: A supervisor with a worker that has forked something away and started a program.
SUPERVISOR = """
import asyncio, os, sys, time
from pathlib import Path
from gpusup.supervisor import leftovers
from gpusup.supervisor.family import Family
from gpusup.worker import progress
import setproctitle

async def main():
    ended = leftovers.claim(Path(sys.argv[1]))
    family = Family()
    if sys.argv[2] == "janitor":
        family.start_janitor(sys.executable)
    page = progress.create("cpu0.1@" + leftovers.token())
    r, w = os.pipe()
    if os.fork() == 0:
        setproctitle.setproctitle("gpusup: worker cpu0 m@1 (generation 1)")
        forked = os.fork()
        if forked == 0:
            os.setsid(); os.close(1); time.sleep(1000)
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=2)
        os.write(w, f"{forked} {child.pid}".encode())
        os._exit(0)
    print(len(ended), os.read(r, 100).decode(), flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


class Killed:
    """A supervisor that was killed; `left` is what its worker had started."""

    def __init__(self, run_dir: Path, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(run_dir), how], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        words = [int(word) for word in self.process.stdout.readline().split()]
        self.found_before, self.left = words[0], words[1:]
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(autouse=True)
def unmarked() -> Iterator[None]:
    os.environ.pop(RUN_MARKER, None)
    yield
    os.environ.pop(RUN_MARKER, None)


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.state != "Z"


async def test_when_the_supervisor_is_killed_nothing_stays_behind(tmp_path: Path) -> None:
    killed = Killed(tmp_path, "janitor")
    assert len(killed.left) == 2
    for pid in killed.left:
        await gone(pid)


async def test_a_new_supervisor_ends_what_the_one_before_it_left(tmp_path: Path) -> None:
    killed = Killed(tmp_path, "alone")
    assert all(alive(pid) for pid in killed.left)
    other = tmp_path / "other"
    other.mkdir()
    assert claim(other) == []
    assert all(alive(pid) for pid in killed.left), "that run directory is none of ours"
    assert sorted(claim(tmp_path)) == sorted(killed.left)
    for pid in killed.left:
        await gone(pid)


def test_a_janitor_does_not_touch_the_next_supervisor_s_processes(tmp_path: Path) -> None:
    claim(tmp_path)
    first = token()
    del os.environ[RUN_MARKER]
    claim(tmp_path)
    assert token() != first
    assert token().split(".")[0] == first.split(".")[0]
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert list(find(token())) == [process.pid]
        assert end(first) == []
        assert alive(process.pid)
        assert end(token()) == [process.pid]
        assert process.wait() == -signal.SIGKILL


def test_after_an_upgrade_in_place_a_claim_ends_nothing(tmp_path: Path) -> None:
    claim(tmp_path)
    first = token()
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert claim(tmp_path) == []
        assert token() == first
        assert alive(process.pid)
        process.kill()


def test_before_a_claim_nothing_is_marked() -> None:
    assert leftovers.token() == ""

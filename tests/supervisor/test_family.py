from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpusup.supervisor import family as fam
from gpusup.supervisor.family import Family, become_subreaper, clean_env, kill_session, read_process

from .processes import Told, gone


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    become_subreaper()
    yield
    Family().reap_orphans(time.monotonic(), patience_s=0.0)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def run(
    code: str, env: dict[str, str] | None = None, *, new_session: bool = True
) -> tuple[int, int]:
    """Start it; returns its pid and the first number it prints."""
    read_fd, write_fd = os.pipe()
    pid = Family().spawn(
        python(code), env=clean_env(env), output_fd=write_fd, new_session=new_session
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        return pid, int(file.readline())


async def test_an_exit_code_is_told_once() -> None:
    family, told = Family(), Told()
    pid = family.spawn(python("raise SystemExit(78)"), env=clean_env())
    family.watch(pid, told)
    assert await told.next() == (78, "")
    assert told.empty
    assert read_process(pid) is None


async def test_a_signal_is_a_negative_returncode_with_its_name() -> None:
    family, told = Family(), Told()
    pid = family.spawn(["sleep", "100"], env=clean_env())
    family.watch(pid, told)
    os.kill(pid, signal.SIGSEGV)
    returncode, words = await told.next()
    assert returncode == -signal.SIGSEGV
    assert str(words).startswith("SIGSEGV")


async def test_a_child_that_was_dead_before_it_was_watched_is_told_too() -> None:
    family, told = Family(), Told()
    pid = family.spawn(["true"], env=clean_env())
    await gone(pid)
    family.watch(pid, told)
    assert await told.next() == (0, "")


async def test_without_pidfd_the_end_is_found_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    family, told = Family(), Told()
    family.watch(family.spawn(python("raise SystemExit(3)"), env=clean_env()), told)
    assert await told.next() == (3, "")


async def test_before_a_dead_leader_is_collected_its_pid_is_still_its_own() -> None:
    family, told = Family(), Told()
    states: list[str] = []

    def look() -> None:
        process = read_process(pid)
        states.append(process.state if process else "gone")

    pid = family.spawn(["true"], env=clean_env(), new_session=True)
    family.watch(pid, told, look)
    await told.next()
    assert states == ["Z"]


FORKED_DAEMON = """
import os, signal, time
import setproctitle
setproctitle.setproctitle("gpusup: worker cpu0 digits@1 (generation 5)")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(w, str(os.getpid()).encode())
        time.sleep(1000)
    os._exit(0)
os.wait()
print(os.read(r, 20).decode(), flush=True)
time.sleep(1000)
"""


async def test_what_a_worker_forked_away_dies_with_it() -> None:
    pid, daemon = await run(FORKED_DAEMON)
    kill_session(pid, "cpu0", 5)
    await gone(pid)
    await gone(daemon)


async def test_what_a_worker_forked_away_is_not_killed_for_another_one() -> None:
    pid, daemon = await run(FORKED_DAEMON)
    assert kill_session(0, "cpu0", 4) == 0
    assert kill_session(0, "cpu1", 5) == 0
    process = read_process(daemon)
    assert process is not None
    assert process.state != "Z"
    kill_session(pid, "cpu0", 5)
    await gone(daemon)


async def test_a_program_in_a_session_of_its_own_is_found_by_its_mark() -> None:
    code = """
import subprocess, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""
    pid, sleeper = await run(code, {fam.MARKER: "gpu1.2"})
    os.kill(pid, signal.SIGKILL)  # by somebody else: nobody could look at its tree before
    await gone(pid)
    assert kill_session(pid, "gpu1", 2) >= 1
    await gone(sleeper)


async def test_a_kill_before_the_worker_has_its_own_session_hits_only_the_worker() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    neighbour, _ = await run(code, new_session=False)
    pid, _ = await run(code, new_session=False)
    assert kill_session(pid, "cpu0", 1) == 1
    await gone(pid)
    process = read_process(neighbour)
    assert process is not None
    assert process.state == "S"
    kill_session(neighbour, "cpu0", 2)


async def test_orphans_are_collected_but_never_what_is_ours() -> None:
    code = """
import os
if os.fork() == 0:
    os.setsid()
    os._exit(78)
print(1, flush=True)
"""
    family = Family()
    parent = family.spawn(python(code), env=clean_env())
    # Of code that will wait for it, but takes its time.
    theirs = subprocess.Popen(["true"])  # noqa: ASYNC220
    ours = family.spawn(["true"], env=clean_env())
    for pid in (parent, theirs.pid, ours):
        await gone(pid)
    told = Told()
    family.watch(parent, told)
    await told.next()
    family.reap_orphans(100.0)
    assert theirs.wait() == 0
    family.reap_orphans(102.5)
    family.watch(ours, told)
    assert await told.next() == (0, "")
    left = [read_process(pid) for pid in fam.children(os.getpid())]
    assert [p for p in left if p and p.state == "Z"] == []


def test_children_do_not_see_what_systemd_told_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("LISTEN_FDS", "1")
    env = clean_env({"A": "b"})
    assert env["A"] == "b"
    assert "NOTIFY_SOCKET" not in env
    assert "LISTEN_FDS" not in env


def test_a_program_that_is_not_there_is_an_error_of_the_caller() -> None:
    with pytest.raises(FileNotFoundError):
        Family().spawn(["/no/such/program"], env={})

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpusup.supervisor import zygotes
from gpusup.supervisor.family import Family, become_subreaper, read_process
from gpusup.supervisor.launcher import Logs, WorkerProcess
from gpusup.supervisor.zygotes import ZygoteLauncher

from .processes import Told, gone, script
from .test_launcher import none_left, spec

FAKE = str(Path(__file__).parent / "fake_zygote.py")


class House:
    """A launcher with a fake zygote, and what it tells."""

    def __init__(self, how: str = "", python: str = sys.executable) -> None:
        become_subreaper()
        self.lines, self.notes = Told(), Told()
        self.started, self.failed, self.exited = Told(), Told(), Told()
        self.family = Family()
        self.launcher = ZygoteLauncher(
            self.family, Logs(200, self.lines), python, preload=("json", "re"),
            command=(FAKE, "--how", how), on_note=self.notes,
        )  # fmt: skip

    def launch(self, slot: str = "cpu0", python: str = "") -> WorkerProcess:
        return self.launcher.launch(spec(slot), python, self.started, self.failed, self.exited)

    async def line(self, slot: str) -> str:
        while True:
            who, line = await self.lines.next()
            if who == slot:
                return str(line)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    built = House()
    yield built
    built.launcher.close()


def by_exec(folder: Path) -> str:
    """An interpreter that runs zygotes truly, and says so instead of running a worker."""
    body = f"""
import os, sys
if "gpusup.worker" in sys.argv:
    print("by exec", flush=True)
    sys.exit(7)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
    return script(folder, "python", body)


async def test_a_worker_is_forked_is_our_child_and_its_end_is_told(house: House) -> None:
    worker = house.launch()
    (pid,) = await house.started.next()
    assert isinstance(pid, int)
    process = read_process(pid)
    assert process is not None
    assert process.parent == os.getpid()
    assert process.session == pid
    assert await house.line("cpu0") == "hello from cpu0 marked cpu0.1"
    assert (await house.notes.next())[0] == f"zygote {sys.executable}: preload json,re"
    worker.signal("KILL")
    assert await house.exited.next() == (-signal.SIGKILL, "SIGKILL")


async def test_many_that_are_asked_for_before_the_zygote_is_ready_all_come(house: House) -> None:
    workers = [house.launch(f"cpu{n}") for n in range(8)]
    pids = {(await house.started.next())[0] for _ in range(8)}
    assert len(pids) == 8
    assert {worker.pid for worker in workers} == pids
    for worker in workers:
        worker.signal("KILL")
    for _ in workers:
        await house.exited.next()
    assert house.launcher.state()[0]["starts"] == 1


async def test_a_dead_zygote_takes_no_worker_with_it_and_is_replaced(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.launch()
    (pid,) = await house.started.next()
    assert isinstance(pid, int)
    await house.notes.next()
    os.kill(house.launcher.state()[0]["pid"], signal.SIGKILL)
    assert "ended (SIGKILL)" in str(await house.notes.next())
    process = read_process(pid)
    assert process is not None
    assert process.state != "Z"
    assert "preload" in str(await house.notes.next())  # the next one is ready
    assert house.launcher.state()[0]["starts"] == 2
    house.launch("cpu1")
    await house.started.next()
    for one in (pid,):
        os.kill(one, signal.SIGKILL)
    await house.exited.next()


@pytest.mark.parametrize("how", ["dies", "dies-later", "refuses"])
async def test_what_a_zygote_can_not_do_is_done_by_exec(tmp_path: Path, how: str) -> None:
    house = House(how, by_exec(tmp_path))
    house.launch()
    await house.started.next()
    assert await house.line("cpu0") == "by exec"
    assert await house.exited.next() == (7, "by exec")
    house.launcher.close()
    assert house.failed.empty


async def test_a_zygote_that_hangs_at_its_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "START_LIMIT_S", 0.2)
    house = House("never-ready", by_exec(tmp_path))
    house.launch()
    assert await house.line("cpu0") == "by exec"
    assert "was not ready within 0.2 s" in str(await house.notes.next())
    house.launcher.close()


async def test_a_kill_before_the_fork_calls_the_start_off(tmp_path: Path) -> None:
    house = House("never-ready")
    worker = house.launch()
    worker.signal("KILL")
    assert await house.failed.next() == ("ended before it was started",)
    assert worker.exited
    house.launcher.close()
    assert house.started.empty


async def test_a_worker_that_is_forked_too_late_is_killed(house: House) -> None:
    worker = house.launch()
    worker.signal("KILL")
    await house.failed.next()
    house.launch("cpu1")
    (pid,) = await house.started.next()
    assert isinstance(pid, int)
    left = [p for p in house.family._ours if p not in (pid, house.launcher.state()[0]["pid"])]
    for one in left:
        await gone(one)
    os.kill(pid, signal.SIGKILL)
    await house.exited.next()
    assert house.exited.empty


async def test_an_interpreter_that_is_not_there_fails_its_own_slot_only(house: House) -> None:
    house.launch("cpu1", "/no/such/python")
    assert await house.failed.next() == ("cannot start /no/such/python: No such file or directory",)
    house.launch("cpu0")
    await house.started.next()
    worker = house.launch("cpu2")
    await house.started.next()
    worker.signal("KILL")
    await house.exited.next()


async def test_without_a_descriptor_for_its_output_a_worker_fails_and_the_next_one_starts(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.launch("cpu0")
    await house.started.next()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", none_left)
        house.launch("cpu1")
    said = f"cannot start {sys.executable}: Too many open files"
    assert await house.failed.next() == (said,)
    worker = house.launch("cpu2")
    await house.started.next()
    worker.signal("KILL")
    await house.exited.next()


async def test_a_zygote_that_has_hung_up_is_not_handed_over(house: House) -> None:
    house.launcher.start()
    await house.notes.next()
    (zygote,) = house.launcher._zygotes.values()
    assert zygote._channel is not None
    zygote._channel.close()
    assert house.launcher.export() == {"zygotes": []}
    assert zygote.pid is not None
    await gone(zygote.pid)


async def test_a_zygote_goes_on_after_it_was_handed_over(house: House) -> None:
    first = house.launch()
    await house.started.next()
    second = House()
    exported = house.launcher.export()
    second.launcher.restore(exported)
    worker = second.launch("cpu1")
    await second.started.next()
    assert second.launcher.state()[0]["starts"] == 1
    worker.signal("KILL")
    assert await second.exited.next() == (-signal.SIGKILL, "SIGKILL")
    first.signal("KILL")
    await house.exited.next()
    second.launcher.close()

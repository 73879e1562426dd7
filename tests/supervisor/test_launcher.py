from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gpusup.supervisor.family import Family, become_subreaper, read_process
from gpusup.supervisor.launcher import ExecLauncher, Logs, WorkerProcess
from gpusup.worker.wire import WorkerSpec

from .processes import Told, gone, script


def spec(slot: str = "cpu0", **env: str) -> WorkerSpec:
    return WorkerSpec(
        slot=slot, generation=1, model="m", version="1", device="cpu", device_uuid="",
        control_path="/nowhere", data_path="/nowhere", config={}, env=env,
    )  # fmt: skip


class Launched:
    """One launch with its three callbacks."""

    def __init__(self, launcher: ExecLauncher, python: str, **more: str) -> None:
        self.started, self.failed, self.exited = Told(), Told(), Told()
        self.worker = launcher.launch(spec(**more), python, self.started, self.failed, self.exited)


def launcher(lines: Told | None = None) -> ExecLauncher:
    become_subreaper()
    return ExecLauncher(Family(), Logs(200, lines), sys.executable)


async def test_a_worker_gets_its_spec_its_page_and_a_session_of_its_own(tmp_path: Path) -> None:
    body = """
import argparse, os, time
from gpusup.worker import progress, wire
p = argparse.ArgumentParser()
p.add_argument("-m"); p.add_argument("--spec-fd", type=int); p.add_argument("--parent")
p.add_argument("--progress-fd", type=int)
a = p.parse_args()
spec = wire.decode_spec(open(a.spec_fd, "rb").read())
w = progress.Writer(a.progress_fd)
w.load_moved(42)
fds = sorted(int(f) for f in os.listdir("/proc/self/fd"))
print(spec.slot, os.getsid(0) == os.getpid(), os.environ["GPUSUP_SLOT"], os.environ["X"],
      int(a.parent) == os.getppid(), flush=True)
print("extra", [f for f in fds if f > 2 and f not in (a.spec_fd, a.progress_fd)], flush=True)
time.sleep(1000)
"""
    lines = Told()
    one = Launched(launcher(lines), script(tmp_path, "python", body), X="y")
    (pid,) = await one.started.next()
    assert await lines.next() == ("cpu0", "cpu0 True cpu0.1 y True")
    extra = (await lines.next())[1]
    assert str(extra).count(",") <= 1, f"only what the interpreter opened itself: {extra}"
    assert one.worker.progress.read().load_bytes == 42
    one.worker.signal("KILL")
    assert await one.exited.next() == (-signal.SIGKILL, "SIGKILL")
    assert one.worker.pid == pid
    one.worker.signal("TERM")  # quiet: it is gone
    assert one.exited.empty
    assert one.failed.empty


async def test_an_exit_brings_the_last_line_it_printed(tmp_path: Path) -> None:
    body = """
import sys
print("Traceback ...")
sys.exit("ModuleNotFoundError: No module named 'mine'")
"""
    one = Launched(launcher(), script(tmp_path, "python", body))
    assert await one.exited.next() == (1, "ModuleNotFoundError: No module named 'mine'")
    assert "Traceback ..." in one.worker.log.last()


async def test_an_interpreter_that_is_not_there_is_told_not_raised() -> None:
    one = Launched(launcher(), "/no/such/python")
    assert await one.failed.next() == ("cannot start /no/such/python: No such file or directory",)
    assert one.started.empty
    assert one.exited.empty


async def test_without_descriptors_a_start_fails_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = launcher()
    gc.collect()  # what earlier tests left is not to be collected in between
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        Launched(starts, sys.executable)  # not even for its progress page
    monkeypatch.undo()
    for name in ("pipe2", "dup"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, none_left)
            if name == "dup":
                with pytest.raises(OSError, match="Too many open files"):
                    Launched(starts, sys.executable)
            else:
                one = Launched(starts, sys.executable)
                said = f"cannot start {sys.executable}: Too many open files"
                assert await one.failed.next() == (said,)
                one.worker.forget()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def none_left(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_what_a_worker_started_goes_with_it_when_it_dies_by_itself(tmp_path: Path) -> None:
    body = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(1000)
time.sleep(1000)
"""
    lines = Told()
    one = Launched(launcher(lines), script(tmp_path, "python", body))
    (pid,) = await one.started.next()
    assert isinstance(pid, int)
    grandchildren = [int(str((await lines.next())[1])) for _ in range(2)]
    os.kill(pid, signal.SIGKILL)
    await one.exited.next()
    for grandchild in grandchildren:
        await gone(grandchild)


async def test_kill_right_after_launch_hits_the_worker_and_nobody_else(tmp_path: Path) -> None:
    python = script(tmp_path, "python", "import time; time.sleep(1000)")
    launching = launcher()
    for generation in range(10):
        one = Launched(launching, python, slot="cpu0")
        one.worker.signal("KILL")
        returncode, _ = await one.exited.next()
        assert returncode == -signal.SIGKILL, generation
    assert read_process(os.getpid()) is not None


async def test_a_worker_is_taken_over_with_its_page_and_its_output(tmp_path: Path) -> None:
    body = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(0)))
print("up", flush=True)
while True: time.sleep(100)
"""
    family, lines = Family(), Told()
    logs = Logs(200, lines)
    first = ExecLauncher(family, logs, sys.executable)
    one = Launched(first, script(tmp_path, "python", body))
    await one.started.next()
    await lines.next()
    exported = one.worker.export()
    exited = Told()
    worker: WorkerProcess = ExecLauncher(family, logs, sys.executable).adopt(exported, exited)
    worker.signal("TERM")
    assert await lines.next() == ("cpu0", "bye")
    assert await exited.next() == (0, "")
    assert one.exited.empty
    family.reap_orphans(time.monotonic(), patience_s=0.0)

"""The processes below the supervisor: starting them, learning of their end, ending all of a worker.

No SIGCHLD and no `wait` on everybody: each process of ours has its own descriptor, so nobody's
exit status can be taken by somebody else. What workers leave behind is adopted (the supervisor is
a sub-reaper), killed with its worker, and reaped without a word.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from gpusup.conf.precedence import follow

from .leftovers import RUN_MARKER, token

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.01
#: A zombie that nobody collected for so long has nobody who would.
_ORPHAN_S: Final = 2.0

#: Says to which worker a process belongs; inherited by everything a worker starts.
MARKER: Final = "GPUSUP_SLOT"

#: What systemd tells the supervisor is not for its children.
_PRIVATE: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID",
    "LISTEN_FDNAMES", "MAINPID", "FDSTORE", "GPUSUP_REEXEC_FD",
)  # fmt: skip

OnExit = Callable[[int, str], None]


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str  # as in /proc: R, S, D, Z, ...


def become_subreaper() -> None:
    """Adopt what our descendants leave behind. Raises OSError where the kernel can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become sub-reaper: {os.strerror(number)}")


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment as a child may have it."""
    env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    env.update(extra or {})
    return env


def _without_marks() -> dict[str, str]:
    env = clean_env()
    for name in (RUN_MARKER, MARKER):
        env.pop(name, None)
    return env


def read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything, also parentheses and spaces.
    fields = text[text.rfind(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode())


def children(pid: int) -> list[int]:
    """Direct children, dead ones that nobody collected included."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if not os.path.exists("/proc/thread-self/children"):
                return _children_by_scan(pid)
        except OSError:
            continue
    return found


def _children_by_scan(pid: int) -> list[int]:
    """For kernels without /proc/PID/task/TID/children."""
    every = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process.pid for process in every if process and process.parent == pid]


def descendants(pid: int) -> list[Process]:
    found: list[Process] = []
    todo = children(pid)
    seen = {pid}
    while todo:
        child = todo.pop()
        if child in seen:
            continue
        seen.add(child)
        process = read_process(child)
        if process:
            found.append(process)
            todo += children(child)
    return found


def belongs(pid: int, slot: str, generation: int) -> bool:
    """Whether a process carries the mark of this worker, wherever it has fled to.

    What a worker exec'ed shows the marker in its environment; what it only forked still shows the
    worker's title.
    """
    with suppress(OSError):
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{MARKER}={slot}.{generation}".encode() in file.read().split(b"\0"):
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            title = file.read().replace(b"\0", b" ").decode(errors="replace")
        return title.startswith(f"gpusup: worker {slot} ") and f"(generation {generation})" in title
    return False


def kill_session(leader: int, slot: str, generation: int) -> int:
    """SIGKILL to a worker and to all it started. Returns how many were hit; 0 if all are gone.

    Only our own descendants are looked at: another service's worker may have the same name.
    """
    hit: set[int] = set()
    if leader > 0:
        hit.update(p.pid for p in descendants(leader) if p.state != "Z")
        process = read_process(leader)
        if process and process.state != "Z":
            hit.add(leader)
        # In the first milliseconds the worker is still in our session: then only itself.
        if process and process.session == leader:
            with suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
        for pid in hit:
            kill(pid)
    for _ in range(5):  # again, for what was forked meanwhile
        more = [
            p.pid
            for p in descendants(os.getpid())
            if p.state != "Z"
            and p.pid not in hit
            and ((leader > 0 and p.session == leader) or belongs(p.pid, slot, generation))
        ]
        if not more:
            break
        for pid in more:
            kill(pid)
        hit.update(more)
    return len(hit)


def kill(pid: int) -> None:
    """SIGKILL; quiet if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def describe(code: int, status: int) -> tuple[int, str]:
    """(si_code, si_status) of waitid -> (returncode, words); a signal is a negative returncode."""
    if code == os.CLD_EXITED:
        return status, ""
    try:
        name = signal.Signals(status).name
    except ValueError:
        name = f"signal {status}"
    return -status, f"{name}, core dumped" if code == os.CLD_DUMPED else name


class Watch:
    """Waits for the end of one child, then collects it. `on_exit(returncode, words)` comes once;
    the words say which signal it was, and are empty after an ordinary exit.

    `before_reap` runs while the dead process still holds its pid and its session id, so that
    nobody else can have them.
    """

    def __init__(
        self, pid: int, on_exit: OnExit, before_reap: Callable[[], Any] | None = None
    ) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._before_reap = before_reap
        self._done = False
        self._tries = 0
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
            self._loop.call_soon(self._finish, -signal.SIGKILL, "gone, exit status unknown")
        except OSError:  # this kernel or its sandbox has no pidfd
            self._pidfd = -1
            self._loop.call_soon(self._again)
        else:
            self._loop.add_reader(self._pidfd, self._dead)

    @property
    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        """Forget the child without collecting it."""
        self._done = True
        self._release()

    def _release(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _dead(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._collect(os.P_PIDFD, self._pidfd)

    def _collect(self, kind: int, target: int) -> None:
        try:
            seen = os.waitid(kind, target, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # A worker that died before its first parent did is not ours yet.
            self._tries += 1
            if self._tries < 100:
                self._loop.call_later(_POLL_S, self._again)
            else:
                self._finish(-signal.SIGKILL, "gone, exit status unknown")
            return
        if seen is None:
            self._loop.call_later(_POLL_S, self._again)
            return
        if self._before_reap:
            self._before_reap()
        with suppress(ChildProcessError):
            os.waitid(kind, target, os.WEXITED | os.WNOHANG)
        self._finish(*describe(seen.si_code, seen.si_status))

    def _again(self) -> None:
        if self._done:
            return
        if self._pidfd >= 0:
            self._collect(os.P_PIDFD, self._pidfd)
        else:
            self._collect(os.P_PID, self.pid)

    def _finish(self, returncode: int, words: str) -> None:
        if not self._done:
            self._done = True
            self._release()
            self._on_exit(returncode, words)


class Family:
    """Who is ours. One for the supervisor; launcher, zygotes, proxies and probe share it."""

    def __init__(self) -> None:
        self._ours: set[int] = set()
        self._zombies: dict[int, float] = {}
        self._reaper: asyncio.TimerHandle | None = None
        self._janitor: Watch | None = None

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        output_fd: int | None = None,
        new_session: bool = False,
    ) -> int:
        """Start a program and return its pid. Raises OSError if it can't be exec'ed.

        All other descriptors are closed in it. Must run in the main thread: a parent-death signal
        comes when the creating *thread* ends.
        """
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            close_fds=True,
            pass_fds=pass_fds,
            start_new_session=new_session,
        )
        # We collect it ourselves. Without this, Popen would do so when the object is dropped, or
        # when the next one is made, and the exit status would be lost.
        process.returncode = 0
        self._ours.add(process.pid)
        if new_session:
            follow(process.pid)
        return process.pid

    def adopt(self, pid: int) -> None:
        """Of a process that a zygote made for us, or that we had before an upgrade."""
        self._ours.add(pid)

    def watch(
        self, pid: int, on_exit: OnExit, before_reap: Callable[[], Any] | None = None
    ) -> Watch:
        def gone(returncode: int, words: str) -> None:
            self._ours.discard(pid)
            on_exit(returncode, words)

        return Watch(pid, gone, before_reap)

    def start_janitor(self, python: str, pid: int = 0) -> None:
        """Have a process that ends what workers leave behind when we are killed. After `claim`.

        `pid`: of one that is there already, after an upgrade in place. Raises OSError.
        """
        if not pid:
            argv = [python, "-m", "gpusup.supervisor.leftovers", "--supervisor", str(os.getpid())]
            env = _without_marks()
            pid = self.spawn([*argv, "--token", token()], env=env, new_session=True)
        self.adopt(pid)
        self._janitor = self.watch(pid, lambda returncode, words: None)

    def let_go_of_janitor(self) -> int:
        """Its pid, for `start_janitor` after an upgrade in place; 0 if there is none."""
        if self._janitor is None or self._janitor.done:
            return 0
        self._janitor.cancel()
        return self._janitor.pid

    def stop_janitor(self) -> None:
        """Before an orderly end: there is nothing left to do for it."""
        if self._janitor and not self._janitor.done:
            kill(self._janitor.pid)

    def start_reaper(self, every_s: float = 1.0) -> None:
        loop = asyncio.get_running_loop()

        def sweep() -> None:
            self.reap_orphans(time.monotonic())
            self._reaper = loop.call_later(every_s, sweep)

        self._reaper = loop.call_later(every_s, sweep)

    def stop_reaper(self) -> None:
        if self._reaper:
            self._reaper.cancel()
            self._reaper = None

    def reap_orphans(self, now: float, patience_s: float = _ORPHAN_S) -> int:
        """Collect dead children that are not ours and that nobody else has collected for a while.

        The patience is for code that starts a process by itself and waits for it.
        """
        reaped = 0
        zombies: dict[int, float] = {}
        for pid in children(os.getpid()):
            if pid in self._ours:
                continue
            process = read_process(pid)
            if not process or process.state != "Z":
                continue
            since = self._zombies.get(pid, now)
            if now - since < patience_s:
                zombies[pid] = since
                continue
            with suppress(ChildProcessError):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG):
                    reaped += 1
        self._zombies = zombies
        return reaped

"""What workers started and nobody would end: found by its mark, and ended when we are gone.

Workers die with the supervisor (a death signal, and the end of their socket). What they forked has
neither. So a small process waits for the supervisor's end and then looks for what carries its mark;
and a new supervisor looks for what its predecessor in the same run directory has left.

    python -m gpusup.supervisor.leftovers --supervisor PID --token T
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

#: The environment variable that marks all we start, as "<run directory>.<supervisor>".
RUN_MARKER: Final = "GPUSUP_RUN"
_WATCH_S: Final = 5.0
_EVERY_S: Final = 0.05


def claim(run_dir: Path) -> list[int]:
    """Mark all that is started from now on as ours, and end what a predecessor has left behind.

    Only for who holds the lock of `run_dir`: whoever else started something there is dead.
    Returns the processes that were ended. After an upgrade in place all is marked already, and
    nothing is ended.
    """
    place = f"{zlib.crc32(os.fsencode(run_dir.resolve())):08x}"
    if token().startswith(f"{place}.{os.getpid()}-"):
        return []
    ended = end(f"{place}.")
    os.environ[RUN_MARKER] = f"{place}.{os.getpid()}-{time.monotonic_ns():x}"
    return ended


def token() -> str:
    """The mark of all we start; "" before `claim`."""
    return os.environ.get(RUN_MARKER, "")


def find(mark: str) -> Iterator[int]:
    """Processes whose mark begins so, ourselves excepted."""
    wanted_environ = f"{RUN_MARKER}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError):
            if _is_marked(name, wanted_environ, mark):
                yield int(name)


def _is_marked(pid: str, wanted_environ: bytes, mark: str) -> bool:
    if any(
        entry.startswith(wanted_environ)
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ):
        return True
    # A title is written over the environment; then the progress page's name tells.
    if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"gpusup: "):
        return False
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith("/memfd:gpusup-progress-") and f"@{mark}" in link:
                return True
    return False


def end(mark: str) -> list[int]:
    """SIGKILL to all whose mark begins so."""
    found = list(find(mark))
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return found


def main() -> None:
    """Wait for the end of the supervisor, then end what is left until nothing is."""
    parser = argparse.ArgumentParser(prog="python -m gpusup.supervisor.leftovers")
    parser.add_argument("--supervisor", type=int, required=True)
    parser.add_argument("--token", required=True)
    given = parser.parse_args()
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle("gpusup: janitor")
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # ours is the supervisor's end, not a terminal's
    _outlive(given.supervisor)
    until = time.monotonic() + _WATCH_S
    # Twice nothing: what is being forked at this moment shows in the second look.
    quiet = 0
    while quiet < 2 and time.monotonic() < until:
        quiet = 0 if end(given.token) else quiet + 1
        time.sleep(_EVERY_S)


def _outlive(supervisor: int) -> None:
    """Return when that process, our parent, is dead. An upgrade in place does not end it."""
    try:
        pidfd = os.pidfd_open(supervisor)
    except ProcessLookupError:
        return
    except OSError:
        while os.getppid() == supervisor:
            time.sleep(0.25)
        return
    if os.getppid() == supervisor:  # else it died meanwhile, and the pid may be another's
        select.select([pidfd], [], [])
    os.close(pidfd)


if __name__ == "__main__":
    main()

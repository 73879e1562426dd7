"""Which processes the kernel's scheduler lets go first when there are more than cores."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Final

#: What serves goes before what merely computes. As in gpusup.service.
NICE: Final = -20
#: Threads that prepare much at length are behind those that pass on, by so much, but before what
#: has no precedence: by the kernel's weights (sched_prio_to_weight) that keeps 3 % of such a core.
BEHIND: Final = 5
#: The same for a group of the scheduler.
GROUP_NICE: Final = -20


def prefer(pid: int) -> bool:
    """Let a process that has just been started, and all that it will start, go before others.

    False: we are not allowed to (it takes root or CAP_SYS_NICE), or it has ended.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    except (PermissionError, ProcessLookupError):
        return False
    follow(pid)
    return True


def step_back() -> None:
    """The calling thread goes behind its process's others; only where those have precedence."""
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    if nice < 0:
        os.setpriority(os.PRIO_PROCESS, thread, min(0, nice + BEHIND))


def follow(pid: int = 0) -> None:
    """Make a new session count as its process does: where the kernel groups sessions (see
    sched(7), the autogroup feature), each begins as an equal of all others. 0: our own.

    What goes first goes first by as much as can be: a group's weight is shared out among the cores
    that it runs on, so that eight threads of a group at -10 weigh no more than eight at 0.
    """
    with suppress(OSError):
        if nice := os.getpriority(os.PRIO_PROCESS, pid):
            with open(f"/proc/{pid or 'self'}/autogroup", "w") as group:
                group.write(str(nice if nice > 0 else GROUP_NICE))

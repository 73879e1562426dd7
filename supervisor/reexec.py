"""Going on with new code in the same process: execve, with state and descriptors taken along.

    hand_over({"listeners": listeners.export(), "workers": [...], ...})     # does not return
    state = pick_up()                        # first thing in main; None after an ordinary start

The state is builtins. Every key in it that ends in `_fd` names a descriptor to keep. Children
stay ours (the pid is the same), so a pidfd need not travel: it is opened again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

#: Changes when a newer program could misread what an older one has exported.
SCHEMA: Final = 2
_VARIABLE: Final = "GPUSUP_REEXEC_FD"

#: Held back where nothing answers to them: while one program follows the other, and from the
#: opening of the sockets to the box that owns them. Their default action would end us.
OUR_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class ReexecError(Exception):
    """The upgrade can't be done, or what came over can't be used. One line for the operator."""


def descriptors(state: Any) -> Iterator[int]:
    """All values under keys that end in `_fd`, however deep."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if isinstance(key, str) and key.endswith("_fd"):
                if isinstance(value, int) and value >= 0:
                    yield value
            else:
                yield from descriptors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from descriptors(value)


def hand_over(state: Mapping[str, Any], argv: Sequence[str] = ()) -> NoReturn:
    """Replace this program by `argv` (default: the way it was started). Raises ReexecError.

    After an error nothing has changed but that the exported parts have let go of their
    descriptors; restore them from the same state.
    """
    try:
        data = msgspec.msgpack.encode({"schema": SCHEMA, "state": state})
        fd = os.memfd_create("gpusup-reexec", 0)  # inheritable
    except (OSError, TypeError, msgspec.MsgspecError) as error:
        raise ReexecError(f"cannot pack the state: {error}") from error
    kept = list(descriptors(state))
    command = list(argv) or [sys.executable, *sys.orig_argv[1:]]
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        for one in kept:
            os.set_inheritable(one, True)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, _VARIABLE: str(fd)})
    except OSError as error:
        for one in kept:
            os.set_inheritable(one, False)
        raise ReexecError(f"cannot start {command[0]}: {error.strerror}") from error
    finally:
        os.close(fd)


def pick_up() -> dict[str, Any] | None:
    """What the program before us has handed over. Raises ReexecError if we can't read it."""
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return None
    try:
        with os.fdopen(int(text), "rb") as file:
            file.seek(0)
            packed = msgspec.msgpack.decode(file.read())
        if packed["schema"] != SCHEMA:
            raise ReexecError(
                f"the state handed over has schema {packed['schema']}, this version reads {SCHEMA}"
            )
        state: dict[str, Any] = packed["state"]
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise ReexecError(f"cannot read the state handed over: {error}") from error
    # At once: nothing started from here on may inherit them.
    for fd in descriptors(state):
        os.set_inheritable(fd, False)
    return state

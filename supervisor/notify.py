"""Telling systemd how we are: sd_notify, without its library.

    notify = Notify.from_environment()
    notify.ready("8 workers")     # Type=notify: port and control socket answer
    notify.watchdog()             # from the main loop, after a full pass

Without NOTIFY_SOCKET every call does nothing.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress


class Notify:
    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        """`address`: a path, or "@name" in the abstract namespace; "" for nobody."""
        self.watchdog_s = watchdog_s  # 0: systemd wants no pings
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )

    @classmethod
    def from_environment(cls) -> Notify:
        watchdog_s = 0.0
        # A watchdog that was meant for our parent is none of our business.
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            with suppress(ValueError):
                watchdog_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
        return cls(os.environ.get("NOTIFY_SOCKET", ""), max(0.0, watchdog_s))

    @property
    def interval_s(self) -> float:
        """How often to ping; 0 for never. Half of the limit, as systemd advises."""
        return self.watchdog_s / 2

    def ready(self, status: str = "") -> None:
        self._send("READY=1", f"MAINPID={os.getpid()}", *_status(status))

    def status(self, text: str) -> None:
        self._send(*_status(text))

    def stopping(self, status: str = "") -> None:
        self._send("STOPPING=1", *_status(status))

    def reloading(self) -> None:
        """Before a reload or an upgrade in place; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """Starting or stopping will take so much longer from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket and lines:
            # A manager that doesn't listen must not stop us, not even by a full queue.
            with suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)


def _status(text: str) -> tuple[str, ...]:
    return (f"STATUS={' '.join(text.split())}",) if text else ()
